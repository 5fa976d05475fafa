"""Which parts of a true surface the cameras of a capture see: nobody can reconstruct the others."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import trimesh
from jaxtyping import Bool, Float

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.open3d_library import open3d, raycasting_scene

NEEDED_VIEWS = 2
"""Cameras that must see a point: one alone cannot tell how far away it is."""
_NEAR = 1e-3
"""Share of the distance by which a ray ends before its point, so that the point's own face does not hide it."""


def seen_points(
    points: Float[np.ndarray, "points 3"],
    truth: trimesh.Trimesh,
    capture: Path,
    on_progress: Callable[[int], None] = lambda views: None,
) -> Bool[np.ndarray, " points"]:
    """Returns which points on a mesh at least two training cameras see: in their images, and not hidden by the mesh.

    Args:
        points: on the mesh, in the frame of the capture.
        truth: the mesh.
        capture: its folder.
        on_progress: called with the number of views done.

    Raises:
        CaptureError: the capture cannot be read.
    """
    tensor = open3d().core.Tensor
    views, frame = capture_views(capture)
    scene = raycasting_scene(truth.vertices, truth.faces)
    in_scene = torch.from_numpy(frame.to_scene(points))
    centers = frame.to_capture(views.positions.double().numpy())
    count = np.zeros(len(points), np.int8)
    for index, center in enumerate(centers):
        left = np.flatnonzero(count < NEEDED_VIEWS)
        x, y, z = (in_scene[left] @ views.viewmats[index, :3, :3].double().T + views.viewmats[index, :3, 3]).unbind(1)
        fx, fy, cx, cy = (float(views.Ks[index, row, col]) for row, col in ((0, 0), (1, 1), (0, 2), (1, 2)))
        across, down = fx * x / z + cx, fy * y / z + cy
        inside = (z > 0) & (across >= 0) & (across < views.widths[index]) & (down >= 0) & (down < views.heights[index])
        left = left[inside.numpy()]
        away = points[left] - center
        rays = np.concatenate([np.broadcast_to(center, away.shape), away], axis=1).astype(np.float32)
        hidden = scene.test_occlusions(tensor(rays), tnear=0.0, tfar=1.0 - _NEAR).numpy()
        count[left[~hidden]] += 1
        on_progress(index + 1)
    return count >= NEEDED_VIEWS


def capture_views(capture: Path) -> tuple[PinholeCameras, CaptureFrame]:
    """Returns the training cameras of a capture, scene frame, and the map from its own frame.

    Raises:
        CaptureError: the capture cannot be read.
    """
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    outputs = CaptureDataParserConfig(data=capture).setup().get_dataparser_outputs("train")
    return PinholeCameras.of(outputs.cameras), CaptureFrame.of_outputs(outputs, capture)
