"""Tensors are counted once, in the category of their owner."""

import gc
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from f3rm_ext.memory import estimate
from f3rm_ext.profiling.census import CATEGORIES, TensorStorage, parameter_group, reachable, storage_key, take_census
from f3rm_ext.profiling.snapshot import LARGE_BYTES, tensor_totals
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.packed import packed_sh_colors

MIB = 1 << 20


class Data:
    """A datamanager with a window, one that is being loaded, and features."""

    __module__ = "f3rm_ext.data.made_up"

    def __init__(self) -> None:
        self.window = {"pixels": torch.zeros(1000, 3, dtype=torch.uint8), "features": [torch.zeros(50, 8)]}
        self.next: Future[Any] = Future()
        self.next.set_result((torch.zeros(500, dtype=torch.uint8),))
        self.pending: Future[Any] = Future()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gauss_params = nn.ParameterDict({"means": nn.Parameter(torch.rand(100, 3))})
        self.layer = nn.Linear(4, 4)
        self.register_buffer("filter_3d", torch.zeros(100))
        self.statistics = {"counts": torch.zeros(100, dtype=torch.int32)}
        self.again = self.gauss_params["means"].detach()[:10]


@pytest.fixture
def trained() -> tuple[Model, dict[str, torch.optim.Optimizer], Data]:
    model = Model()
    optimizers: dict[str, torch.optim.Optimizer] = {
        "means": torch.optim.Adam([model.gauss_params["means"]], foreach=False),
        "layer": torch.optim.Adam(model.layer.parameters(), foreach=False),
    }
    (model.gauss_params["means"].sum() + model.layer(torch.rand(2, 4)).sum()).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return model, optimizers, Data()


def sums(found: list[TensorStorage]) -> dict[str, int]:
    return {name: sum(one.bytes for one in found if one.category == name) for name in CATEGORIES}


def test_every_tensor_is_counted_where_it_belongs(trained: Any) -> None:
    found = take_census(*trained)
    parameters = (300 + 16 + 4) * 4
    steps = 3 * 4  # Adam's counters
    assert {**sums(found), "other": 0} == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters + steps,
        "buffers": 400 + 400,
        "images": 3500,
        "features": 50 * 8 * 4,
        "other": 0,  # whatever other tests have left
    }
    names = {one.name: one for one in found}
    assert names["gradient of gauss_params.means"].kind == names["exp_avg of gauss_params.means"].kind == "points"
    assert names["statistics.counts"].dtype == "int32"


def test_what_nobody_owns_is_found_by_the_scan(trained: Any) -> None:
    before = sums(take_census(*trained))
    stray = torch.zeros(3 * MIB, dtype=torch.uint8)
    part = stray[:10]
    found = take_census(*trained)
    assert sums(found)["other"] - before["other"] == 3 * MIB
    assert {name: size for name, size in sums(found).items() if name != "other"} == {
        name: size for name, size in before.items() if name != "other"
    }
    (unnamed,) = (one for one in found if one.category == "other" and one.bytes == 3 * MIB)
    assert unnamed.name.startswith("unnamed uint8")
    del part


def test_the_sum_is_that_of_all_live_tensors(trained: Any) -> None:
    """Counted independently: by all storages that Python's collector knows of, and those of C++ behind them."""
    census = sum(one.bytes for one in take_census(*trained))
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    tensors += [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    live = {storage_key(item): item.untyped_storage().nbytes() for item in tensors}
    live.pop(None, None)  # tensors without memory, which other tests may have left
    assert census == pytest.approx(sum(live.values()), rel=0.01)


def test_packed_gradients_and_compact_moments_have_their_owners() -> None:
    model = nn.Module()
    model.gauss_params = nn.ParameterDict({"features_rest": nn.Parameter(torch.rand(64, 15, 3).half())})
    rest = model.gauss_params["features_rest"]
    optimizer = PackedAdam([rest], moments="int8")
    colors = packed_sh_colors(3, torch.rand(64, 3), torch.rand(64, 3), rest)
    colors.sum().backward()
    optimizer.step()
    found = take_census(model, {"features_rest": optimizer}, SimpleNamespace())
    total = sums(found)
    assert total["parameters"] == 64 * 45 * 2
    pictures = rest.packed_gradient.pictures  # type: ignore[attr-defined]
    held = [value for picture in pictures for value in vars(picture).values() if isinstance(value, torch.Tensor)]
    packed = sum(tensor.nbytes for tensor in held)
    assert total["gradients"] == packed + 2, "and the marker, a single number"
    state = [value for value in optimizer.state[rest].values() if isinstance(value, torch.Tensor)]
    assert total["optimizer"] == sum(tensor.nbytes for tensor in state) > 0
    assert {one.kind for one in found if one.category != "other"} == {"harmonics"}


def test_the_walk_ends_in_a_circle_and_stops_at_the_viewer() -> None:
    class Element:
        __module__ = "nerfstudio.viewer.viewer_elements"

        def __init__(self) -> None:
            self.trainer = torch.zeros(5)

    circle: dict[str, Any] = {"tensor": torch.zeros(2), "element": Element()}
    circle["self"] = circle
    assert [name for name, _ in reachable(circle)] == ["tensor"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gauss_params.features_dc", "harmonics"),
        ("gauss_params.quats", "quaternions"),
        ("gauss_params.vertices", "vertices"),
        ("gauss_params.free_means", "points"),
        ("gauss_params.opacities", "opacities"),
        ("feature_field.grid.table", "hash tables"),
        ("proposal_networks.0.mlp.layers.0.weight", "MLPs"),
        ("camera_optimizer.pose_adjustment", "camera poses"),
        ("device_indicator_param", "rest"),
    ],
)
def test_parameters_have_names_that_people_know(name: str, kind: str) -> None:
    assert parameter_group(name) == kind


def test_categories_are_those_of_plans() -> None:
    assert set(CATEGORIES) - {"other"} <= set(get_args(estimate.Category))


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    gc.collect()
    yield


def test_tensors_without_values_have_no_memory() -> None:
    with FakeTensorMode():
        fake = torch.zeros(3)
    assert storage_key(fake) is None and storage_key(torch.zeros(3)) is not None


def test_sums_are_those_of_the_device() -> None:
    found = [
        TensorStorage("means", "parameters", "positions", "float32", (5,), 20, "cuda"),
        TensorStorage("gradient of means", "gradients", "positions", "float32", (5,), 30, "cuda"),
        TensorStorage("moments of means", "optimizer", "positions", "float32", (5,), 40, "cuda"),
        TensorStorage("second moments of means", "optimizer", "positions", "float32", (5,), 2, "cuda"),
        TensorStorage("history.0", "other", "rest", "uint8", (9,), LARGE_BYTES - 1, "cuda"),
        TensorStorage("history.1", "other", "rest", "uint8", (9,), LARGE_BYTES, "cuda"),
        TensorStorage("grid", "buffers", "rest", "float16", (9,), 50, "cuda"),
        TensorStorage("window", "images", "rest", "uint8", (9,), LARGE_BYTES + 1, "cpu"),
    ]
    totals = tensor_totals(found, "cuda")
    assert {name: size for name, size in totals["categories"].items() if size} == {
        "parameters": 20,
        "gradients": 30,
        "optimizer": 42,
        "other": 2 * LARGE_BYTES - 1,
        "buffers": 50,
    }
    assert {name: size for name, size in totals["host"].items() if size} == {"images": LARGE_BYTES + 1}
    assert totals["named"] == {"positions": {"parameters": 20, "gradients": 30, "optimizer": 42}}
    assert totals["dtypes"] == {"float32": 92, "uint8": 2 * LARGE_BYTES - 1, "float16": 50}
    assert totals["groups"] == {"history.*": [2, 2 * LARGE_BYTES - 1], "grid": [1, 50]}
    assert [one["name"] for one in totals["largest"][:3]] == ["window", "history.1", "history.0"]
    assert (totals["tensors"], totals["large"]) == (8, 2)
