"""Undoing lenses and making pictures smaller, against nerfstudio's rays and brute force."""

import math

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType

from f3rm_ext.data import undistort as pinhole
from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.data.undistort import (
    DistortedCamera,
    PinholeIntrinsics,
    largest_pinhole,
    shrunk,
    shrunk_cameras,
    shrunk_size,
    undistort,
)
from f3rm_ext.errors import CaptureError

FRAME = PinholeIntrinsics(width=96, height=64, fx=80.0, fy=82.0, cx=45.0, cy=33.5)
BARREL = DistortedCamera(FRAME, (-0.2, 0.03, 0.0, 0.0, 0.004, -0.003))
PINCUSHION = DistortedCamera(FRAME, (0.15, 0.02, 0.01, 0.005, -0.002, 0.003))
FISHEYE = DistortedCamera(
    PinholeIntrinsics(96, 64, 50.0, 51.0, 48.5, 31.0), (0.03, -0.01, 0.002, 0.0, 0.0, 0.0), fisheye=True
)
LENSES = {"barrel": BARREL, "pincushion": PINCUSHION, "fisheye": FISHEYE}


@pytest.fixture(params=list(LENSES))
def lens(request) -> DistortedCamera:
    return LENSES[request.param]


def camera_of(view: PinholeIntrinsics, distortion=None, kind=CameraType.PERSPECTIVE) -> Cameras:
    return Cameras(
        torch.eye(4)[None, :3],
        fx=torch.tensor([[view.fx]]),
        fy=torch.tensor([[view.fy]]),
        cx=torch.tensor([[view.cx]]),
        cy=torch.tensor([[view.cy]]),
        width=torch.tensor([[view.width]]),
        height=torch.tensor([[view.height]]),
        distortion_params=None if distortion is None else torch.tensor([distortion]),
        camera_type=kind,
    )


def photo_camera(lens: DistortedCamera) -> Cameras:
    return camera_of(lens.frame, lens.distortion, CameraType.FISHEYE if lens.fisheye else CameraType.PERSPECTIVE)


def directions(camera: Cameras, positions: torch.Tensor) -> torch.Tensor:
    """nerfstudio's rays through positions (x, y), px."""
    return camera.generate_rays(0, coords=positions.flip(-1)).directions


def pattern(direction: torch.Tensor) -> torch.Tensor:
    """A grid of smooth waves over the sines of the angles, values in [0, 255]."""
    x, y = direction[..., 0] / -direction[..., 2], direction[..., 1] / -direction[..., 2]
    shrink = 1 / (1 + x**2 + y**2).sqrt()
    x, y = x * shrink, y * shrink
    waves = torch.stack([torch.sin(9 * x), torch.sin(9 * y), torch.cos(7 * (x + y))], dim=-1)
    return 127.5 + 120 * waves


def centres(width: int, height: int) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([x, y], dim=-1)


def test_the_map_and_the_cameras_agree_with_the_rays_of_nerfstudio(lens):
    view = largest_pinhole(lens)
    positions = centres(view.width, view.height)
    columns, rows = pinhole._source_map(lens, view)
    in_photo = torch.from_numpy(np.stack([columns, rows], -1)) + 0.5
    torch.testing.assert_close(
        directions(camera_of(view), positions), directions(photo_camera(lens), in_photo), atol=2e-5, rtol=0
    )


def test_a_distorted_picture_of_a_grid_becomes_the_picture_of_a_pinhole_camera(lens):
    photo = pattern(directions(photo_camera(lens), centres(lens.frame.width, lens.frame.height)))
    view = largest_pinhole(lens)
    found = undistort(ImagePixels(photo.round().clamp(0, 255).to(torch.uint8)), lens, view)
    expected = pattern(directions(camera_of(view), centres(view.width, view.height)))
    assert found.valid is None and found.pixels.shape == expected.shape
    error = (found.pixels.float() - expected).abs()
    assert error.max() < 4 and error.mean() < 1, "more than rounding and linear interpolation explain"
    # The test would notice a shift of half a pixel.
    moved = pattern(directions(camera_of(view), centres(view.width, view.height) + 0.5))
    assert (found.pixels.float() - moved).abs().mean() > 2.5


def test_the_picture_is_filled_and_as_large_as_can_be(lens):
    view = largest_pinhole(lens)
    columns, rows = pinhole._source_map(lens, view)
    width, height = lens.frame.width, lens.frame.height
    for position, size in ((columns, width), (rows, height)):
        assert position.min() >= -0.5 and position.max() <= size - 0.5
        # No more than two pixels of the photo are lost where its rim is met first.
        assert position.min() < 2 and position.max() > size - 3
    assert view.fx / lens.frame.fx == pytest.approx(view.fy / lens.frame.fy)
    assert view.width * view.height <= width * height
    if lens is PINCUSHION:
        assert view.fx == lens.frame.fx, "as sharp as the photo"
    else:
        assert view.width * view.height > 0.95 * width * height, "as many pixels as the photo"


def test_a_wide_fisheye_is_cut_at_sixty_degrees():
    view = largest_pinhole(
        DistortedCamera(PinholeIntrinsics(400, 400, 120.0, 120.0, 200.0, 200.0), fisheye=True)
    )  # 95 degrees to the side
    x = (0.5 - view.cx) / view.fx
    corner = math.atan(math.hypot(x, (0.5 - view.cy) / view.fy))
    assert math.degrees(corner) == pytest.approx(60, abs=0.5)
    assert math.degrees(math.atan(-x)) > 50


def test_without_distortion_nothing_is_touched():
    lens = DistortedCamera(FRAME)
    picture = ImagePixels(torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8))
    assert largest_pinhole(lens) is FRAME and undistort(picture, lens, FRAME) is picture
    assert shrunk(picture, 64, 96) is picture


def test_a_distortion_that_folds_the_image_is_refused():
    for lens in (
        DistortedCamera(FRAME, (-3.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
        DistortedCamera(FRAME, (0.0, 0.0, -50.0, 0.0, 0.0, 0.0)),
    ):
        with pytest.raises(ValueError):
            largest_pinhole(lens)


def test_masks_are_undistorted_with_the_image_and_no_masked_pixel_leaks(lens):
    """Masked pixels are red: where the mask keeps, no red must be seen."""
    mask = torch.ones(lens.frame.height, lens.frame.width, dtype=torch.bool)
    mask[20:40, 30:50] = False
    pixels = torch.zeros(*mask.shape, 3, dtype=torch.uint8)
    pixels[~mask] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    for picture in (
        undistort(ImagePixels(pixels, mask), lens, largest_pinhole(lens)),
        shrunk(ImagePixels(pixels, mask), 23, 31),
    ):
        assert picture.valid is not None and 0 < int((~picture.valid).sum()) < picture.valid.numel()
        assert int(picture.pixels[picture.valid][:, 0].max()) <= 1
        # ... and not much more than the masked ones is lost: one pixel around them at most.
        red = picture.pixels[..., 0] > 127
        grown = torch.nn.functional.max_pool2d(red[None].float(), 3, stride=1, padding=1)[0] > 0
        assert not bool((~picture.valid & ~grown).any())


def test_what_the_photo_does_not_show_is_masked():
    lens = BARREL
    wide = PinholeIntrinsics(160, 120, 80.0, 82.0, 80.0, 60.0)
    picture = undistort(ImagePixels(torch.full((64, 96, 3), 9, dtype=torch.uint8)), lens, wide)
    assert picture.valid is not None and not bool(picture.valid[0, 0]) and bool(picture.valid[60, 80])


def area_average(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """By brute force: every source pixel cut into height x width parts."""
    fine = values.repeat(height, axis=0).repeat(width, axis=1)
    rows, columns = values.shape[:2]
    return fine.reshape(height, rows, width, columns, -1).mean(axis=(1, 3))


@pytest.mark.parametrize("size", [(7, 8), (6, 5), (3, 4), (1, 1), (13, 8)])
def test_smaller_pictures_are_exact_averages_over_areas(size):
    pixels = torch.randint(0, 256, (13, 15, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    found = shrunk(ImagePixels(pixels), *size).pixels.float().numpy()
    assert np.abs(found - area_average(pixels.float().numpy(), *size)).max() <= 0.51


@pytest.mark.parametrize("change", ["shrunk", "undistorted"])
def test_alpha_commutes_with_any_background(change):
    """Averaging and then laying over a background is laying over it and then averaging; hidden colours never show."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (64, 96, 4), generator=generator, dtype=torch.uint8)
    pixels[::3, :, 3] = 0

    def apply(picture: ImagePixels) -> torch.Tensor:
        if change == "shrunk":
            return shrunk(picture, 21, 37).pixels.float()
        return undistort(picture, BARREL, largest_pinhole(BARREL)).pixels.float()

    small = apply(ImagePixels(pixels))
    for background in (torch.tensor([0.0, 0.0, 0.0]), torch.tensor([255.0, 80.0, 10.0])):
        alpha = pixels[..., 3:].float() / 255
        laid = (pixels[..., :3] * alpha + background * (1 - alpha)).round().to(torch.uint8)
        found = small[..., :3] * small[..., 3:] / 255 + background * (1 - small[..., 3:] / 255)
        assert (found - apply(ImagePixels(laid))).abs().max() < 2


@pytest.mark.parametrize(("height", "width"), [(64, 96), (63, 95), (33, 47)])
def test_a_point_of_the_scene_falls_on_the_averaged_position_of_its_pixels(height, width):
    """A spot painted where a camera sees a 3D point has its centroid where the smaller camera sees the point."""
    view = PinholeIntrinsics(width, height, 80.0, 82.0, width / 2 - 1.3, height / 2 + 0.8)
    camera = camera_of(view)
    point = torch.tensor([0.11, -0.07, -1.0])  # OpenGL: in front of the camera

    def seen(one: Cameras) -> torch.Tensor:
        K = one.get_intrinsics_matrices()[0]
        return (K @ (point * torch.tensor([1.0, -1.0, -1.0])))[:2]

    position = seen(camera)
    spot = torch.exp(-((centres(width, height) - position) ** 2).sum(-1) / (2 * 3.0**2))
    picture = ImagePixels((spot * 255).round().to(torch.uint8)[..., None].expand(-1, -1, 3).contiguous())
    for halvings in (1, 2):
        size = shrunk_size(height, width, 0.5**halvings)
        small = shrunk(picture, *size).pixels[..., 0].double()
        weights = small / small.sum()
        centroid = (centres(size[1], size[0]) * weights[..., None]).sum((0, 1))
        smaller = shrunk_cameras(camera, *size)
        torch.testing.assert_close(centroid.float(), seen(smaller), atol=0.03, rtol=0)
        assert (int(smaller.height), int(smaller.width)) == size and int(camera.width) == width
        ratio = torch.tensor([size[1] / width, size[0] / height])
        torch.testing.assert_close(seen(smaller), position * ratio)


def test_sizes_are_rounded_and_never_zero():
    assert shrunk_size(13, 15, 0.5) == (7, 8) and shrunk_size(1, 3, 0.125) == (1, 1)


def test_panoramas_are_refused():
    cameras = camera_of(FRAME, kind=CameraType.EQUIRECTANGULAR)
    with pytest.raises(CaptureError, match=r"a\.jpg .*EQUIRECTANGULAR"):
        DistortedCamera.of(cameras, 0, "a.jpg")
