"""Cameras and depth maps of captures, and matching of the images of two captures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.capture import checks
from f3rm_ext.capture.ground_truth import nearest, read_map
from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.rays import cell_centers

NERFSTUDIO_DEPTH_UNIT = 1e-3
"""Units of the capture per unit of an integer depth image, where transforms.json has no depth_unit_scale_factor."""


@dataclass(frozen=True)
class CaptureCameras:
    """The cameras of a capture, in the frame of its transforms.json."""

    folder: Path
    """Folder that paths are relative to."""
    frames: list[dict[str, Any]]
    """The frames, in the order of the cameras, each with its intrinsics."""
    cameras: CameraSet
    """Cameras, float64, without distortion."""

    @property
    def poses(self) -> tuple[Float[np.ndarray, "cams 3 3"], Float[np.ndarray, "cams 3"]]:
        """Rotations (camera to world, OpenCV axes) and centres."""
        return self.cameras.rotations.numpy(), self.cameras.centers.numpy()


def read_capture_cameras(data: Path) -> CaptureCameras:
    """Reads poses and intrinsics of a capture. Raises CaptureError if there is no such capture, or a pose or an
    intrinsic cannot be used."""
    meta, folder = checks.read_transforms(data)
    meta = checks.per_frame_intrinsics(meta)
    checks.check_frame_poses(meta["frames"])
    if len(meta["frames"]) < 2:
        raise CaptureError(f"{data} has fewer than two cameras: give a capture with more.")
    checks.check_intrinsics(meta)
    shared = {key: value for key, value in meta.items() if key != "frames"}
    frames = [{**shared, **frame} for frame in meta["frames"]]

    def column(*keys: str) -> Float[Tensor, "cams 2"]:
        return torch.tensor([[float(frame[key]) for key in keys] for frame in frames], dtype=torch.float64)

    c2w = torch.tensor(np.array([frame["transform_matrix"] for frame in frames], dtype=np.float64))
    cameras = CameraSet.from_opengl(c2w, column("fl_x", "fl_y"), column("cx", "cy"), column("w", "h"))
    return CaptureCameras(folder, frames, cameras)


def match_images(predicted: CaptureCameras, true: CaptureCameras) -> list[tuple[int, int]]:
    """Returns the pairs of indices of cameras of the same image, in the order of the truth.

    Images are the same if their paths are; else if their file names are, each of which occurs once; else if their names
    without suffix are.

    Raises:
        CaptureError: fewer than two images are in both, or one that is in both occurs twice in one of them.
    """
    paths = [[Path(frame["file_path"]) for frame in capture.frames] for capture in (predicted, true)]
    matches: list[tuple[int, int]] = []
    unclear: list[str] = []
    for key in (Path.as_posix, lambda path: path.name, lambda path: path.stem):
        theirs, ours = ([key(path) for path in some] for some in paths)
        repeated = {name for names in (theirs, ours) for name, count in Counter(names).items() if count > 1}
        index_of = {name: index for index, name in enumerate(theirs) if name not in repeated}
        pairs = [(index_of[name], index) for index, name in enumerate(ours) if name in index_of]
        if len(pairs) > len(matches) or not matches:
            matches, unclear = pairs, sorted(repeated & set(theirs) & set(ours))
        if len(matches) == len(ours):
            break
    if unclear:
        raise CaptureError(
            f"{len(unclear)} images occur several times in {predicted.folder} or {true.folder} "
            f"({name_some(unclear)}), so their poses cannot be matched: keep one frame of each."
        )
    if len(matches) < 2:
        raise CaptureError(
            f"{predicted.folder} and {true.folder} have {len(matches) or 'no'} image{'s' * (len(matches) != 1)} in "
            "common by name, but poses are compared in pairs: give two captures of the same photos."
        )
    return matches


def has_depth(capture: CaptureCameras, indices: Sequence[int]) -> bool:
    """Returns whether all of these frames name a depth map."""
    return all("depth_file_path" in capture.frames[index] for index in indices)


def read_depth(frame: dict[str, Any], folder: Path) -> Float[np.ndarray, "h w"]:
    """Reads the z-depth of a frame, units of the capture: an integer image times its unit, or a NumPy file. Raises
    CaptureError if the file is missing or is no depth map."""
    depth = read_map(folder / frame["depth_file_path"], "depth map")
    return depth.astype(np.float64) * float(frame.get("depth_unit_scale_factor", NERFSTUDIO_DEPTH_UNIT))


def cell_points(
    capture: CaptureCameras, indices: Sequence[int], rows: int, cols: int
) -> tuple[Float[Tensor, "cams rows cols 3"], Bool[Tensor, "cams rows cols"]]:
    """Returns the endpoints of the cells' rays, in the frame of the capture, and where they are known."""
    cameras = capture.cameras[list(indices)]
    images = (read_depth(capture.frames[index], capture.folder) for index in indices)
    depth = torch.from_numpy(np.stack([nearest(image, rows, cols) for image in images]))
    rays = cameras.directions(cell_centers(cameras.sizes_px, rows, cols))
    return cameras.centers[:, None, None] + rays * depth[..., None], depth.isfinite() & (depth > 0)
