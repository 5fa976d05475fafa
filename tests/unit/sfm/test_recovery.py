"""Cameras are recovered from their ray maps, exactly without noise."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from f3rm_ext.sfm import recovery
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.rays import normalize_maps, render_maps


def rotation_errors_deg(found: Tensor, true: Tensor) -> Tensor:
    cosine = (torch.einsum("nij,nij->n", found, true) - 1) / 2
    sine = (found.mT @ true - true.mT @ found).flatten(1).norm(dim=1) / math.sqrt(8)
    return torch.rad2deg(torch.atan2(sine, cosine))


@pytest.mark.parametrize("known", [True, False])
def test_recovery_is_exact_without_noise(cameras: CameraSet, depth: Tensor, known: bool) -> None:
    intrinsics = (cameras.focals_px, cameras.principals_px) if known else "all"
    maps = render_maps(cameras, depth)
    found = recovery.recover_cameras(maps, cameras.sizes_px, intrinsics)
    true = cameras.relative_to_first()
    assert rotation_errors_deg(found.rotations, true.rotations).max() < 1e-5
    torch.testing.assert_close(found.centers, true.centers, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.focals_px, true.focals_px, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.principals_px, true.principals_px, atol=1e-4, rtol=0)


def test_focal_lengths_alone_are_exact_and_turn_cameras_less(cameras: CameraSet, depth: Tensor) -> None:
    middle = dataclasses.replace(cameras, principals_px=cameras.sizes_px / 2)
    maps, true = render_maps(middle, depth), middle.relative_to_first()
    exact = recovery.recover_cameras(maps, cameras.sizes_px, "focal")
    torch.testing.assert_close(exact.focals_px, true.focals_px, atol=1e-4, rtol=0)
    assert rotation_errors_deg(exact.rotations, true.rotations).max() < 1e-5
    noisy = normalize_maps(maps + 0.01 * torch.randn(maps.shape, generator=torch.Generator().manual_seed(0)).double())
    found = (recovery.recover_cameras(noisy, cameras.sizes_px, which) for which in ("focal", "all"))
    focal, everything = (float(rotation_errors_deg(each.rotations, true.rotations).mean()) for each in found)
    assert focal < 0.6 * everything


def test_a_third_of_wrong_rays_does_not_matter(cameras: CameraSet, depth: Tensor) -> None:
    maps = render_maps(cameras, depth)
    wrong = torch.rand(maps[:, :1].shape, generator=torch.Generator().manual_seed(3)) < 0.3
    garbage = normalize_maps(torch.randn(maps.shape, generator=torch.Generator().manual_seed(4)).double())
    maps[:, 4:] = torch.where(wrong, garbage[:, 4:], maps[:, 4:])
    found = recovery.recover_cameras(maps, cameras.sizes_px, "all")
    torch.testing.assert_close(found.focals_px, cameras.focals_px, atol=1e-3, rtol=0)


@pytest.mark.parametrize("count", [200, 3000])  # all of them are judges, and only some
def test_rays_that_are_off_by_many_sigmas_have_no_say(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.cat([2 * torch.rand(count, 2, generator=generator) - 1, torch.ones(count, 1)], dim=1).double()
    true = torch.tensor([[1.0, 0.2, 0.1], [-0.1, 0.9, 0.2], [0.1, -0.1, 1.2]], dtype=torch.float64)
    world = torch.nn.functional.normalize(pixels @ true.T, dim=1)
    world += 0.001 * torch.randn(world.shape, generator=generator).double()
    wrong = torch.rand(count, generator=generator) < 0.25
    spoiled = world + 0.02 * wrong[:, None] * torch.tensor([1.0, 0, 0])
    found, of_all, of_good = (
        recovery.fit_homography(pixels, spoiled),
        recovery.fit_homography(pixels, world),
        recovery.fit_homography(pixels[~wrong], world[~wrong]),
    )
    assert (of_good - of_all).norm() < 3e-4 and (found - of_good).norm() < 3e-4
    torch.testing.assert_close(found, true / true.norm(), atol=1e-3, rtol=0)


def test_cameras_that_look_sideways_and_back_are_recovered(cameras: CameraSet, depth: Tensor) -> None:
    """Directions whose third coordinate is zero or negative break a homography between planes."""
    angles = torch.deg2rad(torch.tensor([0.0, 90.0, 180.0, 270.0, 100.0], dtype=torch.float64))
    zero, one = torch.zeros_like(angles), torch.ones_like(angles)
    turned = torch.stack([angles.cos(), zero, angles.sin(), zero, one, zero, -angles.sin(), zero, angles.cos()], dim=1)
    around = CameraSet(
        turned.unflatten(1, (3, 3)), cameras.centers, cameras.focals_px, cameras.principals_px, cameras.sizes_px
    )
    found = recovery.recover_cameras(render_maps(around, depth), cameras.sizes_px, "all")
    assert rotation_errors_deg(found.rotations, around.relative_to_first().rotations).max() < 1e-5


def test_a_mirrored_bundle_gives_up_the_axis_on_which_it_spreads_least(cameras: CameraSet) -> None:
    spread = torch.tensor([1.0, 0.1, 0.5], dtype=torch.float64)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    local, lengths = (signs * spread).expand(5, 8, 3), torch.linspace(1, 9, 8, dtype=torch.float64)[:, None]
    world = (local * torch.tensor([1.0, -1.0, 1.0])) @ cameras.rotations.mT
    torch.testing.assert_close(recovery.procrustes(local, world), cameras.rotations)
    torch.testing.assert_close(recovery.procrustes(lengths * local, lengths.flip(0) * world), cameras.rotations)
