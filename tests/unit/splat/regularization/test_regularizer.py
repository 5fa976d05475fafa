"""The regularizer: its schedule, what it asks for, the losses it composes, pruning, changes of topology, bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.field import neighbour_field
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.normals import dn_consistency
from f3rm_ext.splat.regularization.options import Mode, RegularizationOptions
from f3rm_ext.splat.regularization.regularizer import Needs, Regularizer, opacity_entropy
from f3rm_ext.splat.regularization.sdf import density_loss, normal_loss, sample_points
from f3rm_ext.splat.regularization.table import gaussian_table

MODES: tuple[Mode, ...] = ("density", "sdf", "dn-consistency")
Camera = Callable[..., tuple[Tensor, Tensor]]
Make = Callable[..., Gaussians]
Leaves = Callable[[Gaussians], Gaussians]
Losses = Callable[..., dict[str, Tensor]]


def regularizer(mode: Mode = "density", **options: Any) -> Regularizer:
    return Regularizer(RegularizationOptions(mode=mode, **{"samples": 500, **options}))


# Schedule


@pytest.mark.parametrize(
    ("mode", "names", "needs"),
    [
        ("none", set(), Needs()),
        ("density", {"surface_density", "surface_normal"}, Needs()),
        ("sdf", {"surface_sdf", "surface_normal"}, Needs()),
        ("dn-consistency", {"surface_density", "surface_normal", "dn_consistency"}, Needs(normals=True)),
    ],
)
def test_what_is_active_when(mode: Mode, names: set[str], needs: Needs, wall: Make, losses_of: Losses) -> None:
    gaussians = wall()
    entropy = {"opacity_entropy"} if mode != "none" else set()
    for step, expected in [(7000, set()), (7001, entropy), (8999, entropy), (9000, set()), (9001, names)]:
        assert set(losses_of(regularizer(mode), gaussians, step)) == expected, step
        assert regularizer(mode).needs(step) == (needs if step > 9000 else Needs())


def test_dn_without_weight_needs_nothing(wall: Make, losses_of: Losses) -> None:
    reg = regularizer("dn-consistency", dn_factor=0.0)
    assert reg.needs(9001) == Needs()
    assert set(losses_of(reg, wall(), depth=None, alpha=None, normals=None)) == {"surface_density", "surface_normal"}


def test_a_run_of_another_length_keeps_the_proportions() -> None:
    scaled = RegularizationOptions(mode="density").scaled(3000)
    assert (scaled.entropy_start, scaled.entropy_end, scaled.prune_step, scaled.start) == (1400, 1800, 1800, 1800)
    assert (scaled.neighbours_start, scaled.neighbours_every, scaled.planar_start) == (1400, 100, 500)
    assert scaled.schedule_steps == 3000 and scaled.mode == "density" and scaled.samples == 1_000_000
    assert RegularizationOptions().scaled(1).neighbours_every == 1
    assert RegularizationOptions().scaled(15_000) == RegularizationOptions()


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"neighbours": 0},
        {"neighbours_every": 0},
        {"chunk_points": -1},
        {"spread": 0.0},
        {"sdf_unit": float("nan")},
        {"density_factor": -0.1},
        {"prune_opacity": 1.0},
        {"dn_min_alpha": -0.1},
        {"patches": 0},
        {"planar_prune_opacity": -0.5},
        {"entropy_start": 10, "entropy_end": 9},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", "-")):
        RegularizationOptions(**options)


# Values


def test_entropy_by_hand(wall: Make, losses_of: Losses) -> None:
    alphas = torch.tensor([0.5, 0.9, 0.1])
    visible = torch.tensor([True, True, False])
    expected = (0.6931472 + 0.3250830) / 2
    assert float(opacity_entropy(alphas, visible)) == pytest.approx(expected, rel=1e-5)
    found = losses_of(regularizer(), wall(alpha=0.5), step=8000)
    assert float(found["opacity_entropy"]) == pytest.approx(0.1 * 0.6931472, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_entropy_of_certain_opacities_is_zero_with_finite_gradient(alpha: float) -> None:
    alphas = torch.tensor([alpha], requires_grad=True)
    entropy = opacity_entropy(alphas, torch.tensor([True]))
    entropy.backward()
    assert float(entropy) == pytest.approx(0, abs=1e-6)
    assert alphas.grad is not None and torch.isfinite(alphas.grad).all()


def test_losses_are_those_of_the_parts(random_gaussians: Make, losses_of: Losses, camera: Camera) -> None:
    gaussians = random_gaussians(60, torch.float32)
    visible = torch.arange(60) % 3 > 0
    rendered = torch.tensor([0.0, 0.6, -0.8]).expand(30, 40, 3)
    found = losses_of(regularizer("dn-consistency"), gaussians, visible=visible, normals=rendered)
    points, owners = sample_points(gaussians, visible, 500, generator=torch.Generator().manual_seed(9001))
    table = gaussian_table(gaussians)
    field = neighbour_field(points, owners, table, nearest_neighbours(gaussians.means, 16))
    _, K = camera()
    expected = {
        "surface_density": 0.2 * density_loss(points, field),
        "surface_normal": 0.2 * normal_loss(field),
        "dn_consistency": 0.05 * dn_consistency(torch.full((30, 40), 10.0), torch.ones(30, 40), rendered, K),
    }
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-4
    )
    assert float(found["dn_consistency"]) == pytest.approx(0.05 * 0.2 * 28 * 38 / 1200, rel=1e-4)


def test_sdf_prefers_gaussians_on_the_depth_map(wall: Make, losses_of: Losses) -> None:
    on_map = losses_of(regularizer("sdf"), wall(side=21, depth=10.0))
    off_map = losses_of(regularizer("sdf"), wall(side=21, depth=10.08))  # still within two deviations
    beyond = losses_of(regularizer("sdf"), wall(side=21, depth=10.5))
    assert float(off_map["surface_sdf"]) > 2 * float(on_map["surface_sdf"]) > 0
    assert float(beyond["surface_sdf"]) == 0


def test_sdf_depth_is_composited_over_the_farthest_gaussian(wall: Make, losses_of: Losses) -> None:
    """Half-transparent depth of a wall at 10 in front of nothing: the background makes up for what is missing."""
    wall_there = wall(side=21, depth=10.0)
    opaque = losses_of(regularizer("sdf"), wall_there)
    half = losses_of(regularizer("sdf"), wall_there, depth=torch.full((30, 40), 5.0), alpha=torch.full((30, 40), 0.5))
    assert float(half["surface_sdf"]) == pytest.approx(float(opaque["surface_sdf"]), rel=1e-4)


def test_gaussians_outside_the_mask_are_not_drawn_from(wall: Make, leaves: Leaves, losses_of: Losses) -> None:
    gaussians = leaves(wall(side=5))
    mask = torch.zeros(30, 40, dtype=torch.bool)
    mask[:, 20:] = True
    # With itself as only neighbour a Gaussian gets gradients from its own points alone.
    losses = losses_of(regularizer(neighbours=1), gaussians, mask=mask)
    losses["surface_density"].backward()
    assert gaussians.opacities.grad is not None
    touched = gaussians.opacities.grad.squeeze(1) != 0
    assert torch.equal(touched, gaussians.means[:, 0] > 0.1)


def test_same_seed_same_losses(random_gaussians: Make, losses_of: Losses) -> None:
    gaussians = random_gaussians(40, torch.float32)
    first, second = (losses_of(regularizer(), gaussians)["surface_density"] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, losses_of(regularizer(), gaussians, step=9002)["surface_density"])


# Nothing to work on


@pytest.mark.parametrize("mode", MODES)
def test_no_visible_gaussian_costs_nothing(mode: Mode, wall: Make, leaves: Leaves, losses_of: Losses) -> None:
    gaussians = leaves(wall())
    nobody = torch.zeros(81, dtype=torch.bool)
    empty = {"depth": torch.zeros(30, 40), "alpha": torch.zeros(30, 40), "normals": torch.zeros(30, 40, 3)}
    for step in (8000, 9001):
        losses = losses_of(regularizer(mode), gaussians, step, visible=nobody, **empty)
        assert losses and all(float(loss) == 0 for loss in losses.values())
        sum(losses.values()).backward()
    assert all(
        value.grad is None or (torch.isfinite(value.grad).all() and not value.grad.any())
        for value in gaussians.tensors().values()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_fewer_gaussians_than_neighbours(
    mode: Mode, n: int, random_gaussians: Make, leaves: Leaves, losses_of: Losses
) -> None:
    base = random_gaussians(n, torch.float32)
    base.means[:, 2] += 9.5
    gaussians = leaves(base)
    losses = losses_of(regularizer(mode), gaussians)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert all(value.grad is None or torch.isfinite(value.grad).all() for value in gaussians.tensors().values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["means", "scales", "quats", "opacities"])
def test_gaussians_that_are_not_finite_take_no_part(
    mode: Mode, name: str, wall: Make, leaves: Leaves, losses_of: Losses
) -> None:
    base = wall()
    getattr(base, name)[40] = torch.nan
    gaussians = leaves(base)
    for step in (8000, 9001):
        losses = losses_of(regularizer(mode), gaussians, step)
        assert all(torch.isfinite(loss) for loss in losses.values()), (step, losses)
        sum(losses.values()).backward()
    others = torch.arange(81) != 40
    for value in gaussians.tensors().values():
        assert value.grad is None or torch.isfinite(value.grad[others]).all()


# Pruning and topology


def test_prunes_once(wall: Make) -> None:
    gaussians = wall()
    gaussians.opacities[:10] = -1.0
    gaussians.opacities[10] = torch.nan
    reg = regularizer()
    mask = reg.prune_mask(9001, gaussians)
    assert mask is not None and torch.equal(mask, torch.arange(81) < 11)
    assert reg.prune_mask(9000, gaussians) is None and reg.prune_mask(9002, gaussians) is None
    assert regularizer("none").prune_mask(9001, gaussians) is None
    assert regularizer(prune_opacity=0.0).prune_mask(9001, gaussians) is None
    assert reg.prune_mask(9001, wall()) is None, "nothing to prune"


def test_pruning_that_would_leave_next_to_nothing_is_left_out(
    wall: Make, random_gaussians: Make, capsys: pytest.CaptureFixture
) -> None:
    assert regularizer().prune_mask(9001, wall(alpha=0.4)) is None
    assert "only 0 of" in " ".join(capsys.readouterr().out.split())
    assert regularizer().prune_mask(9001, random_gaussians(0)) is None
    assert capsys.readouterr().out == ""


def test_small_changes_are_followed_and_large_ones_searched(wall: Make, losses_of: Losses) -> None:
    gaussians = wall()
    for removed, searched in ((8, False), (9, True)):
        reg = regularizer()
        losses_of(reg, gaussians)
        keep = torch.arange(removed, 81)
        reg.after_change(keep)
        assert (reg.neighbours.index is None) == searched
        losses = losses_of(reg, gaussians[keep], step=9002)
        assert len(reg.neighbours.index) == 81 - removed and all(torch.isfinite(loss) for loss in losses.values())


def test_a_change_before_the_first_search_is_no_matter() -> None:
    regularizer().after_change(torch.arange(3))


def test_resumed_regularizer_goes_on_alike(random_gaussians: Make, losses_of: Losses) -> None:
    first, second = regularizer(), regularizer()
    before, after = random_gaussians(50, torch.float32), random_gaussians(50, torch.float32, seed=1)
    losses_of(first, before, step=9100)
    second.load_state_dict(first.state_dict())
    one, other = (losses_of(reg, after, step=9101)["surface_density"] for reg in (first, second))
    assert torch.equal(one, other)
    assert not torch.equal(one, losses_of(regularizer(), after, step=9101)["surface_density"])
