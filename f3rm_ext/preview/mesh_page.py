"""A web page of a mesh: one HTML file with the mesh, its texture and the cameras of the capture."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from jaxtyping import Float, UInt8
from trimesh.visual.color import ColorVisuals
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from f3rm_ext import __version__
from f3rm_ext.capture.frame import Y_UP
from f3rm_ext.errors import MeshError
from f3rm_ext.html.page import MAX_CAMERAS, Picture, render_page
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.glb_file import encode_glb, texture_side_px
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.texture.rendering import MeshRenderer, get_texture
from f3rm_ext.preview.cameras import NamedCamera, extent_of, overview
from f3rm_ext.preview.content import MeshContent
from f3rm_ext.utils.output_file import write_file
from f3rm_ext.utils.pictures import pick_evenly, to_bytes, to_srgb
from f3rm_ext.utils.provenance import sign_text

COMMAND = "f3rm-ext export page"
MAX_TEXTURE_PX = 4096
"""Longer side of the texture, which every graphics card takes; larger ones are reduced."""
_LEAST_TEXTURE_PX = 256
_POSTER_PX = 640
_GREY = np.array([216.0, 212.0, 204.0])


@dataclass(frozen=True)
class MeshPageInfo:
    """Size and content of a page that was written."""

    triangles: int
    texture_px: int
    """Longer side of the texture on the page; 0 without one."""
    given_px: int
    """Longer side of the texture in the file; 0 without one."""
    size_mib: float


def write_mesh_page(
    out: Path, content: MeshContent, cameras: Sequence[NamedCamera], title: str, max_mb: float | None = None
) -> MeshPageInfo:
    """Writes a page, an .html file, completely or not at all.

    Args:
        cameras: of the capture, in the coordinates of the mesh as it is read; without any, the page has one overview.
        max_mb: largest size, MB. The texture is reduced as far as needed.

    Raises:
        MeshError: the page is too large even with the smallest texture.
        ConfigError: the file cannot be written.
    """
    mesh, turn = _color_vertices(content.mesh), content.turn_up()
    upright = mesh.copy()
    upright.apply_transform(np.block([[turn, np.zeros((3, 1))], [np.zeros((1, 3)), 1.0]]))
    chosen = pick_evenly(len(cameras), MAX_CAMERAS)
    views = [cameras[i].turn(turn) for i in chosen] or [overview(np.asarray(upright.vertices))]
    middle, radius = extent_of(np.asarray(upright.vertices) @ Y_UP.T)
    described = [_describe(one, middle, radius) for one in views]
    poster = _draw_poster(upright, views[0].camera)
    given_px = texture_side_px(mesh)
    side_px = min(given_px, MAX_TEXTURE_PX)
    while True:
        glb = encode_glb(upright, side_px or None, rotation=Y_UP)
        page = _draw(out.stem, title, glb, described, upright, poster)
        if max_mb is None or len(page) <= max_mb * 1e6:
            break
        if side_px // 2 < _LEAST_TEXTURE_PX:
            texture = f" and a texture of {side_px} px" if side_px else ""
            raise MeshError(
                f"The page would have {len(page) / 1e6:.1f} MB with {len(mesh.faces)} triangles{texture}, more than "
                f"--max-mb {max_mb:g}: allow more, or give a mesh with fewer triangles."
            )
        side_px //= 2
    write_file(out, page)
    return MeshPageInfo(len(mesh.faces), side_px, given_px, len(page) / 2**20)


def _color_vertices(mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    """Returns the mesh with vertex colours where it has colours of faces, or of a material without a texture."""
    visual: Any = mesh.visual
    if visual.kind == "face":
        colors = np.asarray(visual.vertex_colors)
    elif isinstance(visual, TextureVisuals) and not texture_side_px(mesh) and visual.material.main_color is not None:
        color = np.asarray(visual.material.main_color)[:3]
        if np.ptp(color) == 0:  # a grey that programs give to what has no colour: its shape shows more
            return mesh
        if isinstance(visual.material, PBRMaterial):  # in linear light, as glTF demands
            color = to_bytes(to_srgb(color / 255))
        colors = np.tile(color, (len(mesh.vertices), 1))
    else:
        return mesh
    mesh = mesh.copy()
    mesh.visual = ColorVisuals(mesh, vertex_colors=colors)
    return mesh


def _draw(
    name: str, title: str, glb: bytes, cameras: Sequence[object], mesh: trimesh.Trimesh, poster: np.ndarray
) -> bytes:
    text = render_page(
        "mesh_page.html",
        title=title,
        content={"name": name, "cameras": cameras},
        glb=base64.b64encode(glb).decode("ascii"),
        poster=Picture.from_array(poster),
        has_texture=get_texture(mesh) is not None or vertex_colors(mesh) is not None,
        footer=f"f3rm_ext {__version__}: {len(mesh.faces)} triangles.",
    )
    return sign_text(text, COMMAND)


def _describe(named: NamedCamera, middle: Float[np.ndarray, "3"], radius: float) -> dict[str, object]:
    """A camera as the page's script takes it, y up: rows of ``turn`` are right, down and forward.

    The page turns about the middle of the mesh, y up.
    """
    camera = named.turn(Y_UP).camera
    reach = max(float((middle - camera.center) @ camera.rotation[2]), 0.2 * radius)
    (fx, fy), (cx, cy) = camera.focal.tolist(), camera.middle.tolist()
    return {
        "name": named.name,
        "position": np.round(camera.center, 6).tolist(),
        "turn": np.round(camera.rotation, 7).tolist(),
        **{"fx": fx, "fy": fy, "cx": cx, "cy": cy, "width": camera.width, "height": camera.height, "reach": reach},
    }


def _draw_poster(mesh: trimesh.Trimesh, camera: Camera) -> UInt8[np.ndarray, "h w 3"]:
    """A picture of the mesh for browsers without WebGL2; a mesh without colours is shaded."""
    scale = min(1.0, _POSTER_PX / max(camera.width, camera.height))
    width, height = (max(1, round(side * scale)) for side in (camera.width, camera.height))
    small = camera._replace(focal=camera.focal * scale, middle=camera.middle * scale, width=width, height=height)
    if get_texture(mesh) is None and vertex_colors(mesh) is None:
        light = 0.35 + 0.65 * np.abs(mesh.vertex_normals @ camera.rotation[2])
        shades = np.clip(_GREY * light[:, None], 0, 255).astype(np.uint8)
        mesh = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)
        mesh.visual = ColorVisuals(mesh, vertex_colors=shades)
    return np.clip(MeshRenderer(mesh).render(small).colors, 0, 255).astype(np.uint8)
