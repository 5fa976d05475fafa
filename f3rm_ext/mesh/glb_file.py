"""GLB files of meshes, whose vertices have colours in linear light, where trimesh and other formats have sRGB."""

import io
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import trimesh
from jaxtyping import Float
from PIL import Image
from trimesh.exchange.gltf import export_glb
from trimesh.visual.color import ColorVisuals
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.utils.json_shape import parse_json
from f3rm_ext.utils.pictures import to_bytes, to_linear, to_srgb

_COLORS = "COLOR_0"
_RAW = "_COLOR_0"
"""Attributes with an underscore pass trimesh as they are. Its own colours have 8 bits, too few for dark linear ones; it
reads those of 16 bits wrong, and floats right."""
_HEADER = "<4sIIII"
"""Magic, version, length of the file, and length and type of the first chunk, which is JSON."""
_JPEG_QUALITY = 88


class _Accessor(TypedDict, total=False):
    count: int
    bufferView: int


class _Asset(TypedDict, total=False):
    generator: str


class _GlbTree(TypedDict, total=False):
    accessors: list[_Accessor]
    asset: _Asset


def encode_mesh(mesh: trimesh.Trimesh, record: Mapping[str, object]) -> bytes:
    """Returns a mesh as a GLB file, its record in the asset's extras; a texture is shown without shading (unlit)."""

    def finish(tree: dict[str, Any]) -> None:
        tree["asset"] |= {"generator": str(record.get("made_by", "f3rm-ext")), "extras": dict(record)}
        if "textures" in tree:
            tree["extensionsUsed"] = [*tree.get("extensionsUsed", []), "KHR_materials_unlit"]
            for material in tree["materials"]:
                material["extensions"] = {"KHR_materials_unlit": {}}
        _rename(tree, _RAW, _COLORS)

    visual = mesh.visual
    if isinstance(visual, ColorVisuals) and visual.kind in ("vertex", "face"):
        mesh = mesh.copy()
        mesh.visual = ColorVisuals(mesh)
        mesh.vertex_attributes[_RAW] = to_linear(np.asarray(visual.vertex_colors)[:, :3] / 255.0).astype(np.float32)
    return export_glb(trimesh.Scene(mesh), tree_postprocessor=finish)


def texture_side_px(mesh: trimesh.Trimesh) -> int:
    """Returns the longer side of a mesh's texture, px; 0 without one."""
    name, material = texture_place(mesh)
    return max(getattr(material, name).size) if name else 0


def encode_glb(
    mesh: trimesh.Trimesh, max_texture_px: int | None = None, *, rotation: Float[np.ndarray, "3 3"] | None = None
) -> bytes:
    """Returns a mesh as a GLB file for browsers: its texture may be smaller, and is then a JPEG.

    Args:
        max_texture_px: longer side of the texture; a larger one is reduced. None leaves the texture as it is.
        rotation: from the axes of the mesh to those of the file, by default none.
    """
    mesh = mesh.copy()
    if rotation is not None:
        turn = np.eye(4)
        turn[:3, :3] = rotation
        mesh.apply_transform(turn)
    name, material = texture_place(mesh)
    if name == "image":
        material.diffuse = [255] * 4  # else trimesh's own grey, which OBJ readers do not multiply with a texture
    if name and max_texture_px is not None:
        image = getattr(material, name).convert("RGB")
        image.thumbnail((max_texture_px, max_texture_px), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=_JPEG_QUALITY)
        setattr(material, name, Image.open(stream))  # one that says it is a JPEG is written as such
    return encode_mesh(mesh, {"made_by": "f3rm-ext", "up": "z"})


def load_scene(path: Path) -> trimesh.Scene:
    """Reads a GLB file of any program, with colours of vertices in sRGB. Raises MeshError as :func:`_read_header`."""
    tree, body = _read_header(path)
    _rename(tree, _COLORS, _RAW)
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 4)
    header = struct.pack(_HEADER, b"glTF", 2, 20 + len(text) + len(body), len(text), 0x4E4F534A)
    scene = trimesh.load_scene(io.BytesIO(header + text + body), "glb", process=False, maintain_order=True)
    for mesh in scene.geometry.values():
        colors = getattr(mesh, "vertex_attributes", {}).pop(_RAW, None)
        if colors is not None and isinstance(mesh, trimesh.Trimesh) and not texture_side_px(mesh):
            # Floats or normalised integers, with or without opacity.
            linear = colors / np.iinfo(colors.dtype).max if colors.dtype.kind in "iu" else colors.astype(np.float64)
            srgb = np.concatenate([to_srgb(linear[:, :3]), linear[:, 3:]], axis=1)
            mesh.visual = ColorVisuals(mesh, vertex_colors=to_bytes(srgb))
    return scene


def read_generator(path: Path) -> str:
    """Returns the program that a glTF file says wrote it; empty where it says none. Raises MeshError as load_scene."""
    is_text = path.suffix.lower() == ".gltf"
    tree = parse_json(path.read_bytes(), _GlbTree) if is_text else _read_header(path)[0]
    return tree.get("asset", {}).get("generator", "")


def _read_header(path: Path) -> tuple[_GlbTree, bytes]:
    """Returns the JSON of a GLB file and what follows it. Raises MeshError where the header cannot be true, as trimesh
    would make zeros of missing data."""
    data = path.read_bytes()
    size = len(data)
    try:
        magic, _, length, json_length, _ = struct.unpack_from(_HEADER, data)
        if magic != b"glTF" or not json_length <= length <= size:
            raise ValueError(f"it claims {length} bytes and has {size}")
        tree = parse_json(data[20 : 20 + json_length], _GlbTree)
        for accessor in tree.get("accessors", []):
            if accessor.get("count", 0) > size:
                raise ValueError(f"it claims {accessor.get('count')} values and has {size} bytes")
    except (struct.error, ValueError) as error:
        reason = "it has no header" if isinstance(error, struct.error) else error
        raise MeshError(f"{path} is damaged ({reason}): copy or export it again.") from error
    return tree, data[20 + json_length :]


def _rename(tree: Any, name: str, new: str) -> None:
    """Renames an attribute of all parts of all meshes."""
    for part in (part for mesh in tree.get("meshes", []) for part in mesh["primitives"]):
        if name in part["attributes"]:
            part["attributes"][new] = part["attributes"].pop(name)


def texture_place(mesh: trimesh.Trimesh) -> tuple[str, Any]:
    """Returns which attribute of a mesh's material holds its texture, empty without one, and the material."""
    material: Any = mesh.visual.material if isinstance(mesh.visual, TextureVisuals) else None
    name = next((name for name in ("baseColorTexture", "image") if getattr(material, name, None) is not None), "")
    return name, material
