"""Programs of two processes that know of each other; each is run in forks, see ``test_ranks.py``."""

import hashlib
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import Parameter

from f3rm_ext.engine import launch, ranks
from f3rm_ext.engine.synchronization import SynchronizedOptimizers
from f3rm_ext.errors import RankError
from f3rm_ext.query import pipeline


def joined() -> ranks.Ranks:
    """Takes part."""
    launch.join(SimpleNamespace(device_type="cpu", num_devices=1, num_machines=1, machine_rank=0))  # type: ignore[arg-type]
    return ranks.Ranks()


def messages() -> None:
    """Numbers, objects and rows of different length."""
    me = joined()
    assert me.share([me.rank, 7]) == [[0, 7], [1, 7]]
    assert me.gather({"rank": me.rank}) == ([{"rank": 0}, {"rank": 1}] if me.rank == 0 else None)
    rows = torch.full((me.rank + 1, 2), float(me.rank))
    first, second = me.gather_rows(rows, [1, 2])
    assert first.tolist() == [[0, 0]] and second.tolist() == [[1, 1], [1, 1]]
    assert all(len(item) == 0 for item in me.gather_rows(rows[:0], [0, 0]))
    own = torch.tensor([1.0, 5.0 - me.rank])
    ranks.sum_over_ranks(sums := own.clone())
    ranks.largest_over_ranks(most := own.clone())
    assert sums.tolist() == [2, 9] and most.tolist() == [1, 5]
    assert launch.broadcast_first(f"stamp {me.rank}") == "stamp 0"


def same_parameters() -> None:
    """A difference in one bit of one number is found, and named."""
    me = joined()
    values = {"means": torch.rand(5, 3, generator=torch.Generator().manual_seed(1)), "none": torch.zeros(0, 4)}
    me.require_same(values.items(), "after step 1")
    if me.rank:
        values["means"].view(torch.int32)[3, 1] += 1
    try:
        me.require_same(values.items(), "after step 2")
    except RankError as error:
        assert "means differs after step 2" in str(error)
    else:
        raise AssertionError("nobody noticed")


def gradients() -> None:
    """Large, small and missing gradients are summed; a parameter without any gradient keeps still."""
    me = joined()
    shapes = {"large": (600, 600), "small": (3,), "one_sided": (2,), "still": (4,)}
    params = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    config = {
        "all": {"optimizer": SimpleNamespace(lr=1.0, max_norm=None, setup=lambda params: torch.optim.SGD(params, 1.0))}
    }
    config["all"]["scheduler"] = None  # type: ignore[assignment]
    optimizers = SynchronizedOptimizers(config, {"all": list(params.values())}, me, lambda: 15 * me.rank)
    for name, parameter in params.items():
        if name != "still" and (name != "one_sided" or me.rank == 1):
            parameter.grad = torch.full_like(parameter, me.rank + 1.0)
    optimizers.optimizer_scaler_step_some(torch.amp.GradScaler("cpu", enabled=False), ["all"])  # type: ignore[arg-type]
    assert optimizers.heard == 15
    assert {name: float(value.detach().flatten()[0]) for name, value in params.items()} == {
        "large": -2,
        "small": -2,
        "one_sided": -1,
        "still": 1,
    }
    assert params["still"].grad is None


def weights() -> None:
    """A loss counts as much as its share of the terms, also where this process has none."""
    me = joined()
    x = torch.ones(1, requires_grad=True)
    losses = {"rgb": 2 * x.sum(), "other": 3 * x.sum()} | ({"feature": 5 * x.sum()} if me.rank else {})
    terms = {"rgb": [1, 3][me.rank], "feature": [0, torch.tensor(4)][me.rank]}
    weighted = pipeline.weight_losses(losses, terms, x.device)
    assert {name: float(value) for name, value in weighted.items()} == {name: float(v) for name, v in losses.items()}
    torch.stack(list(weighted.values())).sum().backward()
    assert float(x.grad) == [2 * 0.25 + 1.5, 2 * 0.75 + 1.5 + 5][me.rank]  # type: ignore[arg-type]


def failing_first() -> None:
    """Where rank 0 cannot begin, the other ends with it and says nothing."""
    joined()

    def fail() -> None:
        raise RankError("There is a reason.")

    launch.first_only(fail)


def shards() -> None:
    """Rank 0 collects the rows of all ranks for a checkpoint, whatever their type; live state stays as it is."""
    from f3rm_ext.splat import sharding

    me = joined()
    rows = [torch.arange(3.0), torch.arange(3.0, 8.0)][me.rank]
    moments = {"exp_avg": rows[:, None].bfloat16(), "scales": rows.to(torch.uint8), "step": torch.tensor(4.0)}
    state = {
        "pipeline": {
            "_model.gauss_params.means": rows[:, None].repeat(1, 3),
            "_model.filter_3d": rows.clone(),
            "_model.background": torch.zeros(3),
            "_model._extra_state": {"densifier": {"count": rows.double(), "generator": torch.zeros(3)}},
        },
        "optimizers": {"means": {"state": {0: moments}}},
    }
    sharding.collect(state, me)
    assert len(moments["exp_avg"]) == len(rows)
    if me.rank == 0:
        everything = torch.arange(8.0)
        assert torch.equal(state["pipeline"]["_model.gauss_params.means"][:, 1], everything)  # type: ignore[index]
        assert torch.equal(state["pipeline"]["_model.filter_3d"], everything)  # type: ignore[index]
        found = state["optimizers"]["means"]["state"][0]  # type: ignore[index]
        assert found["exp_avg"].dtype == torch.bfloat16 and found["exp_avg"][:, 0].tolist() == everything.tolist()
        assert found["scales"].tolist() == everything.tolist() and float(found["step"]) == 4
        assert state["pipeline"]["_model._extra_state"]["densifier"]["count"].tolist() == everything.tolist()  # type: ignore[index]
        sharding.deal_out(state)
        assert state["pipeline"]["_model.filter_3d"].tolist() == [0, 2, 4, 6]  # type: ignore[index]
    assert sharding.count_of_all(len(rows), torch.device("cpu")) == 8


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
    print("done", hashlib.sha256(sys.argv[1].encode()).hexdigest()[:4])
