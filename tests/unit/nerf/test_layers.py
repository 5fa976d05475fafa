"""Perceptrons, encodings, contraction, and the losses on features and density."""

import math

import pytest
import torch
from nerfstudio.field_components.spatial_distortions import SceneContraction
from nerfstudio.model_components.losses import lossfun_distortion
from nerfstudio.model_components.ray_samplers import UniformLinDispPiecewiseSampler

from f3rm_ext.nerf.contraction import contract_to_unit_cube, piecewise_sampler
from f3rm_ext.nerf.losses import cosine, depth_loss, distortion_loss, feature_loss, heaviest_samples
from f3rm_ext.nerf.mlp import Mlp, RaySplitMlp


def test_split_first_layer_equals_concatenation() -> None:
    mlp = RaySplitMlp(ray_dim=5, sample_dim=3, hidden_dim=8, num_hidden=2, out_dim=4)
    per_ray, per_sample = torch.randn(7, 5), torch.randn(7, 6, 3)
    joined = torch.cat([per_ray[:, None].expand(-1, 6, -1), per_sample], dim=-1)
    expected = mlp.rest(torch.relu(mlp.first(joined)))
    torch.testing.assert_close(mlp(per_ray, per_sample), expected)
    assert [tuple(weight.shape) for weight in mlp.rest.parameters()] == [(8, 8), (4, 8)]


def test_mlp_without_output_layer_ends_in_relu() -> None:
    out = Mlp(4, 16, num_hidden=2, out_dim=None)(torch.randn(50, 4))
    assert out.shape == (50, 16) and (out >= 0).all() and (out > 0).any()


def test_contraction_is_that_of_mip_nerf_360() -> None:
    positions = torch.randn(500, 3) * torch.logspace(-2, 3, 500)[:, None]
    expected = (SceneContraction(order=float("inf"))(positions) + 2) / 4
    torch.testing.assert_close(contract_to_unit_cube(positions), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(contract_to_unit_cube(5 * positions, radius=5.0), expected, atol=1e-6, rtol=1e-5)


def test_half_of_the_first_samples_are_within_the_radius() -> None:
    ours, theirs = piecewise_sampler(1.0), UniformLinDispPiecewiseSampler()
    distances = torch.logspace(-2, 3, 50)
    assert torch.equal(ours.spacing_fn(distances), theirs.spacing_fn(distances))
    far = piecewise_sampler(5.0)
    torch.testing.assert_close(far.spacing_fn(5 * distances), theirs.spacing_fn(distances))
    torch.testing.assert_close(far.spacing_fn_inv(far.spacing_fn(distances)), distances, rtol=1e-4, atol=0)


def test_contraction_stays_in_the_cube_at_any_distance() -> None:
    unit = contract_to_unit_cube(torch.tensor([[1e30, -1e30, 0.0], [0.0, 0.0, 0.0]]))
    assert (unit >= 0).all() and (unit <= 1).all()
    torch.testing.assert_close(unit[1], torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("kind", "expected"), [("mse", (9 + 0) / 2), ("cosine", 1.0), ("huber", (1.25 * (3 - 0.625) + 0) / 2)]
)
def test_feature_loss_by_hand(kind: str, expected: float) -> None:
    value = feature_loss(torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 1.0]]), kind)  # type: ignore[arg-type]
    if kind == "cosine":
        expected = 1 - 1 / math.sqrt(10)
    assert value.item() == pytest.approx(expected, rel=1e-5)


def test_losses_are_float32_whatever_comes_in() -> None:
    big = torch.full((4, 8), 300.0, dtype=torch.float16)  # its squared norm is beyond float16
    assert feature_loss(big, -big, "mse").item() == pytest.approx(360000.0)
    torch.testing.assert_close(cosine(big, big), torch.ones(4))


def test_heaviest_samples_keep_the_total_weight() -> None:
    weights = torch.tensor([[[0.1], [0.5], [0.05], [0.2]], [[0.0], [0.0], [0.0], [0.0]]])
    positions = torch.arange(24.0).reshape(2, 4, 3)
    kept, at = heaviest_samples(weights, positions, 2)
    torch.testing.assert_close(kept.sum(dim=1), weights.sum(dim=1))
    torch.testing.assert_close(kept[0, :, 0], torch.tensor([0.5, 0.2]) * 0.85 / 0.7)
    torch.testing.assert_close(at[0], positions[0, [1, 3]])
    assert torch.isfinite(kept).all()


def test_distortion_is_nerfstudios_in_value_and_gradient() -> None:
    edges = torch.rand(50, 25).sort(-1).values
    weights = torch.rand(50, 24).div_(12).requires_grad_()
    expected = lossfun_distortion(edges, weights).mean()
    actual = distortion_loss(weights, edges)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, weights)[0] for loss in (actual, expected)))


def test_the_depth_loss_is_the_light_that_comes_from_elsewhere() -> None:
    weights = torch.tensor([[0.2, 0.5, 0.1], [0.2, 0.5, 0.1], [0.9, 0.0, 0.0]], requires_grad=True)
    middles = torch.tensor([1.0, 2.0, 3.0]).expand(3, 3)
    loss = depth_loss(weights, middles, torch.tensor([2.1, 3.0, 0.0]))
    assert loss.item() == pytest.approx((0.5 + 0.9) / 3)
    loss.backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, -torch.tensor([[0, 1.0, 0], [0, 0, 1], [0, 0, 0]]) / 3)
