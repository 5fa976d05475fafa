"""The points of a capture, as structure from motion finds them: read, and left out with a notice where they are bad."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64, UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.errors import CaptureError, UserError

XYZ, RGB, SOURCE = "points3D_xyz", "points3D_rgb", "points3D_source"
"""Metadata of a dataparser's outputs: places (N, 3; scene frame), colours (N, 3; uint8), and the file they are of."""
GREY = 128
"""Colour of points that have none."""
_COLORS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"), ("r", "g", "b"))


def read_capture_points(meta: Mapping[str, Any], folder: Path, outputs: DataparserOutputs) -> dict[str, Any]:
    """The points that belong to a transforms.json: its ``ply_file_path``, else COLMAP's own in colmap/sparse/0.

    Args:
        meta: transforms.json.
        folder: that file paths are relative to.
        outputs: of the dataparser for this capture; says where the scene frame is.

    Returns:
        The metadata :data:`XYZ`, :data:`RGB` and :data:`SOURCE`; nothing where there are no points, or none that can be
        read, which is said.
    """
    sparse = folder / "colmap" / "sparse" / "0"
    try:
        if meta.get("ply_file_path"):
            path = folder / meta["ply_file_path"]
            xyz, rgb = read_point_cloud(path)
        else:
            found = [path for path in (sparse / "points3D.bin", sparse / "points3D.txt") if path.is_file()]
            if not found:
                return {}
            path = found[0]
            xyz, rgb = read_colmap_points(path)
    except (UserError, OSError) as error:
        CONSOLE.log(f"Going on without the capture's points: {error}", markup=False)
        return {}
    matrix = np.eye(4)
    matrix[:3] = np.asarray(outputs.dataparser_transform, dtype=np.float64)[:3, :4]
    scale = float(outputs.dataparser_scale)
    if meta.get("ply_file_path"):
        # They lie in the frame of the poses of the file; nerfstudio's transform is from the frame before that.
        applied = np.eye(4)
        applied[:3] = applied_transform(meta, folder)
        matrix = matrix @ np.linalg.inv(applied)
        scale /= float(meta.get("applied_scale", 1.0))
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is left out afterwards
        placed = scale * (xyz.astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3])
    return {XYZ: torch.from_numpy(placed).float(), RGB: torch.from_numpy(rgb), SOURCE: str(path)}


def applied_transform(meta: Mapping[str, Any], folder: Path) -> Float64[np.ndarray, "3 4"]:
    """What was done to the poses before they were written to transforms.json, as nerfstudio takes it.

    Args:
        meta: transforms.json.
        folder: the capture's.
    """
    if "applied_transform" in meta:
        return np.asarray(meta["applied_transform"], dtype=np.float64)[:3, :4]
    if (folder / "colmap" / "sparse" / "0").exists():
        return np.array([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0]])
    return np.eye(4)[:3]


def read_point_cloud(path: Path) -> tuple[Float32[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"]]:
    """Places and colours of a PLY file, ASCII or binary; grey where there are no colours.

    Raises:
        UserError: there is no such file, it is damaged, or it has no points.
        OSError: it cannot be read.
    """
    from f3rm_ext.utils.ply import PlyTables

    if not path.is_file():
        raise CaptureError(
            f"There is no file {path}, which transforms.json has as ply_file_path: copy it back, or take the name out."
        )
    tables = PlyTables.open(path)
    table = tables.tables.get("vertex")
    if table is None or not {"x", "y", "z"} <= table.kinds.keys():
        raise CaptureError(f"The file {path} has no points (vertices with x, y and z): write it again.")
    names = next((names for names in _COLORS if set(names) <= table.kinds.keys()), ())
    xyz = np.empty((table.count, 3), dtype=np.float32)
    rgb = np.full((table.count, 3), GREY, dtype=np.uint8)
    for where, rows in tables.rows("vertex", ["x", "y", "z", *names]):
        xyz[where] = np.stack([rows[name] for name in "xyz"], axis=1)
        if names:
            unit = 255 if table.kinds[names[0]] in ("f4", "f8") else 1
            colors = unit * np.nan_to_num(np.stack([rows[name] for name in names], axis=1).astype(np.float64))
            rgb[where] = colors.clip(0, 255).round()
    return xyz, rgb


def read_colmap_points(path: Path) -> tuple[Float32[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"]]:
    """Places and colours of COLMAP's points3D.bin or points3D.txt.

    Raises:
        CaptureError: it is damaged.
        OSError: it cannot be read.
    """
    from nerfstudio.data.utils import colmap_parsing_utils as colmap

    read = colmap.read_points3D_binary if path.suffix == ".bin" else colmap.read_points3D_text
    try:
        points = read(path).values()
    except OSError:
        raise
    except Exception as error:
        raise CaptureError(f"The file {path} is damaged ({type(error).__name__}): copy it again.") from error
    xyz = np.array([point.xyz for point in points], dtype=np.float32).reshape(-1, 3)
    return xyz, np.array([point.rgb for point in points], dtype=np.uint8).reshape(-1, 3)


def keep_going_without_points(dataparser: Any) -> None:
    """Has one of nerfstudio's dataparsers go on, and say so, where the points it loads cannot be read.

    Args:
        dataparser: changed in place; nothing is done where it loads none.
    """
    load = getattr(dataparser, "_load_3D_points", None)
    if load is None:
        return

    said: set[str] = set()

    def load_or_say(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return load(*arguments, **options) or {}
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__
            if reason not in said:  # It is asked for the points of every split.
                CONSOLE.log(f"Going on without the capture's points, which cannot be read ({reason}).", markup=False)
            said.add(reason)
            return {}

    dataparser._load_3D_points = load_or_say


def keep_usable_points(metadata: dict[str, Any]) -> None:
    """Leaves out points that are not finite, says so, and gives grey to those without colours.

    Args:
        metadata: of a dataparser's outputs, changed in place; no points are left in it where there are none to use.
    """
    if XYZ not in metadata:
        return
    xyz: Tensor = metadata[XYZ].float().reshape(-1, 3)
    rgb: Tensor = metadata.get(RGB, torch.empty(0, 3))
    if len(rgb) != len(xyz):
        rgb = torch.full((len(xyz), 3), GREY, dtype=torch.uint8)
    finite = torch.isfinite(xyz).all(dim=1)
    source = metadata.get(SOURCE, "the capture")
    if not bool(finite.all()):
        bad = int((~finite).sum())
        CONSOLE.log(f"{bad} of {len(xyz)} points of {source} are not finite and are left out.", markup=False)
    if not bool(finite.any()):
        CONSOLE.log(f"There are no points to use in {source}: going on without.", markup=False)
        for name in [name for name in metadata if name.startswith("points3D_")]:
            del metadata[name]
        return
    metadata[XYZ], metadata[RGB] = xyz[finite], rgb[finite]
