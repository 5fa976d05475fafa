"""Pictures of a coloured mesh, and how well they fit photos."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import trimesh
from jaxtyping import Bool, Float, Int, Integer, UInt8
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.glb_file import texture_place
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.texture.atlas import to_pixels
from f3rm_ext.mesh.texture.photos import Photo
from f3rm_ext.mesh.texture.visibility import bilinear
from f3rm_ext.utils.open3d_library import RayCaster

SAMPLES = 3
"""Rays per pixel along each axis."""


class MeshPicture(NamedTuple):
    """A rendering of a mesh."""

    colors: Float[np.ndarray, "h w 3"]
    """0 to 255; black where there is no mesh."""
    covered: Bool[np.ndarray, "h w"]
    """Pixels that the mesh covers wholly."""


class SurfaceColors:
    """The colours of a mesh: of its texture, or of its vertices. Raises MeshError where it has neither."""

    def __init__(self, mesh: trimesh.Trimesh, name: str = "The mesh") -> None:
        self._faces = np.asarray(mesh.faces)
        texture, colors = get_texture(mesh), vertex_colors(mesh)
        if texture is None and colors is None:
            raise MeshError(
                f"{name} has neither a texture nor vertex colours: colour it with `f3rm-ext export texture`."
            )
        self._texture = None if texture is None else texture.astype(np.float32)
        visual = mesh.visual
        self._values = np.asarray(visual.uv if isinstance(visual, TextureVisuals) else colors, np.float64)

    def __call__(self, faces: Integer[np.ndarray, " n"], weights: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 3"]:
        """Returns colours, 0 to 255, at places given by barycentric weights of second and third corner."""
        values = interpolate(self._values, self._faces[faces], weights)
        if self._texture is None:
            return values
        height, width = self._texture.shape[:2]
        # Textures repeat beyond their edges, as glTF and OBJ have them.
        values = np.where((values < 0) | (values > 1), values % 1, values)
        return bilinear(self._texture, to_pixels(values, width, height))


class MeshRenderer:
    """Renders :class:`SurfaceColors` of a mesh by casting rays, without shading."""

    def __init__(self, mesh: trimesh.Trimesh, name: str = "The mesh") -> None:
        self._caster, self._colors = RayCaster(mesh.vertices, mesh.faces), SurfaceColors(mesh, name)

    def render(self, camera: Camera) -> MeshPicture:
        """Returns what a camera sees."""
        total = np.zeros((camera.height, camera.width, 3), np.float32)
        covered = np.ones((camera.height, camera.width), bool)
        offsets = (np.arange(SAMPLES) + 0.5) / SAMPLES
        for down in offsets:
            for across in offsets:
                hit = self._caster.cast(*camera.pixel_rays(across, down))
                hits = np.isfinite(hit["t_hit"])
                total[hits] += self._colors(hit["primitive_ids"][hits], hit["primitive_uvs"][hits])
                covered &= hits
        return MeshPicture(total / SAMPLES**2, covered)


def interpolate(
    values: Float[np.ndarray, "verts channels"], corners: Int[np.ndarray, "n 3"], weights: Float[np.ndarray, "n 2"]
) -> Float[np.ndarray, "n channels"]:
    """Interpolates values of vertices, by the barycentric weights of the second and third corner."""
    b, c = weights.T[..., None]
    return values[corners[:, 0]] * (1 - b - c) + values[corners[:, 1]] * b + values[corners[:, 2]] * c


def get_texture(mesh: trimesh.Trimesh) -> UInt8[np.ndarray, "h w 3"] | None:
    """Returns the texture of a mesh; None where it has none."""
    name, material = texture_place(mesh)
    visual: Any = mesh.visual
    return np.asarray(getattr(material, name).convert("RGB")) if name and visual.uv is not None else None


@dataclass(frozen=True)
class PhotoScore:
    """Agreement of a rendered mesh with one photo."""

    psnr: float
    """dB, over all pixels that are not masked; black where there is no mesh."""
    psnr_covered: float
    """dB, over the pixels that the mesh covers and no mask leaves out; NaN if there are none."""
    coverage: float
    """Share of the pixels that the mesh covers, 0 to 1."""


def score_photo(made: MeshPicture, photo: Photo) -> PhotoScore:
    """Compares a rendering with a photo."""
    use = np.ones(made.covered.shape, bool) if photo.valid is None else photo.valid
    error = np.square(made.colors - photo.colors).mean(axis=2)
    both = use & made.covered
    return PhotoScore(_psnr(error[use]), _psnr(error[both]), float(both.sum() / max(use.sum(), 1)))


def _psnr(errors: np.ndarray) -> float:
    """PSNR in dB of squared errors of bytes."""
    return float(10 * np.log10(255.0**2 / max(float(errors.mean()), 1e-6))) if len(errors) else float("nan")
