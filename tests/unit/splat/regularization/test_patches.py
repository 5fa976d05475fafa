"""Patches of photos between views: a textured plane seen from two places, its gradients, and what has no say."""

import math

import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.patches import RADIUS_PX, grey, patch_disagreement

H, W, FOCAL, DEPTH = 36, 48, 40.0, 4.0
K = torch.tensor([[FOCAL, 0, W / 2], [0, FOCAL, H / 2], [0, 0, 1.0]], dtype=torch.float64)
FACING = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64).expand(H, W, 3)
MIDDLES = torch.linspace(0, 0.999, 60, dtype=torch.float64)
TRUST = torch.ones(H, W, dtype=torch.float64)


def wall(
    x: float, turn: tuple[float, float, float] = (0, 0, 0), K: Tensor = K, size: tuple[int, int] = (H, W)
) -> tuple[DepthView, Tensor]:
    """The wall z = 4 from (x, 0, 0), and its smooth pattern there; the camera is turned about its axes."""
    viewmat = torch.eye(4, dtype=torch.float64)
    viewmat[:3, :3] = torch.from_numpy(Rotation.from_rotvec(turn).as_matrix())
    viewmat[:3, 3] = -x * viewmat[:3, 0]
    row, column = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) + 0.5 for side in size), indexing="ij")
    ahead = torch.stack([column, row, torch.ones_like(row)], dim=-1) @ torch.linalg.inv(K).T @ viewmat[:3, :3]
    depth = DEPTH / ahead[..., 2]
    across, down = ahead[..., 0] * depth + x, ahead[..., 1] * depth
    pattern = 0.5 + 0.2 * (5 * across + 1).sin() * (4 * down).cos() + 0.2 * (3 * across + 2 * down).sin()
    return DepthView(depth, viewmat, K), pattern[..., None].expand(*size, 3)


def loss(depth: Tensor | None = None, normals: Tensor = FACING, trust: Tensor = TRUST, x: float = 0.4) -> Tensor:
    seen, photo = wall(0.0)
    other, picture = wall(x)
    seen = seen if depth is None else seen._replace(depth=depth)
    return patch_disagreement(seen, normals, photo, other, picture, trust, MIDDLES)


def test_patches_of_the_true_plane_agree() -> None:
    assert float(loss()) < 2e-3
    assert float(loss(torch.full((H, W), 5.0, dtype=torch.float64))) > 0.03
    turned = torch.tensor([0.5, 0.0, -math.sqrt(0.75)], dtype=torch.float64).expand(H, W, 3)
    assert float(loss(normals=turned)) > 1e-3


def test_cameras_may_differ_in_everything() -> None:
    K1, K2 = (
        torch.tensor([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], dtype=torch.float64)
        for fx, fy, cx, cy in ((40.0, 52.0, 20.0, 21.0), (44.0, 33.0, 31.0, 16.0))
    )
    seen, photo = wall(0.1, (0.1, -0.05, 0.3), K1)
    other, picture = wall(0.5, (-0.05, 0.1, 0.1), K2, (40, 50))
    normals = FACING @ seen.viewmat[:3, :3].T

    def at(factor: float) -> float:
        moved = seen._replace(depth=factor * seen.depth)
        return float(patch_disagreement(moved, normals, photo, other, picture, TRUST, MIDDLES))

    assert at(1.0) < 5e-4 < 2e-3 < min(at(0.95), at(1.05))


@pytest.mark.parametrize("error", [0.1, -0.1])
def test_depth_moves_to_where_the_photos_agree(error: float) -> None:
    depth = torch.full((H, W), DEPTH + error, dtype=torch.float64, requires_grad=True)
    loss(depth).backward()
    assert depth.grad is not None
    moved = depth.grad[depth.grad != 0]
    assert 20 < len(moved) <= len(MIDDLES)
    assert float((moved.sign() == math.copysign(1, error)).double().mean()) > 0.9


def test_gradients_are_finite_differences() -> None:
    depth = torch.full((H, W), 4.05, dtype=torch.float64)
    normals = torch.tensor([0.1, -0.1, -0.9], dtype=torch.float64).expand(H, W, 3)
    row, column = (int(place) for place in (RADIUS_PX, RADIUS_PX))  # the first patch

    def of(value: Tensor, normal: Tensor) -> Tensor:
        depths, facing = depth.clone(), normals.clone()
        depths[row, column], facing[row, column] = value, normal
        return loss(depths, facing, x=-0.4)

    inputs = (depth[row, column].clone().requires_grad_(), normals[row, column].clone().requires_grad_())
    assert torch.autograd.gradcheck(of, inputs, eps=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(of(*inputs), inputs[0])
    assert float(slope.abs()) > 0, "the case tests nothing"


def test_what_cannot_be_compared_does_not_count() -> None:
    seen, photo = wall(0.0)
    other, picture = wall(0.4)
    turned_away = torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64))
    wrong = seen._replace(depth=torch.full((H, W), 4.4, dtype=torch.float64))
    flat = torch.full_like(photo, 0.5)
    for name, given in (
        ("no trust", (wrong, FACING, photo, other, picture, 0 * TRUST)),
        ("no contrast here", (wrong, FACING, flat, other, picture, TRUST)),
        ("no contrast there", (wrong, FACING, photo, other, flat, TRUST)),
        ("the negative", (wrong, FACING, photo, other, 1 - picture, TRUST)),
        ("no plane", (wrong, 0 * FACING, photo, other, picture, TRUST)),
        ("behind", (wrong, FACING, photo, other._replace(viewmat=turned_away), picture, TRUST)),
    ):
        depth = given[0].depth.clone().requires_grad_()
        found = patch_disagreement(given[0]._replace(depth=depth), *given[1:], MIDDLES)
        found.backward()
        assert depth.grad is not None and not bool(depth.grad.isnan().any()), name
        assert float(found.detach()) < (2e-3 if name == "the negative" else 1e-9), name
    tiny = DepthView(torch.ones(6, 6, dtype=torch.float64), seen.viewmat, K)
    assert float(patch_disagreement(tiny, FACING[:6, :6], photo[:6, :6], other, picture, TRUST[:6, :6], MIDDLES)) == 0


def test_grey_is_brightness() -> None:
    assert float(grey(torch.ones(1, 1, 3))) == pytest.approx(1)
    red, green, blue = (float(grey(torch.eye(3)[i].view(1, 1, 3))) for i in range(3))
    assert green > red > blue > 0
