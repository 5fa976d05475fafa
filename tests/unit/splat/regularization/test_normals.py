"""Normals of depth maps and Gaussians, and their agreement: planes by hand, loops in numpy, empty and broken depth."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.regularization.normals import dn_consistency, facing_normals, normals_from_depth, unit_normals

Camera = Callable[..., tuple[Tensor, Tensor]]
TOWARDS = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64)


def plane_depth(K: Tensor, h: int, w: int, slope_x: float, slope_y: float, z0: float = 5.0) -> Tensor:
    """Depth of the plane z = z0 + slope_x x + slope_y y at pixel centres."""
    x = (torch.arange(w, dtype=K.dtype) + 0.5 - K[0, 2]) / K[0, 0]
    y = (torch.arange(h, dtype=K.dtype) + 0.5 - K[1, 2]) / K[1, 1]
    return z0 / (1 - slope_x * x - slope_y * y[:, None])


def plane_normal(slope_x: float, slope_y: float) -> Tensor:
    normal = torch.tensor([slope_x, slope_y, -1.0], dtype=torch.float64)
    return normal / normal.norm()


@pytest.mark.parametrize(("slope_x", "slope_y"), [(0.0, 0.0), (1.0, 0.0), (0.0, -0.7), (0.5, 1.2)])
def test_planes(slope_x: float, slope_y: float, camera: Camera) -> None:
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    normals, valid = normals_from_depth(plane_depth(K, 9, 12, slope_x, slope_y), K)
    assert torch.allclose(normals[valid], plane_normal(slope_x, slope_y).expand(7 * 10, 3))
    assert valid[1:-1, 1:-1].all() and int(valid.sum()) == 7 * 10
    assert not normals[~valid].any()


def by_definition(depth: np.ndarray, K: np.ndarray, i: int, j: int) -> np.ndarray:
    def point(row: int, column: int) -> np.ndarray:
        return depth[row, column] * (np.linalg.inv(K) @ [column + 0.5, row + 0.5, 1])

    normal = np.cross(point(i + 1, j) - point(i - 1, j), point(i, j + 1) - point(i, j - 1))
    normal /= np.linalg.norm(normal)
    return -normal if normal @ point(i, j) > 0 else normal


def test_normals_against_loops(camera: Camera) -> None:
    _, K = camera(7, 6, focal=10.0, dtype=torch.float64)
    depth = 1 + torch.rand(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normals, _ = normals_from_depth(depth, K)
    for i in range(1, 5):
        for j in range(1, 6):
            np.testing.assert_allclose(normals[i, j].numpy(), by_definition(depth.numpy(), K.numpy(), i, j), atol=1e-12)


@pytest.mark.parametrize("hole", [0.0, -1.0, math.nan, math.inf])
def test_pixels_next_to_a_hole_have_no_normal(hole: float, camera: Camera) -> None:
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    depth = plane_depth(K, 9, 12, 0.5, 0.0)
    depth[4, 5] = hole
    depth.requires_grad_()
    normals, valid = normals_from_depth(depth, K)
    missing = (~valid[1:-1, 1:-1]).nonzero() + 1
    assert sorted(map(tuple, missing.tolist())) == [(3, 5), (4, 4), (4, 5), (4, 6), (5, 5)]
    assert torch.isfinite(normals).all()
    normals.sum().backward()
    assert depth.grad is not None and torch.isfinite(depth.grad).all()


@pytest.mark.parametrize(("h", "w"), [(2, 9), (9, 2), (1, 1)])
def test_pictures_without_an_inside_have_no_normals(h: int, w: int, camera: Camera) -> None:
    _, K = camera(dtype=torch.float32)
    normals, valid = normals_from_depth(torch.ones(h, w), K)
    assert not valid.any() and not normals.any()


def test_gaussians_face_the_camera() -> None:
    viewmat = torch.eye(4)
    viewmat[:3, :3] = torch.tensor([[0.0, 0, 1], [0, 1, 0], [-1, 0, 0]])  # the camera looks along −x
    viewmat[:3, 3] = torch.tensor([0.0, 0, 6])
    normals = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0.6, 0.8, 0]])
    means = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0.0, 0, 0]])
    local = facing_normals(normals, means, viewmat)
    assert torch.allclose(local, torch.tensor([[0.0, 0, -1], [0.0, 0, -1], [0.0, 0.8, -0.6]]))


def test_flipped_normals_keep_their_gradient() -> None:
    normals = torch.tensor([[0.0, 0.6, 0.8]], requires_grad=True)
    facing_normals(normals, torch.tensor([[0.0, 0, 2]]), torch.eye(4)).sum().backward()
    assert normals.grad is not None and normals.grad.tolist() == [[-1, -1, -1]]


def test_composited_normals_to_unit_length() -> None:
    composited = torch.tensor([[[0.0, 0.3, -0.4], [0.0, 0.0, 0.0], [0.8, 0.7, -0.1]]])
    scaled, usable = unit_normals(composited, rebuild_z=False)
    assert torch.allclose(scaled[0, 0], torch.tensor([0.0, 0.6, -0.8]))
    assert usable.tolist() == [[True, False, True]]
    rebuilt, usable = unit_normals(composited, rebuild_z=True)
    assert torch.allclose(rebuilt[0, 0], torch.tensor([0.0, 0.3, -math.sqrt(1 - 0.09)]))
    assert usable.tolist() == [[True, True, False]]  # 0.8² + 0.7² leaves no z
    assert torch.allclose(rebuilt.norm(dim=-1), torch.ones(1, 3))


def flat(normal: Tensor, h: int = 9, w: int = 12) -> Tensor:
    return normal.expand(h, w, 3)


def test_loss_by_hand(camera: Camera) -> None:
    """The wall leans by 45°, the Gaussians say it stands: 1 − cos 45° at 7 · 10 of 9 · 12 pixels."""
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    depth, alpha = plane_depth(K, 9, 12, 1.0, 0.0), torch.ones(9, 12, dtype=torch.float64)
    assert float(dn_consistency(depth, alpha, flat(plane_normal(1.0, 0.0)), K)) == pytest.approx(0, abs=1e-12)
    loss = dn_consistency(depth, alpha, flat(TOWARDS), K)
    assert float(loss) == pytest.approx((1 - math.sqrt(0.5)) * 70 / 108)


def test_both_variants_agree_where_accumulation_is_even(camera: Camera) -> None:
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    depth, alpha = plane_depth(K, 9, 12, 1.0, 0.0), torch.full((9, 12), 0.8, dtype=torch.float64)
    for rebuild_z in (False, True):
        divided, plain = (
            dn_consistency(alpha * depth, alpha, flat(TOWARDS), K, divide=divide, rebuild_z=rebuild_z)
            for divide in (True, False)
        )
        assert float(divided) == pytest.approx(float(plain)) and float(divided) > 0.1


def test_only_the_divided_depth_ignores_a_fading_border(camera: Camera) -> None:
    """A wall seen straight on whose accumulation falls off: geometry is right, so there is nothing to mend."""
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    alpha = torch.linspace(1, 0.6, 12, dtype=torch.float64).expand(9, 12)
    depth = 5 * alpha
    normals = alpha[..., None] * TOWARDS
    assert float(dn_consistency(depth, alpha, normals, K, divide=True)) == pytest.approx(0, abs=1e-12)
    assert float(dn_consistency(depth, alpha, normals, K, divide=False)) > 0.02


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("rebuild_z", [True, False])
def test_gradients(divide: bool, rebuild_z: bool, camera: Camera) -> None:
    _, K = camera(6, 5, focal=4.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    alpha = 0.3 + 0.6 * rand(5, 6)
    inputs = [(2 + rand(5, 6)) * alpha, alpha, 0.5 * rand(5, 6, 3) - torch.tensor([0.25, 0.25, 0.9])]
    inputs = [value.requires_grad_() for value in inputs]

    def loss(depth: Tensor, alpha: Tensor, normals: Tensor) -> Tensor:
        return dn_consistency(depth, alpha, normals, K, divide=divide, rebuild_z=rebuild_z, min_alpha=0.35)

    assert torch.autograd.gradcheck(loss, inputs)
    grads = torch.autograd.grad(loss(*inputs), inputs, materialize_grads=True, allow_unused=True)
    assert grads[0].any() and grads[2].any(), "neither side is detached"
    assert bool(grads[1].any()) == divide


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("rebuild_z", [True, False])
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_empty_or_broken_pictures_cost_nothing(value: float, divide: bool, rebuild_z: bool, camera: Camera) -> None:
    _, K = camera(12, 9)
    inputs = [torch.full(shape, value, requires_grad=True) for shape in ((9, 12), (9, 12), (9, 12, 3))]
    loss = dn_consistency(*inputs, K, divide=divide, rebuild_z=rebuild_z)
    assert float(loss) == 0
    loss.backward()
    assert all(each.grad is None or not each.grad.any() for each in inputs)


def test_half_empty_picture(camera: Camera) -> None:
    """Only pixels with depth on all sides count, and gradients of the others are 0, not NaN."""
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    full = torch.zeros(9, 12, dtype=torch.float64)
    full[:, :6] = 1
    alpha = full.clone().requires_grad_()
    depth = (full * plane_depth(K, 9, 12, 1.0, 0.0)).requires_grad_()
    loss = dn_consistency(depth, alpha, full[..., None] * TOWARDS, K)
    assert float(loss) == pytest.approx((1 - math.sqrt(0.5)) * 7 * 4 / 108)
    loss.backward()
    for grad in (alpha.grad, depth.grad):
        assert grad is not None and torch.isfinite(grad).all() and not grad[:, 6:].any() and grad.any()


def test_thin_pixels_and_masked_pixels_do_not_count(camera: Camera) -> None:
    _, K = camera(12, 9, focal=10.0, dtype=torch.float64)
    ones = torch.ones(9, 12, dtype=torch.float64)
    depth = plane_depth(K, 9, 12, 1.0, 0.0)
    each = (1 - math.sqrt(0.5)) / 108
    thin = torch.where(torch.arange(12) < 6, 0.4, 1.0).to(torch.float64).expand(9, 12)
    assert float(dn_consistency(thin * depth, thin, flat(TOWARDS), K)) == pytest.approx(each * 7 * 4)
    assert float(dn_consistency(thin * depth, thin, flat(TOWARDS), K, min_alpha=0.3)) == pytest.approx(each * 70)
    mask = torch.zeros(9, 12, dtype=torch.bool)
    mask[2:4, 3:8] = True
    assert float(dn_consistency(depth, ones, flat(TOWARDS), K, mask=mask)) == pytest.approx(each * 10)
