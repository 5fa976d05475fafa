"""Which parts of a known room its cameras see."""

from pathlib import Path
from types import ModuleType

import numpy as np
import trimesh

from f3rm_ext.mesh.visibility import capture_views, seen_points


def test_what_is_behind_or_outside_is_not_seen(tiny_capture: Path, open3d: ModuleType) -> None:
    views, frame = capture_views(tiny_capture)
    center = frame.to_capture(views.positions.double().numpy())[0]
    ahead = frame.directions_to_capture(views.forward.double().numpy())[0]
    points = center + np.outer([1.0, 2.0, -1.0], ahead)
    # Nothing hides the first two; a wall around the first point then hides the second.
    far = trimesh.creation.box((1e-3, 1e-3, 1e-3)).apply_translation(center + 100)
    first = seen_points(points, far, tiny_capture)
    assert first[0] and first[1]
    shell = trimesh.creation.icosphere(4, 0.2).apply_translation(points[1])
    counted: list[int] = []
    hidden = seen_points(points, shell, tiny_capture, counted.append)
    assert not hidden[1] and counted[-1] == len(views.widths)
