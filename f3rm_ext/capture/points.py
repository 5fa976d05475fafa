"""The points that structure from motion found in a capture; unusable points are left out with a message."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.capture.checks import ORIGIN_KEY
from f3rm_ext.capture.colmap_model import MODEL_KEY
from f3rm_ext.errors import CaptureError, UserError, reason_of

XYZ, RGB, SOURCE = "points3D_xyz", "points3D_rgb", "points3D_source"
"""Metadata keys of a dataparser's outputs: positions (N, 3; scene frame), colours (N, 3; uint8), and their file."""
DENSE = "points3D_dense"
"""Metadata key: how many of the points, the last ones, stereo has added."""
STEREO_POINTS = "stereo_points.ply"
"""File of the points that `f3rm-ext sfm points` finds, in its copy of a capture."""
GREY = 128
"""Level of all channels for points without colour."""
_MAX_SHARE = 2.0
"""Colours with a fraction are shares of 1 up to here, as they may exceed 1 a little, and else those of bytes."""
_COLORS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"), ("r", "g", "b"))


def read_capture_points(meta: Mapping[str, Any], folder: Path, outputs: DataparserOutputs) -> dict[str, Any]:
    """Reads the points of a capture: ``ply_file_path`` of transforms.json, otherwise those of COLMAP's model.

    Returns:
        The metadata :data:`XYZ`, :data:`RGB` and :data:`SOURCE`. Empty if there are no points, or if they cannot be
        read, which is reported on the console.
    """
    sparse = folder / meta.get(MODEL_KEY, "colmap/sparse/0")
    try:
        if meta.get("ply_file_path"):
            path = folder / meta["ply_file_path"]
            xyz, rgb = read_point_cloud(path)
        else:
            files = [path for path in (sparse / "points3D.bin", sparse / "points3D.txt") if path.is_file()]
            if not files:
                return {}
            path = files[0]
            xyz, rgb = read_colmap_points(path)
    except (UserError, OSError) as error:
        CONSOLE.log(f"Going on without the capture's points: {error}", markup=False)
        return {}
    matrix, applied = np.eye(4), np.eye(4)
    matrix[:3] = np.asarray(outputs.dataparser_transform, dtype=np.float64)[:3, :4]
    applied[:3] = meta["applied_transform"]
    scale = float(outputs.dataparser_scale)
    origin = np.append(meta.get(ORIGIN_KEY, [0.0, 0.0, 0.0]), 0.0)
    if meta.get("ply_file_path"):
        # These points are in the frame of the poses in the file; nerfstudio's transform starts one frame earlier.
        matrix = matrix @ np.linalg.inv(applied)
        scale /= float(meta.get("applied_scale", 1.0))
    else:
        # Poses were moved in their own frame, and these points are in the one before. The last 0 makes the origin a
        # displacement, which the translation in applied leaves alone.
        origin = np.linalg.inv(applied) @ origin
    with np.errstate(invalid="ignore", over="ignore"):  # points that are not finite are left out later
        placed = scale * ((xyz - origin[:3]) @ matrix[:3, :3].T + matrix[:3, 3])
    return {XYZ: torch.from_numpy(placed).float(), RGB: torch.from_numpy(rgb), SOURCE: str(path)}


def read_point_cloud(
    path: Path, grey: int = GREY
) -> tuple[Float64[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"]]:
    """Reads positions and colours of a PLY file, ASCII or binary.

    Colours may be bytes, numbers of 16 bits, or fractions from 0 to 1 or 0 to 255. Without any, all channels are
    ``grey``. Raises UserError if the file does not exist, is damaged, or has no points, and OSError if it cannot be
    read.
    """
    from f3rm_ext.utils.ply import PlyTables

    if not path.is_file():
        raise CaptureError(
            f"There is no file {path}, the ply_file_path of transforms.json: copy it back, or remove the entry."
        )
    tables = PlyTables.open(path)
    table = tables.tables.get("vertex")
    if table is None or not {"x", "y", "z"} <= table.kinds.keys():
        raise CaptureError(f"The file {path} has no points (vertices with x, y and z): write it again.")
    names = next((names for names in _COLORS if set(names) <= table.kinds.keys()), ())
    xyz = np.empty((table.count, 3))
    colors = np.full((table.count, 3), grey, dtype=np.float32)
    for where, rows in tables.rows("vertex", ["x", "y", "z", *names]):
        xyz[where] = np.stack([rows[name] for name in "xyz"], axis=1)
        if names:
            values = np.stack([rows[name] for name in names], axis=1).astype(np.float32)
            colors[where] = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    if names:
        largest = float(colors.max(initial=0.0))
        is_share = table.kinds[names[0]].startswith("f") and largest <= _MAX_SHARE
        colors *= 255.0 if is_share else 1 / 257 if largest > 255 else 1.0
    return xyz, colors.clip(0, 255).round().astype(np.uint8)


def point_columns(xyz: Float[np.ndarray, "points 3"], rgb: UInt8[np.ndarray, "points 3"]) -> dict[str, np.ndarray]:
    """Returns positions, as float32, and colours as the columns of a PLY file."""
    return dict(zip(("x", "y", "z", *_COLORS[0]), [*xyz.astype(np.float32).T, *rgb.T], strict=True))


def read_colmap_points(path: Path) -> tuple[Float64[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"]]:
    """Reads positions and colours of COLMAP's points3D.bin or points3D.txt. Raises CaptureError if the file is damaged,
    and OSError if it cannot be read."""
    from nerfstudio.data.utils import colmap_parsing_utils as colmap

    read = colmap.read_points3D_binary if path.suffix == ".bin" else colmap.read_points3D_text
    try:
        points = read(path).values()
    except OSError:
        raise
    except Exception as error:
        raise CaptureError(f"The file {path} is damaged ({type(error).__name__}): copy it again.") from error
    xyz = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
    return xyz, np.array([point.rgb for point in points], dtype=np.uint8).reshape(-1, 3)


def tolerate_unreadable_points(dataparser: Any) -> None:
    """Makes one of nerfstudio's dataparsers continue without points, with a message, if they cannot be read."""
    load = getattr(dataparser, "_load_3D_points", None)
    if load is None:
        return

    reported: set[str] = set()

    def load_or_say(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return load(*arguments, **options) or {}
        except Exception as error:
            reason = reason_of(error)
            if reason not in reported:  # the points are loaded once per split
                CONSOLE.log(f"Going on without the capture's points, which cannot be read ({reason}).", markup=False)
            reported.add(reason)
            return {}

    dataparser._load_3D_points = load_or_say


def drop_unusable_points(metadata: dict[str, Any]) -> None:
    """Leaves points that are not finite out of a dataparser's metadata, and makes points without colours grey.

    It says so, and removes the entries if no point is usable.
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
