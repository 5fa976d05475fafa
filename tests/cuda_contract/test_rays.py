"""Rays under autocast, in which nerfstudio's trainer asks for them, are as exact as without."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from pretend.ledger import counted

from f3rm_ext.data.ray_generators import make_ray_generator, picture_rays
from f3rm_ext.nerf.model import F3rmModel

FOCAL_PX = 1000.0
Autocast = Callable[..., AbstractContextManager[None]]


def _cameras(focal_px: torch.Tensor) -> Cameras:
    turns = torch.linalg.qr(torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
    poses = torch.cat([turns, torch.zeros(4, 3, 1)], dim=-1).float()
    return Cameras(poses, fx=focal_px, fy=FOCAL_PX, cx=480.0, cy=270.0, width=960, height=540)


def _angles_px(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angles between directions, pixels at the centre of the picture."""
    return torch.linalg.cross(first.cpu().double(), second.cpu().double()).norm(dim=-1) * FOCAL_PX


@pytest.mark.parametrize("same", [True, False], ids=["one set of intrinsics", "several"])
def test_training_rays_are_single_and_nobody_waits(same: bool, cuda: torch.device, cuda_autocast: Autocast) -> None:
    cameras = _cameras(torch.full((4,), FOCAL_PX) if same else FOCAL_PX + torch.arange(4.0))
    if not same:
        cameras.distortion_params = torch.linspace(0.0, 0.02, 24).reshape(4, 6)
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randint(top, (500,), generator=generator) for top in (4, 540, 960)], dim=-1)
    expected, there = make_ray_generator(cameras, "cpu")(indices), indices.to(cuda)
    make = make_ray_generator(cameras, cuda)
    with counted() as ledger, cuda_autocast():
        found = make(there)
    assert not ledger.waits
    assert found.directions.device == cuda and found.directions.dtype == torch.float32
    assert float(_angles_px(found.directions, expected.directions).max()) < 1e-3
    for name in ("origins", "camera_indices"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name))
    torch.testing.assert_close(found.pixel_area.cpu(), expected.pixel_area, rtol=1e-3, atol=0)


def test_refined_poses_turn_rays_in_single(
    small_field: F3rmModel, make_rays: Callable[..., RayBundle], cuda: torch.device, cuda_autocast: Autocast
) -> None:
    optimizer = CameraOptimizerConfig(mode="SO3xR3").setup(num_cameras=5, device="cpu").double()
    optimizer.pose_adjustment.data.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(3))
    truth = make_rays(500, torch.device("cpu"), torch.float64)
    optimizer.apply_to_raybundle(truth)
    small_field.camera_optimizer = optimizer.float().to(cuda)
    rays = make_rays(500, cuda)
    with cuda_autocast():
        small_field.train()(rays)
    assert rays.directions.dtype == rays.origins.dtype == torch.float32
    assert float(_angles_px(rays.directions, truth.directions).max()) < 1e-3
    torch.testing.assert_close(rays.origins.cpu(), truth.origins.float())


def test_a_picture_makes_the_host_wait_for_nothing(
    cuda: torch.device, cuda_autocast: Autocast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rays are nerfstudio's, with and without distortion."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for distortion in (None, torch.tensor([[0.06, -0.08, 0.01, 0.0, -0.001, 0.0002]])):
        camera = _cameras(torch.full((4,), FOCAL_PX))[2:3]
        camera.width, camera.height = camera.width // 20, camera.height // 20
        camera.distortion_params = distortion
        expected = camera.generate_rays(camera_indices=0, keep_shape=True)
        with counted() as ledger, cuda_autocast():
            found = picture_rays(camera, cuda)
        assert not ledger.waits and found.shape == expected.shape == (27, 48)
        assert found.directions.device == cuda and found.directions.dtype == torch.float32
        for name in ("origins", "directions", "camera_indices"):
            torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name))
        torch.testing.assert_close(found.pixel_area.cpu(), expected.pixel_area, rtol=1e-3, atol=1e-12)


def test_other_pictures_are_nerfstudios(cuda: torch.device) -> None:
    camera = _cameras(torch.full((4,), FOCAL_PX))[2:3]
    camera.width, camera.height = camera.width // 20, camera.height // 20
    box = OrientedBox(torch.eye(3), torch.zeros(3), torch.ones(3))
    limited = picture_rays(camera, cuda, box)
    assert limited.nears is not None and limited.shape == (27, 48)
    camera.camera_type[:] = CameraType.FISHEYE.value
    expected = camera.generate_rays(camera_indices=0, keep_shape=True)
    torch.testing.assert_close(picture_rays(camera, cuda).directions.cpu(), expected.directions)
