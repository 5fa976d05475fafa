"""A ball between one near and five far walls, fused in shells."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import unproject
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh import fusion
from f3rm_ext.mesh.box_contraction import BoxContraction
from f3rm_ext.mesh.extraction import extract_mesh
from f3rm_ext.mesh.fusion import fuse_depth
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.scenes import SurfaceScene
from f3rm_ext.mesh.shells import fit_contraction, fuse_shells, simplify_evenly
from f3rm_ext.mesh.views import RenderedView, SceneViews, stored_views
from f3rm_ext.utils.open3d_library import RayCaster

SIZE_PX = 64
NEAR, FAR, BALL = 2.0, 60.0, 0.4
"""Distances of the walls from the middle, where the ball is, and its radius."""
VOXEL = 0.05
SPACE = BoxContraction(np.zeros(3), 3.0)


@pytest.fixture(scope="module")
def cameras(make_cameras: Callable[..., PinholeCameras]) -> PinholeCameras:
    """Sixteen cameras in a circle around the ball, looking at it and at what is behind it."""
    turns = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    aheads = -np.stack([np.cos(turns), np.sin(turns), 0 * turns], axis=1)
    return make_cameras(-1.5 * aheads, aheads, np.cross(aheads, [0, 0, 1.0]), SIZE_PX)


def render(cameras: PinholeCameras, index: int) -> RenderedView:
    """The exact depth of what is nearest."""
    pixels = torch.arange(SIZE_PX**2)
    center = cameras.positions[index].double()
    ahead = unproject(cameras, index, torch.ones(len(pixels), dtype=torch.float64), pixels) - center
    a, b, c = ahead.square().sum(1), (ahead * center).sum(1), center.square().sum() - BALL**2
    ball = torch.where(b * b > a * c, (-b - (b * b - a * c).clamp_min(0).sqrt()) / a, torch.inf)
    ahead = torch.where(ahead.abs() < 1e-9, 1e-9, ahead)
    walls = torch.full_like(ahead, FAR)
    walls[:, 0] = torch.where(ahead[:, 0] > 0, NEAR, FAR)
    depth = torch.minimum(ball, ((walls * ahead.sign() - center) / ahead).amin(dim=1))
    shape = (SIZE_PX, SIZE_PX)
    return RenderedView(np.full((*shape, 3), 128, np.uint8), depth.float().numpy().reshape(shape))


@pytest.fixture
def views(cameras: PinholeCameras) -> SceneViews:
    return SceneViews(cameras, lambda index: render(cameras, index))


def ball_error(mesh: trimesh.Trimesh) -> float:
    radii = np.linalg.norm(mesh.vertices, axis=1)
    assert (radii < 1).sum() > 20
    return float(np.abs(radii[radii < 1] - BALL).max())


def test_space_is_contracted_and_expanded() -> None:
    space = BoxContraction(np.array([1.0, 2.0, 3.0]), 2.0)
    points = np.random.default_rng(0).normal(size=(500, 3)) * np.geomspace(0.1, 1e4, 500)[:, None] + space.center
    inside = space.distances(points) <= 1
    small = space.contract(points)
    assert 20 < inside.sum() < 480 and np.abs(small).max() < 2
    np.testing.assert_allclose(small[inside], (points[inside] - space.center) / 2)
    np.testing.assert_allclose(space.expand(small), points, rtol=1e-7, atol=1e-9)


def test_far_vertices_stay_in_the_scene(open3d: ModuleType) -> None:
    random = np.random.default_rng(0)
    angle, radius = np.meshgrid(np.linspace(0, 2 * np.pi, 80), np.geomspace(1, 1000, 60))
    height = random.normal(0, 0.05, radius.shape) * radius
    ground = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=-1).reshape(-1, 3)
    corner = (np.arange(59)[:, None] * 80 + np.arange(79)).reshape(-1)
    faces = np.concatenate(
        [np.stack([corner, corner + 1, corner + 80], 1), np.stack([corner + 1, corner + 81, corner + 80], 1)]
    )
    mesh = simplify_evenly(trimesh.Trimesh(ground, faces, process=False), SPACE, 300)
    assert np.abs(mesh.vertices).max() <= 1.001 * np.abs(ground).max()


def test_near_is_fine_and_far_is_there(views: SceneViews, open3d: ModuleType) -> None:
    seen: list[tuple[int, int]] = []
    with stored_views(views) as stored:
        parts = fuse_shells(stored, VOXEL, SPACE, on_progress=lambda done, total: seen.append((done, total)))
    assert len(parts) == 1 + np.ceil(np.log2(FAR / SPACE.radius)) and ball_error(parts[0]) < VOXEL
    far = np.abs(parts[-1].vertices)
    off = np.abs(far.max(axis=1) - FAR)
    assert np.quantile(off, 0.95) < VOXEL * 2 ** (len(parts) - 1)
    # A shell has about as many triangles as the one inside it, although it covers four times the area.
    assert max(len(part.faces) for part in parts[1:]) < len(parts[0].faces)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1]


def test_there_are_no_gaps_between_shells(views: SceneViews, open3d: ModuleType) -> None:
    with stored_views(views) as stored:
        parts = fuse_shells(stored, VOXEL, SPACE)
    inner = trimesh.util.concatenate(parts[:2])
    y, z = np.meshgrid(SPACE.radius + np.linspace(-4, 4, 81) * VOXEL, np.linspace(-1, 1, 41))
    starts = np.stack([np.ones_like(y), y, z], axis=-1).reshape(-1, 3)
    x = 1 + RayCaster(inner.vertices, inner.faces).cast(starts, np.array([1.0, 0.0, 0.0]))["t_hit"]
    assert np.abs(x - NEAR).max() < 2 * VOXEL


def test_a_bounded_scene_gives_the_same_mesh(ball_views: SceneViews, open3d: ModuleType) -> None:
    with stored_views(ball_views) as stored:
        space = fit_contraction(stored)
        one = fuse_depth(stored, 0.02)
        (two,) = fuse_shells(stored, 0.02, space)
    assert space.radius == pytest.approx(1.65 + 1.05, abs=0.1) and len(one.faces) == len(two.faces)
    ordered = [np.unique(np.asarray(mesh.vertices).round(6), axis=0) for mesh in (one, two)]
    np.testing.assert_allclose(ordered[0], ordered[1], atol=2e-6)


def test_memory_is_bounded(views: SceneViews, watch_calls: Callable[..., Any], open3d: ModuleType) -> None:
    grids = watch_calls(fusion, "_grid")
    with stored_views(views) as stored:
        fuse_shells(stored, VOXEL, SPACE)
        count = len(grids)
        fuse_depth(stored, VOXEL * 8)  # even then
    blocks = [call.args[1] for call in grids]
    assert max(blocks[:count]) < max(blocks[count:])


def test_the_foreground_survives_cleaning_and_simplification(views: SceneViews, open3d: ModuleType) -> None:
    scene = SurfaceScene(views, None, CaptureFrame(np.eye(3), np.zeros(3), 1.0), {})
    options = ExtractionOptions(voxel=0.1, unbounded=True, min_views=1, min_part=0.01, vertices=2000)
    found = extract_mesh(scene, options)
    assert 1900 < len(found.mesh.vertices) <= 2000
    assert ball_error(found.mesh) < 0.15 and np.abs(found.mesh.vertices).max() > 0.98 * FAR


def test_no_depth(cameras: PinholeCameras, open3d: ModuleType) -> None:
    nothing = RenderedView(np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.float32))
    with stored_views(SceneViews(cameras, lambda index: nothing)) as stored:
        with pytest.raises(MeshError, match="depth"):
            fuse_shells(stored, VOXEL, fit_contraction(stored))
