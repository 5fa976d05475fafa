"""Points of a capture's depth maps, at the cells of a grid."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.capture_cameras import CaptureCameras
from f3rm_ext.sfm.rays import at_cells, cell_centers
from f3rm_ext.utils.pictures import UNREADABLE

NERFSTUDIO_DEPTH_UNIT = 1e-3
"""Units of the capture per unit of an integer depth image, where transforms.json has no depth_unit_scale_factor."""


def has_depth(capture: CaptureCameras, indices: Sequence[int]) -> bool:
    """Tells whether all of these frames name a depth map."""
    return all("depth_file_path" in capture.frames[index] for index in indices)


def read_depth(frame: dict[str, Any], folder: Path) -> Float[np.ndarray, "h w"]:
    """Reads the z-depth of a frame, units of the capture: an integer image times its unit, or a NumPy file.

    Raises:
        CaptureError: the file is missing or is no depth map.
    """
    path = folder / frame["depth_file_path"]
    try:
        if path.suffix == ".npy":
            depth = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as image:
                depth = np.asarray(image)
    except UNREADABLE as error:
        raise CaptureError(f"The depth map {path} cannot be read ({error}): write it again.") from error
    if depth.ndim != 2:
        raise CaptureError(f"The depth map {path} has {depth.ndim} axes, but needs height and width: write it again.")
    return depth.astype(np.float64) * float(frame.get("depth_unit_scale_factor", NERFSTUDIO_DEPTH_UNIT))


def cell_points(
    capture: CaptureCameras, indices: Sequence[int], rows: int, cols: int
) -> tuple[Float[Tensor, "cams rows cols 3"], Bool[Tensor, "cams rows cols"]]:
    """Returns where the rays of cells end, in the frame of the capture, and where that is known."""
    cameras = capture.cameras[list(indices)]
    depth = torch.cat(
        [
            at_cells(torch.from_numpy(read_depth(capture.frames[index], capture.folder))[None], rows, cols)
            for index in indices
        ]
    )
    rays = cameras.directions(cell_centers(cameras.sizes_px, rows, cols))
    return cameras.centers[:, None, None] + rays * depth[..., None], depth.isfinite() & (depth > 0)
