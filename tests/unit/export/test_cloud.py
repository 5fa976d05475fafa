"""Point clouds of a ball that is known exactly."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import ConfigError
from f3rm_ext.export.cloud import Cloud, CloudOptions, HasDensity, estimate_normals, gather_points, voxel_downsample
from f3rm_ext.query.embeddings import Embeddings, Query

MakeBall = Callable[..., Any]


def halves(ball: Any) -> list[Query]:
    """A query for the upper half and one for the lower, each against the other."""
    weight = ball.heads["halves"].weight
    sides = [Embeddings.from_full(weight[:, i][None], (name,)) for i, name in enumerate(("upper", "lower"))]
    return [Query(side.sources[0], "halves", side, other) for side, other in (sides, sides[::-1])]


def test_points_lie_on_the_surface_and_all_around(make_ball: MakeBall, around: Cameras) -> None:
    cloud = gather_points(make_ball(), around, CloudOptions(points=900))
    assert len(cloud) == 900
    np.testing.assert_allclose(np.linalg.norm(cloud.positions, axis=1), 0.5, atol=1e-5)
    octants = {tuple(row) for row in (cloud.positions > 0).tolist()}
    assert len(octants) == 8
    np.testing.assert_allclose(cloud.colors / 255, cloud.positions + 0.5, atol=0.5 / 255 + 1e-6)
    assert np.isnan(cloud.density).all() and (cloud.accumulation == 1).all() and cloud.scores.shape == (900, 0)
    assert len(np.unique(cloud.positions, axis=0)) == 900


def test_expected_depth(make_ball: MakeBall, around: Cameras) -> None:
    cloud = gather_points(make_ball(), around, CloudOptions(points=50, depth="expected"))
    away = np.linalg.norm(cloud.positions - cloud.seen_from, axis=1)
    surface = gather_points(make_ball(), around, CloudOptions(points=50))
    np.testing.assert_allclose(away, np.linalg.norm(surface.positions - surface.seen_from, axis=1) + 0.01, atol=1e-5)


def test_more_points_than_pixels_come_from_between_them(make_ball: MakeBall, around: Cameras) -> None:
    ball = make_ball()
    cloud = gather_points(ball, around, CloudOptions(points=4000))
    assert len(np.unique(cloud.positions, axis=0)) == len(cloud) == 4000 > 6 * 24 * 20
    assert ball.pixels <= 6 * 4000


def test_few_points_take_small_pictures(make_ball: MakeBall, around: Cameras) -> None:
    ball = make_ball()
    gather_points(ball, around, CloudOptions(points=100))
    assert ball.pixels < 6 * 24 * 20 / 2


def test_the_same_every_time_and_cameras_stay_as_they_are(make_ball: MakeBall, around: Cameras) -> None:
    before = around.cx.clone(), around.fx.clone(), around.width.clone()
    first, second = (gather_points(make_ball(), around, CloudOptions(points=300)) for _ in range(2))
    np.testing.assert_array_equal(first.positions, second.positions)
    assert all(torch.equal(a, b) for a, b in zip(before, (around.cx, around.fx, around.width), strict=True))


def test_progress_ends_at_what_there_is(make_ball: MakeBall, around: Cameras) -> None:
    seen: list[int] = []
    gather_points(make_ball(), around, CloudOptions(points=500), on_progress=seen.append)
    assert seen[-1] == 500 and max(seen) == 500 and len(seen) > len(around)


def test_crop_box(make_ball: MakeBall, around: Cameras) -> None:
    def inside(points: np.ndarray) -> np.ndarray:
        return (points[:, 2] > 0.2) & (points[:, 0] < 0)

    cloud = gather_points(make_ball(), around, CloudOptions(points=300, inside=inside))
    assert len(cloud) == 300 and inside(cloud.positions).all()


def test_density(make_ball: MakeBall, around: Cameras) -> None:
    ball = make_ball(dense=True)
    assert isinstance(ball, HasDensity) and not isinstance(make_ball(), HasDensity)
    all_of_it = gather_points(ball, around, CloudOptions(points=300))
    assert set(all_of_it.density.tolist()) == {1.0, 100.0}
    dense = gather_points(ball, around, CloudOptions(points=300, density=50.0))
    assert len(dense) == 300 and (dense.positions[:, 0] >= 0).all()
    with pytest.raises(ConfigError, match="has no density"):
        gather_points(make_ball(), around, CloudOptions(density=1.0))


def test_selected_points(make_ball: MakeBall, around: Cameras) -> None:
    ball = make_ball()
    upper, lower = halves(ball)
    cloud = gather_points(ball, around, CloudOptions(points=300, select=0.6), [upper])
    assert len(cloud) == 300 and (cloud.positions[:, 2] >= 0).all() and (cloud.scores >= 0.6).all()
    both = gather_points(ball, around, CloudOptions(points=300, select=0.6), [upper, lower])
    assert (both.positions[:, 2] < 0).any() and (both.positions[:, 2] >= 0).any()
    np.testing.assert_array_equal(both.scores.argmax(axis=1), both.positions[:, 2] < 0)


def test_nothing_left_says_why(make_ball: MakeBall, around: Cameras) -> None:
    def nowhere(points: np.ndarray) -> np.ndarray:
        return np.zeros(len(points), dtype=bool)

    with pytest.raises(ConfigError, match=r"[1-9]\d* rays [1-9]\d*.* 0 in"):
        gather_points(make_ball(), around, CloudOptions(points=100, inside=nowhere))


def test_voxels(make_ball: MakeBall, around: Cameras) -> None:
    cloud = gather_points(make_ball(), around, CloudOptions(points=5000, voxel=0.2))
    cubes = np.floor(cloud.positions.astype(np.float64) / 0.2)
    assert len(np.unique(cubes, axis=0)) == len(cloud)
    # A sphere of this size meets some 150 such cubes.
    assert 100 < len(cloud) < 200


def test_a_voxel_keeps_what_is_nearest_to_the_mean() -> None:
    x = np.asarray([0.1, 0.5, 0.8, 1.2, -0.3], dtype=np.float32)
    count = len(x)
    zeros = np.zeros((count, 3), dtype=np.float32)
    cloud = Cloud(
        positions=np.stack([x, 0 * x, 0 * x], axis=1),
        colors=np.arange(3 * count, dtype=np.uint8).reshape(count, 3),
        accumulation=x,
        density=x,
        seen_from=zeros,
        scores=zeros[:, :1],
    )
    kept = voxel_downsample(cloud, 1.0)
    np.testing.assert_array_equal(kept.positions[:, 0], x[[1, 3, 4]])
    np.testing.assert_array_equal(kept.colors, cloud.colors[[1, 3, 4]])
    assert len(voxel_downsample(cloud, 0.0)) == count


def test_normals_point_outwards(make_ball: MakeBall, around: Cameras) -> None:
    cloud = gather_points(make_ball(), around, CloudOptions(points=3000))
    normals = estimate_normals(cloud.positions, cloud.seen_from)
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1.0, atol=1e-5)
    cosine = (normals * cloud.positions).sum(axis=1) / 0.5
    assert np.median(cosine) > 0.99 and (cosine > 0.8).all()


def test_normals_of_one_point() -> None:
    normals = estimate_normals(np.zeros((1, 3), np.float32), np.asarray([[0, 0, 4]], np.float32))
    np.testing.assert_array_equal(normals, [[0, 0, 1]])
