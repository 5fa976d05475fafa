"""Depth and points from photos of a wall."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from scipy.ndimage import gaussian_filter, map_coordinates
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.data.stereo import exposures
from f3rm_ext.data.stereo.agreement import DepthMaps
from f3rm_ext.data.stereo.cache import read_or_make
from f3rm_ext.data.stereo.exposures import compare, fit_stops, light_of, look_up
from f3rm_ext.data.stereo.kernels import warp_photo
from f3rm_ext.data.stereo.points import BACKDROP_SHARE, dense_points, thin
from f3rm_ext.data.stereo.surfaces import RayDepths, measure_ray_depths, ray_depths
from f3rm_ext.data.stereo.sweep import (
    PhotoStereo,
    StereoOptions,
    best_plane,
    best_plane_reference,
    homographies,
    nearby_views,
    sweeps,
)
from f3rm_ext.utils.pictures import to_bytes, to_linear, to_srgb

WIDTH, HEIGHT, FOCAL_PX = 64, 48, 60.0
TEXELS = 400
WALL = np.array([0.25, 0.0, -1.0]), -2.0
"""Normal and offset of a slanted wall about 2 ahead of the cameras."""
FLOOR = np.array([0.0, 0.0, 1.0]), 0.0
Plane = tuple[np.ndarray, float]


def cameras_at(viewmats: list[np.ndarray]) -> PinholeCameras:
    K = torch.tensor([[FOCAL_PX, 0, WIDTH / 2], [0, FOCAL_PX, HEIGHT / 2], [0, 0, 1]])
    sizes = torch.full((5,), WIDTH), torch.full((5,), HEIGHT)
    return PinholeCameras(torch.tensor(np.array(viewmats)).float(), K.repeat(5, 1, 1), *sizes)


@pytest.fixture
def cameras() -> PinholeCameras:
    """Five cameras in a row, whose axes meet on the wall."""
    viewmats = []
    for x in (-0.5, -0.25, 0.0, 0.25, 0.5):
        angle = -np.arctan2(x, 2.0)
        turn = np.array([[np.cos(angle), 0, -np.sin(angle)], [0, 1, 0], [np.sin(angle), 0, np.cos(angle)]])
        viewmat = np.eye(4)
        viewmat[:3, :3], viewmat[:3, 3] = turn, -turn @ np.array([x, 0.0, 0.0])
        viewmats.append(viewmat)
    return cameras_at(viewmats)


def true_depth(cameras: PinholeCameras, index: int, plane: Plane = WALL) -> tuple[np.ndarray, np.ndarray]:
    """Depth of a plane and where its pixels are."""
    x, y = (np.arange(WIDTH) + 0.5 - WIDTH / 2) / FOCAL_PX, (np.arange(HEIGHT) + 0.5 - HEIGHT / 2) / FOCAL_PX
    rays = np.stack([*np.meshgrid(x, y), np.ones((HEIGHT, WIDTH))], axis=-1)
    viewmat = cameras.viewmats[index].double().numpy()
    center, ahead = -viewmat[:3, :3].T @ viewmat[:3, 3], rays @ viewmat[:3, :3]
    normal, offset = plane
    depth = (offset - normal @ center) / (ahead @ normal)
    return depth, center + depth[..., None] * ahead


def dataset_photos(cameras: PinholeCameras, plane: Plane, contrast: float, valid: Tensor | None = None) -> PhotoStereo:
    noise = gaussian_filter(np.random.default_rng(0).standard_normal((TEXELS, TEXELS)), 3)
    noise /= noise.std()

    def photo(index: int) -> ImagePixels:
        _, points = true_depth(cameras, index, plane)
        places = [(points[..., axis] / 5 + 0.5) * TEXELS for axis in (1, 0)]
        shade = 128 + contrast * map_coordinates(noise, places, order=1, mode="wrap")
        return ImagePixels(torch.from_numpy(np.repeat(shade.round().astype(np.uint8)[..., None], 3, axis=-1)), valid)

    return PhotoStereo(photo, cameras, StereoOptions(neighbours=4))


@pytest.fixture
def grazing() -> PinholeCameras:
    """Five cameras 0.5 above a floor at z = 0, which they see at about 20°."""
    viewmats, down = [], np.deg2rad(20)
    for x in (-0.3, -0.15, 0.0, 0.15, 0.3):
        ahead = np.array([0, np.cos(down), -np.sin(down)])
        side = np.array([1.0, 0, 0])
        viewmat = np.eye(4)
        viewmat[:3, :3] = np.stack([side, np.cross(ahead, side), ahead])
        viewmat[:3, 3] = -viewmat[:3, :3] @ np.array([x, 0, 0.5])
        viewmats.append(viewmat)
    return cameras_at(viewmats)


def test_finds_a_floor_seen_at_an_angle(grazing: PinholeCameras) -> None:
    found = dataset_photos(grazing, FLOOR, 40.0).depth(2)
    truth, _ = true_depth(grazing, 2, FLOOR)
    near = np.s_[HEIGHT // 2 : -4, 8:-8]
    assert (np.abs(found / truth - 1)[near] < 0.02).mean() > 0.9


@pytest.mark.parametrize("contrast", [40.0, 4.0])
def test_finds_a_wall_whatever_its_contrast(cameras: PinholeCameras, contrast: float) -> None:
    found = dataset_photos(cameras, WALL, contrast).depth(2)
    truth, _ = true_depth(cameras, 2)
    inner = np.s_[6:-6, 6:-6]
    error = np.abs(found / truth - 1)[inner]
    assert np.median(error) < 0.004 and (error < 0.01).mean() > 0.95


def test_masked_pixels_have_no_depth(cameras: PinholeCameras) -> None:
    valid = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    valid[:, : WIDTH // 2] = False
    found = dataset_photos(cameras, WALL, 40.0, valid).depth(2)
    assert (found[:, : WIDTH // 2] == 0).all() and (found[6:-6, WIDTH // 2 + 6 : -6] > 0).all()


def test_a_photo_without_neighbours_has_no_depth(cameras: PinholeCameras) -> None:
    turned = cameras.viewmats.clone()
    turned[4, [0, 2]] *= -1  # looks away
    views = dataset_photos(cameras._replace(viewmats=turned), WALL, 40.0)
    assert (views.depth(4) == 0).all() and (views.depth(0) > 0).any()


@pytest.mark.parametrize("sweep_index", [0, 1])
def test_the_kernel_agrees_with_the_reference(grazing: PinholeCameras, sweep_index: int) -> None:
    stereo = dataset_photos(grazing, FLOOR, 40.0)
    radius = grazing.radius()
    others = nearby_views(grazing, 2, 4, radius)
    grey = [cv2.cvtColor(stereo.color(index), cv2.COLOR_RGB2GRAY).astype(np.float32) for index in (2, *others)]
    grey[-1] = grey[-1][:, :50]  # photos may differ in size
    sweep = sweeps(grazing, 2, radius, 48)[sweep_index]
    warps = homographies(grazing, 2, others, sweep.normal)
    score, place = best_plane(grey[0], grey[1:], warps, sweep, 7)
    true_score, true_place = best_plane_reference(grey[0], grey[1:], warps, sweep, 7)
    np.testing.assert_array_equal(score > -1, true_score > -1)
    np.testing.assert_allclose(score, true_score, atol=2e-3)
    sure = true_score > 0.3
    assert sure.mean() > 0.2
    assert (np.abs(place - true_place)[sure] < 0.05).mean() > 0.99


def test_a_warp_stays_in_its_rows_whatever_the_homography() -> None:
    """Cameras of one orientation have entries that are 0, or nearly: bounds of a row are then beyond all integers."""
    random = np.random.default_rng(0)
    photo, room = random.random((12, 16)).astype(np.float32), np.full((10, 400), 7, np.float32)
    begin, stop = np.zeros(8, np.int64), np.zeros(8, np.int64)
    partly = 0
    for _ in range(2000):
        warp = random.choice([0, 0, 1e-38, -1e-30, 1e-12, -1e-6, 0.1, 1, -1, 8, -80], (3, 3)).astype(np.float32)
        warp_photo(photo, 12, 16, warp, int(random.integers(30)), room[1:9, 100:120], begin, stop)
        assert (begin >= 0).all() and (begin <= stop).all() and (stop <= 20).all(), warp
        partly += bool((begin < stop).any())
    assert partly > 50
    assert (room[[0, 9]] == 7).all() and (room[:, :100] == 7).all() and (room[:, 120:] == 7).all()


def test_backdrops_and_transparent_pixels_have_no_depth(cameras: PinholeCameras) -> None:
    def share(photo: Callable[[int], ImagePixels]) -> float:
        stereo = PhotoStereo(photo, cameras, StereoOptions(neighbours=4))
        return float((ray_depths(stereo).depths > 0).float().mean())

    wall = dataset_photos(cameras, WALL, 40.0)
    assert 0.7 < share(wall.photo) < 1

    def backdrop(index: int) -> ImagePixels:
        x, y = np.meshgrid(np.linspace(-1, 1, WIDTH), np.linspace(-1, 1, HEIGHT))
        shade = 150 * (1 - 0.35 * (x * x + y * y)) + np.random.default_rng(index).normal(0, 3, x.shape)
        return ImagePixels(torch.from_numpy(np.repeat(shade.round().astype(np.uint8)[..., None], 3, axis=-1)))

    assert share(backdrop) < 0.3, "it is shaded and noisy"

    def see_through(index: int) -> ImagePixels:
        left = 255 * (torch.arange(WIDTH) < WIDTH // 2).expand(HEIGHT, WIDTH).to(torch.uint8)
        return ImagePixels(torch.cat([wall.photo(index).pixels, left[..., None]], dim=-1))

    assert share(see_through) < 0.6 * share(wall.photo)


def pixel_rays(cameras: PinholeCameras, index: int) -> Tensor:
    """Directions of the rays through the centres of all pixels, 2 long along the camera's axis, scene frame."""
    columns, rows = torch.arange(WIDTH) + 0.5, torch.arange(HEIGHT)[:, None] + 0.5
    x, y = (columns - WIDTH / 2) / FOCAL_PX, (rows - HEIGHT / 2) / FOCAL_PX
    local = torch.stack(torch.broadcast_tensors(x, y, torch.ones(())), dim=-1).view(-1, 3)
    return 2 * local @ cameras.viewmats[index, :3, :3].float()


def test_rays_meet_the_wall_where_stereo_finds_it(cameras: PinholeCameras) -> None:
    depths = ray_depths(dataset_photos(cameras, WALL, 40.0))
    for index in (0, len(cameras.widths) - 1):
        rays = pixel_rays(cameras, index)
        photo = torch.full((len(rays),), index)
        distance = depths.along(photo, rays)
        known = distance > 0
        true = torch.from_numpy(true_depth(cameras, index)[0]).float().flatten() / 2
        assert known.float().mean() > 0.6
        assert ((distance / true - 1).abs()[known] < 0.02).float().mean() > 0.99
        assert not depths.along(photo, -rays).any(), "behind the camera"
        assert not depths.along(photo, rays + 4 * rays[0] - 4 * rays[-1]).any(), "beside the picture"


def test_rays_of_photos_without_depth_meet_nothing(cameras: PinholeCameras) -> None:
    photos = dataset_photos(cameras, WALL, 40.0)
    some = ray_depths(photos, 2)
    assert len(some.depths) == 2
    hits = [
        some.along(torch.full((WIDTH * HEIGHT,), i), pixel_rays(cameras, i)).any().item() for i in range(len(photos))
    ]
    assert sum(hits) == 2


def test_small_photos_among_larger_ones_have_no_depth_beside_them() -> None:
    K = torch.tensor([[1.0, 0, 1.5], [0, 1.0, 1.0], [0, 0, 1]]).expand(2, 3, 3)
    sizes = torch.tensor([3, 6]), torch.tensor([2, 4])
    cameras = PinholeCameras(torch.eye(4).expand(2, 4, 4), K, *sizes)
    depths = RayDepths.of(cameras, [np.full((2, 3), 5.0, np.float32)], [0])
    rays = torch.tensor([[1.0, 0.5, 1.0], [2.0, 0.5, 1.0], [0.0, 0.5, 2.0]])
    assert depths.along(torch.zeros(3).long(), rays).tolist() == [5.0, 0.0, 2.5]


@pytest.mark.parametrize(("known", "median"), [(0, 0.0), (1, 0.0), (2, 3.0), (20, 3.0)])
def test_depths_have_a_median_where_a_tenth_is_known(known: int, median: float) -> None:
    depths = torch.zeros(20)
    depths[:known] = 3.0
    assert RayDepths(torch.eye(3)[None], torch.zeros(1), depths.view(1, 4, 5)).median() == median


def test_dense_points_lie_on_the_wall(cameras: PinholeCameras) -> None:
    points = dense_points(dataset_photos(cameras, WALL, 40.0), 500)
    normal, offset = WALL
    far = np.abs(points.xyz @ normal - offset) / np.linalg.norm(normal)
    assert 200 < len(points.xyz) <= 500 and points.xyz.dtype == np.float32 and points.rgb.dtype == np.uint8
    surface = far < 0.04
    assert 0.9 * (1 - BACKDROP_SHARE) < surface.mean() < 1 and np.median(far[surface]) < 0.01
    assert (points.xyz @ normal - offset < 0)[~surface].mean() > 0.8, "what has no depth lies behind, not before"


def test_a_blank_wall_has_no_depth_and_no_points(cameras: PinholeCameras) -> None:
    assert (dataset_photos(cameras, WALL, 0.0).depth(2) == 0).all()
    assert len(dense_points(dataset_photos(cameras, WALL, 0.0)).xyz) == 0


@pytest.mark.parametrize("stops", [[0.0] * 5, [-1.0, 0.5, 1.0, -0.5, 0.0]])
def test_exposures_are_found_in_what_photos_show(cameras: PinholeCameras, stops: list[float]) -> None:
    wall = dataset_photos(cameras, WALL, 40.0)
    light = [np.exp2(stops[i]) * to_linear(wall.color(i) / 255.0) for i in range(5)]
    pixels = [torch.from_numpy(to_bytes(to_srgb(values * [1.0, 1.0, 0.9]))) for values in light]
    stereo = PhotoStereo(lambda index: ImagePixels(pixels[index]), cameras, StereoOptions(neighbours=4))
    maps = DepthMaps(cameras, [true_depth(cameras, index)[0].astype(np.float32) for index in range(5)])
    found = fit_stops(look_up(stereo, maps))
    np.testing.assert_allclose(found.stops, np.repeat(np.array(stops)[:, None], 3, axis=1), atol=0.05)
    assert found.vary is any(stops)
    few, truth = slice(0, 4), np.repeat(np.array(stops)[:, None], 3, axis=1)
    known = PhotoStereo(stereo.photo, cameras.take(few), StereoOptions(neighbours=4))
    some = DepthMaps(known.cameras, [maps.depth(index) for index in range(4)])
    np.testing.assert_allclose(compare(light_of(stereo.photo(4)), cameras, known, some, truth), truth[4], atol=0.05)


@pytest.mark.parametrize("vary", [False, True])
def test_every_photo_has_an_exposure_also_where_some_are_compared(
    make_outputs: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    watch_calls: Callable[..., Any],
    tmp_path: Path,
    vary: bool,
) -> None:
    monkeypatch.setattr(exposures, "MOST_VIEWS", 4)
    monkeypatch.setattr(exposures, "fit_stops", lambda lights: fit_stops(lights)._replace(vary=vary))
    outputs = make_outputs(7)
    measured = exposures.read_or_measure_stops(outputs, tmp_path / "cache")
    assert measured.vary is vary and measured.stops.shape == (7, 3) and np.isfinite(measured.stops).all()
    measurements = watch_calls(exposures, "measure_stops")
    again = exposures.read_or_measure_stops(outputs, tmp_path / "cache")
    assert not measurements
    assert again[1:] == measured[1:]
    np.testing.assert_array_equal(again.stops, measured.stops)


def test_what_cannot_be_kept_is_made_once_and_what_is_kept_needs_no_writing(tmp_path: Path) -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"found")
        return b"found"

    def find(path: Path) -> tuple[bytes, Path | None]:
        return read_or_make(path, make, read=Path.read_bytes, encode=bytes)

    (tmp_path / "a").mkdir()  # so that no file can take its name
    assert find(tmp_path / "a") == (b"found", None) and len(made) == 1
    assert find(tmp_path / "b") == (b"found", None) and find(tmp_path / "b") == (b"found", tmp_path / "b")
    (tmp_path / "b.lock").unlink()
    (tmp_path / "b.lock").mkdir()
    assert find(tmp_path / "b") == (b"found", tmp_path / "b") and len(made) == 2


def test_nothing_is_said_of_panoramas(make_outputs: Callable[..., Any], tmp_path: Path) -> None:
    outputs = make_outputs(4)
    outputs.cameras.camera_type[2] = CameraType.EQUIRECTANGULAR.value
    assert exposures.read_or_measure_stops(outputs, tmp_path / "cache") is None
    assert measure_ray_depths(outputs) is None


def test_nothing_is_said_of_photos_that_share_no_place(cameras: PinholeCameras) -> None:
    stereo = dataset_photos(cameras, WALL, 40.0)
    nothing = DepthMaps(cameras, [np.zeros((HEIGHT, WIDTH), np.float32)] * 5)
    found = fit_stops(look_up(stereo, nothing))
    assert not found.vary and not found.stops.any()


def test_points_are_thinned_by_the_pixels_that_they_cover() -> None:
    dice = np.random.default_rng(0)
    near, far = dice.random((20_000, 3)), 16 * dice.random((20_000, 3)) + 50
    xyz, spacing = np.concatenate([near, far]), np.repeat([0.01, 0.16], 20_000)
    rgb = np.repeat(np.array([[10, 20, 30], [40, 50, 60]], np.uint8), 20_000, axis=0)
    points = thin(xyz, rgb, spacing, 1000)
    close = points.xyz[:, 0] < 10
    assert len(points.xyz) <= 1000 and 0.4 < close.mean() < 0.6
    assert (points.rgb[close] == [10, 20, 30]).all() and (points.rgb[~close] == [40, 50, 60]).all()
