"""Groups of a ball whose upper half is one thing and whose lower half another."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import ConfigError
from f3rm_ext.export import surface_groups
from f3rm_ext.export.surface_groups import group_surfaces
from f3rm_ext.query.queryable import HasGroups

MakeBall = Callable[..., Any]


def test_groups_are_what_is_alike_and_pixels_show_them(
    make_ball: MakeBall, around: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surface_groups, "POINTS", 1500)
    ball = make_ball()
    found = group_surfaces(ball, ball.heads["halves"], around)
    assert isinstance(found, HasGroups) and found.grouped_points("other") is None
    points = found.grouped_points("halves")
    assert points is not None and len(points.positions) == 1500 and points.codes.shape[0] == 1500
    upper = points.positions[:, 2] > 0
    (above, above_share), (below, below_share) = (_largest(points.groups[side]) for side in (upper, ~upper))
    assert {above, below} == {0, 1} and min(above_share, below_share) > 0.9
    for index in range(len(around)):
        camera = around[index : index + 1]
        shown, outputs = found.group_map(camera, "halves"), ball.render_camera(camera, {})
        solid = outputs["accumulation"][..., 0] > 0.5
        high = outputs["rgb"][..., 2] > 0.5  # the colour is the place
        assert (shown[~solid.numpy()] == -1).all()
        right = np.where(high, above, below) == shown
        assert right[solid.numpy()].mean() > 0.9


def _largest(groups: torch.Tensor) -> tuple[int, float]:
    """The largest group and its share."""
    counts = groups.bincount()
    return int(counts.argmax()), float(counts.max() / counts.sum())


def test_a_point_belongs_to_the_photos_that_have_points_as_near() -> None:
    line = np.stack([np.arange(12.0), np.zeros(12), np.zeros(12)], axis=1)
    assert surface_groups._see(line, line[:5] + [0, 0.5, 0]).tolist() == [True] * 10 + [False] * 2
    assert surface_groups._see(line, line[:1]).tolist() == [True] + [False] * 11


def test_without_a_surface_there_are_no_groups(make_ball: MakeBall, around: Cameras) -> None:
    ball, away = make_ball(), around[:1]
    away.camera_to_worlds = away.camera_to_worlds + torch.tensor([0.0, 0, 0, 50.0])[None, None, :] * torch.ones(1, 3, 1)
    with pytest.raises(ConfigError, match="no surface"):
        group_surfaces(ball, ball.heads["halves"], away)
