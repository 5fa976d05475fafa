"""The default strategy: what grows, what goes, what follows, and that a resumed run goes the same way."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gsplat.strategy import DefaultStrategy

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import DensifyOptions, make_densifier
from f3rm_ext.splat.densify.default import _info
from f3rm_ext.splat.rasterize import Rasterization

Make = Callable[..., Any]
HIGH, LOW = 1e-3, 1e-5
SMALL, LARGE = 0.001, 0.05


def round_of(world: Any, seen: Any, step: int = 600, last_step: int | None = None, **options: Any) -> Any:
    densifier = make_densifier(DensifyOptions(**options), 1.0, last_step)
    return densifier.step_post_backward(step, seen, world.params, world.optimizers)


def transparent(world: Any, threshold: float) -> torch.Tensor:
    """Gaussians of less than some opacity."""
    return world.params["opacities"].detach().sigmoid().flatten() < threshold


def test_small_are_copied_large_are_split_transparent_are_pruned(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL, LARGE, SMALL, SMALL], [0.5, 0.5, 0.5, 0.001])
    world.step()
    change = round_of(world, make_seen([HIGH, HIGH, LOW, LOW]))
    assert change.old_count == 4 and change.new_count == 5 == len(world.params["means"])
    assert sorted(change.source.tolist()) == [0, 0, 1, 1, 2]
    # Moments: the original of a copy keeps its own, everything new starts at zero.
    moments = world.moments("features_rest")[:, 0, 0]
    expected = torch.where(change.fresh, 0, change.source + 1.0)
    torch.testing.assert_close(moments, expected)
    assert change.fresh.sum() == 3
    # Split ones are 1.6 times smaller and near where they came from; SH are copied.
    split = change.source == 1
    torch.testing.assert_close(world.params["scales"][split].exp(), torch.full((2, 3), LARGE / 1.6))
    assert (world.params["means"][split] - torch.tensor([1.0, 0, 0])).norm(dim=1).max() < 6 * LARGE
    assert torch.equal(world.params["features_rest"][:, 4, 1].long(), change.source)


def test_agrees_with_gsplat_doing_all_of_it(make_world: Make, make_seen: Make) -> None:
    """The sketch decides just as gsplat does with all parameters and Adam's moments in its hands."""
    torch.manual_seed(1)
    sizes = (torch.rand(60) * 0.03 + 0.001).tolist()
    alphas = (torch.rand(60) * 0.9 + 0.001).tolist()
    gradients = (torch.rand(60) * 5e-4).tolist()
    ours, theirs = make_world(sizes, alphas), make_world(sizes, alphas)
    ours.step(), theirs.step()
    seen = make_seen(gradients)
    strategy = DefaultStrategy()
    state = strategy.initialize_state(1.0)
    grad = seen.means2d.grad[None]
    info = {"width": 20, "height": 10, "n_cameras": 1, "radii": seen.radii[None], "gaussian_ids": None}
    info["means2d"] = SimpleNamespace(grad=grad)
    densifier = make_densifier(DensifyOptions(), 1.0)
    seed = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(seed)
    strategy.step_post_backward(theirs.params, theirs.optimizers, state, 600, info)
    densifier.step_post_backward(600, seen, ours.params, ours.optimizers)
    for name, value in theirs.params.items():
        torch.testing.assert_close(ours.params[name], value, rtol=0, atol=0)
        torch.testing.assert_close(ours.moments(name), theirs.moments(name), rtol=0, atol=0)
    assert len(theirs.params["means"]) > 60


@pytest.mark.parametrize("acting", [range(600, 15_000), range(600, 7000)])
@pytest.mark.parametrize("step", [500, 599, 600, 6900, 7000, 14_900, 15_000])
def test_rounds_keep_to_the_schedule_and_to_the_stage(
    make_world: Make, make_seen: Make, step: int, acting: range
) -> None:
    world, seen = make_world([SMALL] * 2, [0.5] * 2), make_seen([HIGH, LOW])
    change = round_of(world, seen, step, None if acting.stop == 15_000 else acting.stop)
    assert (change is not None) == (step in acting)


def test_pixels_without_gradient_make_nothing_grow(make_world: Make, make_seen: Make) -> None:
    """Masked pixels: no gradient; a picture in which the loss sees no Gaussian at all has no gradient tensor."""
    world, seen = make_world([SMALL] * 3, [0.5] * 3), make_seen([0.0] * 3)
    assert round_of(world, seen) is None
    seen.means2d.grad = None
    assert round_of(world, seen) is None


def test_at_the_cap_the_largest_gradients_grow(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL] * 4, [0.5] * 4)
    change = round_of(world, make_seen([1e-3, 4e-3, 2e-3, 3e-3]), max_gaussians=6)
    assert change.new_count == 6 and change.source.tolist() == [0, 1, 2, 3, 1, 3]
    full = round_of(world, make_seen([HIGH] * 6), max_gaussians=6)
    assert full is None


def test_the_cap_spares_nobody_from_pruning_by_size_in_the_picture(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL] * 3, [0.5] * 3)
    options = dict(max_gaussians=3, stop_scale2d=10_000, reset_every=300)
    change = round_of(world, make_seen([LOW] * 3, radii=[1, 1, 19]), step=700, **options)
    assert change.source.tolist() == [0, 1]


def test_reset_lowers_opacities_and_forgets_their_moments_but_not_at_the_start(
    make_world: Make, make_seen: Make
) -> None:
    world = make_world([SMALL] * 2, [0.5, 0.008])
    world.step()
    round_of(world, make_seen([LOW] * 2), step=0)
    round_of(world, make_seen([LOW] * 2), step=3000, reset_every=0)
    torch.testing.assert_close(world.params["opacities"].sigmoid().flatten(), torch.tensor([0.5, 0.008]))
    assert round_of(world, make_seen([LOW] * 2), step=3000) is None
    torch.testing.assert_close(world.params["opacities"].sigmoid().flatten(), torch.tensor([0.01, 0.008]))
    assert world.moments("opacities").abs().max() == 0 and world.moments("means").abs().min() > 0


@pytest.mark.parametrize(("threshold", "highest"), [(0.0, 0.01), (0.001, 0.01), (0.02, 0.04), (0.6, 0.99)])
def test_reset_leaves_gaussians_that_can_be_seen(
    make_world: Make, make_seen: Make, threshold: float, highest: float
) -> None:
    """Whatever opacity they are pruned at: what is below 1/255 is not drawn, and so would never come back."""
    world = make_world([SMALL] * 2, [0.995, 0.997])
    assert round_of(world, make_seen([LOW] * 2), step=3000, prune_opacity=threshold) is None
    torch.testing.assert_close(world.params["opacities"].sigmoid().flatten(), torch.full((2,), highest))


def test_reset_in_a_round_that_grows_reaches_the_new_rows(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL] * 2, [0.5, 0.5])
    world.step()
    change = round_of(world, make_seen([HIGH, LOW]), step=3000)
    assert change.new_count == 3
    assert world.params["opacities"].sigmoid().max().item() == pytest.approx(0.01)
    assert world.moments("opacities").abs().max() == 0


def test_hard_pruning_keeps_the_opaque_and_their_statistics(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL] * 3, [0.4, 0.5, 0.9])
    densifier = make_densifier(DensifyOptions(), 1.0)
    densifier.step_post_backward(1, make_seen([1e-4, 2e-4, 3e-4]), world.params, world.optimizers)
    change = densifier.prune(transparent(world, 0.5), world.params, world.optimizers)
    assert change.source.tolist() == [1, 2] and not change.fresh.any()
    torch.testing.assert_close(densifier.state_dict()["grad2d"], torch.tensor([2e-4, 3e-4]))
    with pytest.raises(ConfigError, match="All 2 Gaussians"):
        densifier.prune(transparent(world, 0.99), world.params, world.optimizers)
    means = world.params["means"]
    assert densifier.prune(transparent(world, 0.1), world.params, world.optimizers) is None
    assert world.params["means"] is means


def test_before_backward_has_the_gradient_kept() -> None:
    means2d = torch.zeros(2, 2, requires_grad=True) * 1.0
    radii = torch.ones(2, dtype=torch.int32)
    seen = Rasterization(torch.zeros(4, 4, 3), torch.zeros(4, 4), torch.zeros(4, 4), means2d, radii)
    make_densifier(DensifyOptions(), 1.0).step_pre_backward(3, seen)
    means2d.sum().backward()
    assert means2d.grad is not None


def test_absolute_gradients_are_used_where_asked_for(make_world: Make, make_seen: Make) -> None:
    seen = make_seen([0.0, 0.0])
    seen.means2d.absgrad = torch.tensor([[1e-3, 0.0], [0.0, 0.0]])
    densifier = make_densifier(DensifyOptions(absgrad=True, grow_grad2d=8e-4), 1.0)
    world = make_world([SMALL] * 2, [0.5] * 2)
    assert densifier.absgrad
    assert densifier.step_post_backward(600, seen, world.params, world.optimizers).source.tolist() == [0, 1, 0]


def test_a_resumed_run_goes_the_same_way(make_world: Make, make_seen: Make, tmp_path: Any) -> None:
    """Statistics gathered before, the unit of sizes, and random numbers of splits after, are those of a run that was
    not interrupted."""
    options = DensifyOptions(seed=3, stop_scale2d=10_000)
    whole = make_world([LARGE] * 5, [0.5] * 5)
    densifier = make_densifier(options, 1.0)
    for step in (598, 599):
        densifier.step_post_backward(step, make_seen([6e-4, 0, 6e-4, 0, 0]), whole.params, whole.optimizers)
    torch.save(densifier.state_dict(), tmp_path / "state")
    part = copy.deepcopy(whole)
    resumed = make_densifier(DensifyOptions(seed=99, stop_scale2d=10_000), 9.0)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for world, one in ((whole, densifier), (part, resumed)):
        torch.manual_seed(id(one))  # what others draw does not matter
        for step in (600, 700):
            count = len(world.params["means"])
            seen = make_seen([0.0 if step == 600 else HIGH] * count)
            one.step_post_backward(step, seen, world.params, world.optimizers)
    assert len(part.params["means"]) == 14  # (5 + 2) · 2
    torch.testing.assert_close(part.params["means"], whole.params["means"], rtol=0, atol=0)


def test_random_numbers_of_others_are_left_alone(make_world: Make, make_seen: Make) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    round_of(make_world([LARGE] * 2, [0.5] * 2), make_seen([HIGH, HIGH]))
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_statistics_go_when_growth_is_over(make_world: Make, make_seen: Make) -> None:
    world, densifier = make_world([SMALL] * 2, [0.5] * 2), make_densifier(DensifyOptions(), 1.0, last_step=10)
    densifier.step_post_backward(5, make_seen([LOW, LOW]), world.params, world.optimizers)
    assert "grad2d" in densifier.state_dict()
    densifier.step_post_backward(10, make_seen([LOW, LOW]), world.params, world.optimizers)
    assert set(densifier.state_dict()) == {"generator", "scene_scale"}


def test_no_strategy_leaves_them_alone(make_world: Make, make_seen: Make) -> None:
    world = make_world([SMALL] * 2, [0.001] * 2)
    assert round_of(world, make_seen([HIGH] * 2), strategy="none") is None
    assert len(world.params["means"]) == 2


@pytest.mark.parametrize("options", [{}, {"absgrad": True}, {"stop_scale2d": 1000}])
def test_statistics_are_gsplats(make_world: Make, make_seen: Make, options: dict[str, Any]) -> None:
    """Bit for bit, those of Gaussians that are not visible too."""
    world = make_world([SMALL] * 5, [0.5] * 5)
    densifier: Any = make_densifier(DensifyOptions(**options), 1.0)
    theirs = densifier.strategy.initialize_state(1.0)
    for step in (1, 2):
        seen = make_seen([HIGH, LOW, 3 * LOW, HIGH, LOW])
        if "absgrad" in options:
            seen.means2d.absgrad = 2 * seen.means2d.grad
        seen.radii[step] = 0
        seen.radii[0] = 7 * step
        densifier.step_post_backward(step, seen, world.params, world.optimizers)
        info = _info(seen, densifier.absgrad)
        DefaultStrategy._update_state(densifier.strategy, world.params, theirs, info)  # type: ignore[arg-type]
    for name, value in densifier.statistics.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name
    assert densifier.statistics["count"].tolist() == [2, 1, 1, 2, 2]
