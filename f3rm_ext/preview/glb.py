"""Meshes as GLB files for browsers: textures as JPEG of limited size."""

import io
from typing import Any

import numpy as np
import trimesh
from jaxtyping import Float
from PIL import Image
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.mesh.glb_file import encode_mesh

_JPEG_QUALITY = 88


def texture_side_px(mesh: trimesh.Trimesh) -> int:
    """Returns the longer side of a mesh's texture, px; 0 without one."""
    name, material = _texture_place(mesh)
    return max(getattr(material, name).size) if name else 0


def encode_glb(
    mesh: trimesh.Trimesh, max_texture_px: int | None = None, *, rotation: Float[np.ndarray, "3 3"] | None = None
) -> bytes:
    """Returns a mesh as a GLB file.

    Args:
        max_texture_px: longer side of the texture; a larger one is reduced. None leaves the texture as it is.
        rotation: from the axes of the mesh to those of the file, by default none.
    """
    mesh = mesh.copy()
    if rotation is not None:
        turn = np.eye(4)
        turn[:3, :3] = rotation
        mesh.apply_transform(turn)
    name, material = _texture_place(mesh)
    if name == "image":
        material.diffuse = [255] * 4  # else trimesh's own grey, which OBJ readers do not multiply with a texture
    if name and max_texture_px is not None:
        image = getattr(material, name).convert("RGB")
        image.thumbnail((max_texture_px, max_texture_px), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=_JPEG_QUALITY)
        setattr(material, name, Image.open(stream))  # one that says it is a JPEG is written as such
    return encode_mesh(mesh, {"made_by": "f3rm-ext", "up": "z"})


def _texture_place(mesh: trimesh.Trimesh) -> tuple[str, Any]:
    """The material and the name of its texture; an empty name without one."""
    material: Any = mesh.visual.material if isinstance(mesh.visual, TextureVisuals) else None
    name = next((name for name in ("baseColorTexture", "image") if getattr(material, name, None) is not None), "")
    return name, material
