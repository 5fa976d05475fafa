"""A mesh with a texture, or with vertex colours, from the photos of its capture."""

from dataclasses import dataclass

import numpy as np
import trimesh
from jaxtyping import Float
from PIL import Image
from trimesh.visual.color import ColorVisuals
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.box_contraction import BoxContraction
from f3rm_ext.mesh.options import TextureOptions
from f3rm_ext.mesh.texture.atlas import LARGEST_PX, Atlas, contract_mesh, texture_texels, unwrap, vertex_texels, weld
from f3rm_ext.mesh.texture.blending import blend_photos
from f3rm_ext.mesh.texture.photos import UNSEEN, Photos
from f3rm_ext.mesh.texture.seams import fill_outward, level_seams
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.open3d_library import RayCaster

_USED = 0.6
"""Share of a texture that charts cover, about."""
_PROBES = 4096
"""Rays of each photo from which the size of the texture is chosen."""
_DISTANT = 8.0
"""How far a mesh reaches, in radii of a contraction, whose background gets smaller charts."""


@dataclass(frozen=True)
class BakedMesh:
    """A coloured mesh and what is worth knowing of it."""

    mesh: trimesh.Trimesh
    """With a texture, or with vertex colours."""
    places: int
    """Number of texels or vertices that were coloured."""
    unseen: int
    """Number of those that no photo sees."""
    gains: Float[np.ndarray, "photos 3"]
    """Factors on the colours of the photos by which their exposures were balanced."""
    facts: dict[str, object]
    """Size of the texture and number of its charts, as JSON."""


def bake_texture(
    mesh: trimesh.Trimesh,
    photos: Photos,
    options: TextureOptions,
    on_progress: StageProgress = lambda stage, done, total: None,
) -> BakedMesh:
    """Returns the mesh with a texture from photos. Raises MeshError where charts do not fit, or no photo sees it."""
    on_progress("Charts", 0, 1)
    space = distant_background(mesh, photos)
    size_px = options.texture_size or choose_size(mesh, photos, space)
    atlas = unwrap(mesh, size_px, options.padding, options.texture_size is None, space)
    on_progress("Charts", 1, 1)
    texels = texture_texels(atlas)
    blend = blend_photos(atlas.mesh, texels, texel_areas(atlas), photos, options.balance_exposure, on_progress)
    level_seams(atlas, texels, blend.colors)
    picture = Image.fromarray(fill_outward(texels, blend.colors, atlas.size_px))
    visual = atlas.mesh.visual
    assert isinstance(visual, TextureVisuals)
    visual.material = PBRMaterial(name="photos", baseColorTexture=picture, metallicFactor=0.0, roughnessFactor=1.0)
    facts: dict[str, object] = {"texture_px": atlas.size_px, "charts": atlas.charts}
    return BakedMesh(atlas.mesh, len(texels), int((~blend.visible).sum()), blend.gains, facts)


def bake_vertices(
    mesh: trimesh.Trimesh,
    photos: Photos,
    options: TextureOptions,
    on_progress: StageProgress = lambda stage, done, total: None,
) -> BakedMesh:
    """Returns the mesh with vertex colours from photos. Raises MeshError where none sees it."""
    result = weld(mesh)
    # A vertex takes the mean of a small part of the triangles around it, so that edges of objects stay clean.
    areas = np.asarray(result.area_faces, np.float32) / 9
    blend = blend_photos(result, vertex_texels(result), areas, photos, options.balance_exposure, on_progress)
    result.visual = ColorVisuals(result, vertex_colors=np.rint(blend.colors).astype(np.uint8))
    return BakedMesh(result, len(result.vertices), int((~blend.visible).sum()), blend.gains, {})


def choose_size(mesh: trimesh.Trimesh, photos: Photos, space: BoxContraction | None = None) -> int:
    """Returns the power of two that has about one texel per pixel of the photos that are near the surface.

    The space is as for :func:`~f3rm_ext.mesh.texture.atlas.unwrap`. Raises MeshError where no photo sees the mesh.
    """
    depths = _probed_depths(mesh, photos)
    widths = np.concatenate(
        [depth / np.sqrt(camera.focal.prod()) for depth, camera in zip(depths, photos.cameras, strict=True)]
    )
    if not len(widths):
        raise MeshError(UNSEEN)
    area = (mesh if space is None else contract_mesh(mesh, space)).area
    side = np.sqrt(area / _USED) / max(float(np.quantile(widths, 0.25)), 1e-12)
    return int(np.clip(2 ** np.round(np.log2(side)), 256, LARGEST_PX))


def distant_background(mesh: trimesh.Trimesh, photos: Photos) -> BoxContraction | None:
    """Returns the contraction that keeps a distant background from filling the texture; None without such a one."""
    positions = np.array([camera.center for camera in photos.cameras])
    space = BoxContraction.from_cameras(positions, [])  # smaller than with depths, which take longer
    if space.distances(np.asarray(mesh.vertices)).max() <= _DISTANT:
        return None
    space = BoxContraction.from_cameras(positions, _probed_depths(mesh, photos))
    return space if space.distances(np.asarray(mesh.vertices)).max() > _DISTANT else None


def _probed_depths(mesh: trimesh.Trimesh, photos: Photos) -> list[Float[np.ndarray, " rays"]]:
    """Depth of the mesh along some rays of each photo."""
    caster = RayCaster(mesh.vertices, mesh.faces)
    depths = []
    for camera in photos.cameras:
        step = max(1.0, float(np.sqrt(camera.width * camera.height / _PROBES)))
        columns, rows = np.arange(step / 2, camera.width, step), np.arange(step / 2, camera.height, step)
        hit = caster.cast(*camera.rays(np.stack(np.broadcast_arrays(columns, rows[:, None]), axis=-1)))
        depths.append(hit["t_hit"][np.isfinite(hit["t_hit"])])
    return depths


def texel_areas(atlas: Atlas) -> Float[np.ndarray, " faces"]:
    """Area of a texel on each triangle, in square units of the mesh."""
    a, b, c = (atlas.pixels[atlas.mesh.faces[:, corner]] for corner in range(3))
    (ux, uy), (vx, vy) = (b - a).T, (c - a).T
    flat = np.abs(ux * vy - uy * vx) / 2
    return (atlas.mesh.area_faces / np.maximum(flat, 1e-6)).astype(np.float32)
