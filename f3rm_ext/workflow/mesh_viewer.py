"""A mesh in a page, to turn, and the view from which it is shown at first."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.errors import CaptureError, MeshError

MAX_TEXTURE_PX = 2048
"""Side of the texture in the page; larger ones are reduced."""
MAX_MIB = 64
"""Largest mesh that is put into a page."""


@dataclass(frozen=True)
class StartView:
    """The first view of a mesh, in the coordinates of its file (y up)."""

    position: tuple[float, float, float]
    ahead: tuple[float, float, float]
    """Viewing direction."""
    up: tuple[float, float, float]
    """Axis about which dragging turns."""
    fov_deg: float
    """Vertical field of view."""


def first_photo_view(data: Path) -> StartView | None:
    """Returns the view of the first photo of a capture; None where its poses or intrinsics do not tell.

    Args:
        data: the capture: its folder or file. The mesh is in the frame of the capture, with y up.
    """
    from f3rm_ext.capture.checks import read_transforms

    try:
        meta, _ = read_transforms(data)
        poses = np.array([frame["transform_matrix"] for frame in meta["frames"]], dtype=float)
        lens: dict[str, Any] = {**meta, **meta["frames"][0]}
        focal_px = lens["fl_y"] if "fl_y" in lens else lens["fl_x"]
        fov_deg = float(np.degrees(2 * np.arctan2(lens["h"] / 2, focal_px)))
        up = poses[:, :3, 1].mean(axis=0)
        up /= max(float(np.linalg.norm(up)), 1e-9)
    except (CaptureError, KeyError, IndexError, ValueError, TypeError):
        return None
    up = np.array([0.0, 0.0, 1.0]) if up[2] > 0.8 else up  # photos are seldom taken quite level
    first = poses[0]
    vectors = (_y_up(vector) for vector in (first[:3, 3], -first[:3, 2], up))
    return StartView(*vectors, fov_deg)  # type: ignore[arg-type]


def _y_up(vector: np.ndarray) -> tuple[float, float, float]:
    x, y, z = (round(float(value), 6) for value in vector)
    return x, z, -y


def page_mesh(path: Path) -> str:
    """Returns a mesh for a page: GLB as base64, y up, with a texture of at most :data:`MAX_TEXTURE_PX` as JPEG.

    Args:
        path: .glb, .ply or .obj, as `f3rm-ext export` writes them.

    Raises:
        MeshError: it cannot be read, or is too large for a page.
    """
    from f3rm_ext.capture.frame import Y_UP
    from f3rm_ext.mesh.glb_file import encode_glb
    from f3rm_ext.mesh.mesh_files import read_mesh

    content = encode_glb(read_mesh(path), MAX_TEXTURE_PX, rotation=Y_UP)
    if len(content) > MAX_MIB * 2**20:
        raise MeshError(f"{path.name} is too large for a page ({len(content) / 2**20:.0f} MiB): open the file itself.")
    return base64.b64encode(content).decode("ascii")
