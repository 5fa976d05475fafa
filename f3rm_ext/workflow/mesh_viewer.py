"""A mesh to turn in a page: three.js, its glTF loader and the mesh are in the page, which loads nothing else."""

import base64
import io
import json
import tempfile
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.errors import CaptureError, MeshError

MAX_TEXTURE_PX = 2048
"""Side of the texture in the page; larger ones are reduced."""
MOST_MIB = 64
"""A mesh with more is not put into a page."""
_QUALITY = 88

STYLE = """
.mesh{position:relative;border-radius:10px;overflow:hidden;background:#16191d;line-height:0}
.mesh canvas{display:block;width:100%;touch-action:none;cursor:grab;outline-offset:-3px}
.mesh .modes{position:absolute;left:12px;top:12px;margin:0;line-height:1.5}
.mesh-note{position:absolute;inset:auto 0 12px;text-align:center;color:#fff;margin:0 auto;line-height:1.4}
"""


@dataclass(frozen=True)
class StartView:
    """Where the page's camera is at first, in the coordinates of the mesh file (y up)."""

    position: tuple[float, float, float]
    ahead: tuple[float, float, float]
    """Direction in which it looks."""
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


def page_mesh(path: Path) -> bytes:
    """Returns a mesh as GLB for a page, y up, with a texture of at most :data:`MAX_TEXTURE_PX` as JPEG.

    Args:
        path: .glb, .ply or .obj, as `f3rm-ext export` writes them.

    Raises:
        MeshError: it cannot be read, or is too large for a page.
    """
    from PIL import Image
    from trimesh.transformations import rotation_matrix
    from trimesh.visual.texture import TextureVisuals

    from f3rm_ext.mesh.mesh_files import read_mesh, write_mesh

    mesh = read_mesh(path)
    mesh.apply_transform(rotation_matrix(-np.pi / 2, [1, 0, 0]))  # a copy would not know that its texture is a JPEG
    if isinstance(mesh.visual, TextureVisuals):
        material: Any = mesh.visual.material
        name = "baseColorTexture" if hasattr(material, "baseColorTexture") else "image"
        image = getattr(material, name).convert("RGB")
        image.thumbnail((MAX_TEXTURE_PX, MAX_TEXTURE_PX), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=_QUALITY)
        setattr(material, name, Image.open(stream))  # one that says it is a JPEG is written as such
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "page.glb")
        write_mesh(small, mesh, {"made_by": "f3rm-ext"})
        content = small.read_bytes()
    if len(content) > MOST_MIB * 2**20:
        raise MeshError(f"{path.name} is too large for a page ({len(content) / 2**20:.0f} MiB): open the file itself.")
    return content


def mesh_viewer(glb: bytes, start: StartView | None) -> str:
    """Returns the HTML of a mesh to turn. The page needs :data:`STYLE` and :func:`viewer_script`.

    Args:
        glb: the mesh.
        start: where the camera is at first; by default in front of the whole mesh.
    """
    view = json.dumps({} if start is None else asdict(start))
    buttons = "".join(
        f'<button type="button" data-look="{look}" aria-pressed="{str(look == "texture").lower()}">{label}</button>'
        for look, label in (("texture", "Photos"), ("shape", "Shape"))
    )
    return (
        f'<div class="mesh" data-mesh="mesh-data" data-view=\'{view}\'>'
        '<canvas tabindex="0" aria-label="The mesh: drag to turn it"></canvas>'
        f'<div class="modes" role="group" aria-label="What to show">{buttons}</div>'
        '<p class="mesh-note">Loading the mesh …</p></div>'
        f'<script type="text/plain" id="mesh-data">{base64.b64encode(glb).decode("ascii")}</script>'
    )


def viewer_script() -> str:
    """Returns the JavaScript that shows the meshes of a page: three.js (MIT licence) and ours."""
    web = files("f3rm_ext.workflow") / "web"
    return "\n".join((web / name).read_text(encoding="utf-8") for name in ("three.min.js", "mesh_viewer.js"))
