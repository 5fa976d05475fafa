"""Rows of parameters, of optimisers' state and of nerfstudio's lists follow a change together."""

from typing import Any

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig, Optimizers
from torch.nn import Parameter

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import Change, apply


def test_rows_and_moments_follow_their_source(make_world: Any) -> None:
    world = make_world([1.0] * 4, [0.5] * 4)
    world.step()
    change = Change(4, torch.tensor([0, 2, 3, 2]), torch.tensor([False, False, False, True]))
    apply(change, world.params, world.optimizers)
    assert world.params["features_rest"][:, 0, 0].tolist() == [0, 2, 3, 2]
    torch.testing.assert_close(world.moments("means")[:, 0], torch.tensor([1.0, 3.0, 4.0, 0.0]))
    world.step()  # and the optimisers go on
    assert all(len(o.param_groups[0]["params"][0]) == 4 for o in world.optimizers.values())


def test_step_counts_are_no_rows(make_world: Any) -> None:
    world = make_world([1.0], [0.5])
    world.step()
    state = world.optimizers["means"].state[world.params["means"]]
    state["step"] = torch.tensor([7.0])  # as some optimisers keep it
    apply(Change(1, torch.tensor([0, 0]), torch.tensor([False, True])), world.params, world.optimizers)
    assert world.optimizers["means"].state[world.params["means"]]["step"].tolist() == [7.0]


def test_dtypes_of_state_and_parameters_stay() -> None:
    """gsplat's own operations would turn these into float32."""
    parameter = Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "codes": torch.tensor([[5], [6], [7]], dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "note": "kept",
        "table": torch.ones(5),
    }
    params = {"means": parameter}
    apply(Change(3, torch.tensor([2, 2]), torch.tensor([False, True])), params, {"means": optimizer})
    state = optimizer.state[params["means"]]
    assert params["means"].dtype == torch.float16
    assert state["codes"].dtype == torch.uint8 and state["codes"].tolist() == [[7], [0]]
    assert state["half"].dtype == torch.bfloat16 and state["half"].tolist() == [1, 0]
    assert state["note"] == "kept" and len(state["table"]) == 5


def test_nothing_left_is_refused_before_anything_is_changed(make_world: Any) -> None:
    world = make_world([1.0] * 3, [0.5] * 3)
    before = dict(world.params)
    with pytest.raises(ConfigError, match=r"3 Gaussians.*lower"):
        apply(Change.removal(torch.zeros(3, dtype=torch.bool)), world.params, world.optimizers)
    assert all(world.params[name] is value for name, value in before.items())


def test_nerfstudios_optimizers_forget_the_old_parameter() -> None:
    """They keep a list of their own for clipping gradients, in which old ones would stay alive."""
    params = {"means": Parameter(torch.rand(4, 3)), "quats": Parameter(torch.rand(4, 4))}
    config = {name: {"optimizer": AdamOptimizerConfig(), "scheduler": None} for name in params}
    optimizers = Optimizers(config, {name: [value] for name, value in params.items()})
    apply(Change.removal(torch.tensor([True, False, True, True])), params, optimizers)
    assert optimizers.parameters["means"][0] is params["means"]
    assert optimizers.optimizers["quats"].param_groups[0]["params"][0] is params["quats"]


def test_parameters_without_an_optimizer_follow_too() -> None:
    params = {"means": Parameter(torch.rand(4, 3)), "frozen": Parameter(torch.arange(4.0), requires_grad=False)}
    optimizers = {"means": torch.optim.Adam([params["means"]])}
    apply(Change.removal(torch.tensor([False, True, True, False])), params, optimizers)
    assert params["frozen"].tolist() == [1, 2] and not params["frozen"].requires_grad


def test_a_graph_that_is_still_alive_does_no_harm() -> None:
    """The picture of the last step may be kept for the viewer; its graph refers to the old parameter."""
    params = {"means": Parameter(torch.rand(4, 3))}
    optimizers = {"means": torch.optim.Adam([params["means"]])}
    picture = params["means"].square().sum()
    apply(Change.removal(torch.tensor([True, True, False, False])), params, optimizers)
    params["means"].square().sum().backward()
    picture.backward()
    assert params["means"].grad is not None and params["means"].grad.shape == (2, 3)
