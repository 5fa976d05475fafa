"""The MCMC strategy: who moves where, who is added, and what the picture keeps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import DensifyOptions, make_densifier
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize import Rasterization

Make = Callable[..., Any]


def round_of(world: Any, step: int = 600, **options: Any) -> Any:
    options = {"strategy": "mcmc", "mcmc_noise": 0.0, "mcmc_growth": 0.0, **options}
    densifier = make_densifier(DensifyOptions(**options), 1.0)
    return densifier.step_post_backward(step, NOTHING_SEEN, world.params, world.optimizers)


NOTHING_SEEN = Rasterization(
    torch.zeros(1, 1, 3), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32)
)
"""The strategy does not use the image."""


def test_the_dead_join_the_living(make_world: Make) -> None:
    world = make_world([0.1, 0.2, 0.3], [0.004, 0.75, 0.003])
    world.step()
    change = round_of(world)
    assert change.source.tolist() == [1, 1, 1]
    assert change.fresh.all()
    # Three share what one was: 1 − (1 − α')³ = α.
    alphas = world.params["opacities"].sigmoid().flatten()
    torch.testing.assert_close(1 - (1 - alphas) ** 3, torch.full((3,), 0.75))
    assert torch.equal(world.params["means"], torch.tensor([[1.0, 0, 0]] * 3))
    assert world.moments("scales").abs().max() == 0


def test_those_not_chosen_stay_to_the_last_bit(make_world: Make) -> None:
    world = make_world([0.1, 0.2, 0.3], [0.004, 0.99, 0.0060001])
    world.step()
    before = copy.deepcopy(world.params)
    change = round_of(world, seed=1)
    assert change.source.tolist() == [1, 1, 2] and change.fresh.tolist() == [True, True, False]
    for name, value in before.items():
        assert torch.equal(world.params[name][2], value[2])
    torch.testing.assert_close(world.moments("means")[:, 0], torch.tensor([0.0, 0.0, 3.0]))


def test_growth_by_a_fraction_up_to_the_cap(make_world: Make) -> None:
    world = make_world([0.1] * 100, [0.5] * 100)
    assert round_of(world, mcmc_growth=0.05).new_count == 105
    assert round_of(world, mcmc_growth=0.05, max_gaussians=107).new_count == 107
    assert round_of(world, mcmc_growth=0.05, max_gaussians=107) is None
    assert round_of(world, mcmc_growth=0.05, max_gaussians=50) is None  # above it already


def test_moved_and_added_in_one_round_agree_with_doing_one_after_the_other(make_world: Make) -> None:
    """A Gaussian moved in the round may be the one that is copied by it: sources refer to the set before both."""
    world = make_world([0.1] * 20, [0.001] * 10 + [0.6] * 10)
    rows_of = world.params["features_dc"][:, 0].detach().clone()
    change = round_of(world, mcmc_growth=0.5)
    assert change.new_count == 30
    assert (change.source >= 10).all()
    torch.testing.assert_close(world.params["features_dc"][:, 0].detach(), rows_of[change.source])
    counts = torch.bincount(change.source, minlength=20)[10:]
    alphas = world.params["opacities"].detach().sigmoid().flatten()
    for row, count in enumerate(counts.tolist(), start=10):
        together = 1 - (1 - alphas[change.source == row]).prod()
        assert together.item() == pytest.approx(0.6, abs=1e-4), count


def test_noise_moves_transparent_gaussians_in_every_step(make_world: Make) -> None:
    world = make_world([1.0, 1.0], [0.001, 0.9], rate=1e-3)
    before = world.params["means"].detach().clone()
    round_of(world, step=7, mcmc_noise=100.0)
    moved = (world.params["means"] - before).norm(dim=1)
    assert moved[0] > 1e-3 and moved[1] < 1e-8


def test_all_dead_is_one_sentence(make_world: Make) -> None:
    with pytest.raises(ConfigError, match="All 2 Gaussians"):
        round_of(make_world([0.1] * 2, [0.001] * 2))


@pytest.mark.parametrize(("step", "acts"), [(500, False), (550, False), (600, True), (25_000, False)])
def test_rounds_keep_to_the_schedule(make_world: Make, step: int, acts: bool) -> None:
    assert (round_of(make_world([0.1] * 2, [0.001, 0.5]), step) is not None) == acts


def test_a_resumed_run_goes_the_same_way(make_world: Make) -> None:
    options = DensifyOptions(strategy="mcmc", mcmc_growth=0.5, mcmc_noise=10.0, seed=5)
    whole = make_world([0.1] * 8, [0.001, 0.002, 0.5, 0.1, 0.9, 0.3, 0.2, 0.4], rate=1e-3)
    densifier = make_densifier(options, 1.0)
    densifier.step_post_backward(599, NOTHING_SEEN, whole.params, whole.optimizers)
    part, resumed = copy.deepcopy(whole), make_densifier(options, 1.0)
    resumed.load_state_dict(densifier.state_dict())
    for world, one in ((whole, densifier), (part, resumed)):
        for step in (600, 601):
            one.step_post_backward(step, NOTHING_SEEN, world.params, world.optimizers)
    for name in whole.params:
        assert torch.equal(part.params[name], whole.params[name])


def test_opacities_and_sizes_are_drawn_to_zero(make_world: Make) -> None:
    world = make_world([0.1, 0.3], [0.2, 0.6])
    gaussians = Gaussians.from_tensors(world.params)
    losses = make_densifier(DensifyOptions(strategy="mcmc", mcmc_scale_reg=0.5), 1.0).losses(gaussians)
    assert losses["opacity_loss"].item() == pytest.approx(0.01 * 0.4)
    assert losses["scale_loss"].item() == pytest.approx(0.5 * gaussians.sizes().mean().item())
    assert make_densifier(DensifyOptions(), 1.0).losses(gaussians) == {}
