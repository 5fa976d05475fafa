"""Colours of places on a mesh, blended from all photos that see them."""

from dataclasses import dataclass

import numpy as np
import trimesh
from jaxtyping import Bool, Float
from PIL import Image
from scipy.spatial import KDTree

from f3rm_ext.data.gains import fit_log_gains
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.texture.atlas import Texels
from f3rm_ext.mesh.texture.photos import UNSEEN, Photo, Photos
from f3rm_ext.mesh.texture.rendering import interpolate
from f3rm_ext.mesh.texture.visibility import PhotoLookup, Places
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.open3d_library import RayCaster

CHUNK = 1 << 19
"""Places coloured at once."""
_SAMPLES = 20_000
"""Places on which exposures are compared."""
_COMPARED_PX = 1024
"""Longest side, about, of the photos that are compared: what they show of a gain does not depend on the size."""
_ANCHORS = 200_000
"""Coloured places from which unseen ones are filled."""
_NEAREST = 6
_DARKEST, _BRIGHTEST = 8.0, 247.0
"""Colours beyond are clipped and say nothing about a gain."""
_REFLECTION = 0.1
"""Difference of logarithms above which two photos show a reflection or a wrong surface rather than a gain."""


@dataclass
class Blend:
    """Colours of places."""

    colors: Float[np.ndarray, "texels 3"]
    """0 to 255; those of unseen places are filled from the nearest seen ones."""
    visible: Bool[np.ndarray, " texels"]
    """Places that at least one photo sees."""
    gains: Float[np.ndarray, "photos 3"]
    """Factors on the colours of the photos by which their exposures were balanced."""


def blend_photos(
    mesh: trimesh.Trimesh,
    texels: Texels,
    areas: Float[np.ndarray, " faces"],
    photos: Photos,
    balance: bool = True,
    on_progress: StageProgress = lambda stage, count, total: None,
) -> Blend:
    """Colours places on a mesh from photos; memory holds one photo at a time.

    Args:
        mesh: triangles, in the frame of the cameras.

    Raises:
        MeshError: no photo sees any place.
        CaptureError: a photo cannot be read.
    """
    caster = RayCaster(mesh.vertices, mesh.faces)
    vertices, normals = np.asarray(mesh.vertices, np.float32), np.asarray(mesh.face_normals, np.float32)
    points = np.empty((len(texels), 3), np.float32)
    for part in _chunks(len(texels)):
        points[part] = interpolate(vertices, np.asarray(mesh.faces)[texels.faces[part]], texels.weights[part])

    def places(which: np.ndarray | slice) -> Places:
        face = texels.faces[which]
        return Places(points[which], normals[face], areas[face])

    sampled = np.random.default_rng(0).permutation(len(texels))[:_SAMPLES]
    colors, weights = np.zeros((len(photos), len(sampled), 3), np.float32), np.zeros((len(photos), len(sampled)))
    if balance:
        for index, camera in enumerate(photos.cameras):
            small, photo = _shrink(camera, photos.read(index))
            # Texels are enlarged like the pixels, so that they weigh what they weigh at full size.
            areas_scale = float((camera.focal / small.focal).prod())
            compared = places(sampled)
            compared = compared._replace(areas=compared.areas * areas_scale)
            sample = PhotoLookup(small, photo, caster).look_up(compared)
            colors[index, sample.indices], weights[index, sample.indices] = sample.colors, sample.weights
            on_progress("Exposure", index + 1, len(photos))
    gains = find_gains(colors, weights)
    sums, total = np.zeros((len(texels), 3), np.float32), np.zeros(len(texels), np.float32)
    for index, camera in enumerate(photos.cameras):
        lookup = PhotoLookup(camera, photos.read(index), caster)
        for part in _chunks(len(texels)):
            sample = lookup.look_up(places(part))
            indices = part.start + sample.indices
            sums[indices] += sample.weights[:, None] * sample.colors * gains[index]
            total[indices] += sample.weights
        on_progress("Photos", index + 1, len(photos))
    visible = total > 0
    if not visible.any():
        raise MeshError(UNSEEN)
    sums[visible] /= total[visible, None]
    _fill(points, sums, visible, on_progress)
    return Blend(np.clip(sums, 0, 255, out=sums), visible, gains)


def _shrink(camera: Camera, photo: Photo) -> tuple[Camera, Photo]:
    """A camera and its photo at a whole fraction of their size, at :data:`_COMPARED_PX` or more."""
    factor = max(camera.width, camera.height) // _COMPARED_PX
    if factor < 2:
        return camera, photo
    colors = Image.fromarray(photo.colors).reduce(factor)
    valid = photo.valid
    if valid is not None:
        valid = np.asarray(Image.fromarray(valid.astype(np.uint8) * 255).reduce(factor)) == 255
    small = camera._replace(
        focal=camera.focal / factor, middle=camera.middle / factor, width=colors.width, height=colors.height
    )
    return small, Photo(np.asarray(colors), valid)


def _fill(points: np.ndarray, colors: np.ndarray, visible: np.ndarray, on_progress: StageProgress) -> None:
    """Gives unseen places the mean colour of the nearest visible ones in space, whatever chart they are on."""
    unseen = np.flatnonzero(~visible)
    if not len(unseen):
        return
    anchors = np.flatnonzero(visible)
    if len(anchors) > _ANCHORS:
        anchors = np.random.default_rng(0).choice(anchors, _ANCHORS, replace=False)
    tree = KDTree(points[anchors])
    count = min(_NEAREST, len(anchors))
    finished = 0
    for part in np.array_split(unseen, len(unseen) // CHUNK + 1):
        away, nearest = tree.query(points[part], k=[*range(1, count + 1)], workers=-1)  # type: ignore[arg-type]
        share = 1 / np.maximum(away, 1e-9)
        colors[part] = (colors[anchors[nearest]] * (share / share.sum(axis=1, keepdims=True))[..., None]).sum(axis=1)
        finished += len(part)
        on_progress("Unseen texels", finished, len(unseen))


def _chunks(count: int) -> list[slice]:
    return [slice(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]


def find_gains(
    colors: Float[np.ndarray, "photos samples 3"], weights: Float[np.ndarray, "photos samples"]
) -> Float[np.ndarray, "photos 3"]:
    """Returns the factor on each photo's colours, per channel, after which photos agree where they see the same place.

    Gains are 1 in geometric mean; see :func:`~f3rm_ext.data.gains.fit_log_gains`. Colours are 0 to 255, and weights 0
    where a photo does not see a sample.
    """
    gains = np.ones((len(colors), 3))
    for channel in range(3):
        values = colors[..., channel].astype(np.float64)
        use = (weights > 0) & (values > _DARKEST) & (values < _BRIGHTEST)
        use &= use.sum(axis=0) >= 2
        if use.any():
            gains[:, channel] = np.exp(fit_log_gains(np.log(np.where(use, values, 1.0)), weights * use, _REFLECTION))
    return gains
