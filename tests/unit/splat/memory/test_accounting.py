"""The accounting against tensors that are really allocated, and what it says about six million Gaussians."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.densify import DensifyOptions, make_densifier
from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory.accounting import PLANES, POINT_BYTES, Layout, account, held_bytes, peak, total
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.memory.packed import stored_sh_colors
from f3rm_ext.splat.mip import smoothing_filter
from f3rm_ext.splat.rasterize import Rasterization
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.options import RegularizationOptions

COUNT, MILLIONS = 120, 6_000_000
GB = 1e9


def group(layout: Layout, *words: str) -> int:
    """Bytes of items of which a word is in the name."""
    return sum(item.bytes for item in account(layout) if any(word in item.name for word in words))


def trained(layout: Layout) -> tuple[dict[str, Parameter], dict[str, torch.optim.Optimizer], list[Tensor]]:
    """Gaussians after two backward passes and one step, with all that is kept for each of them."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if layout.storage == "float32" else torch.float16
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,)}
    params = {name: Parameter(torch.randn(COUNT, *shape, generator=generator)) for name, shape in shapes.items()}
    rest = torch.randn(COUNT, sh_rest_count(layout.sh_degree), 3, generator=generator)
    rest *= (torch.arange(COUNT) < layout.reflective * COUNT).view(-1, 1, 1)  # the others do not depend on the view
    params["features_rest"] = Parameter(rest.to(dtype))
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.Adam([params[name]], lr=1e-4, eps=1e-15) for name in shapes
    }
    above = 0.05 if layout.storage == "selective" else 0.0
    optimizers["features_rest"] = (
        PackedAdam([params["features_rest"]], moments=layout.moments, reflective_above=above)
        if layout.packed
        else torch.optim.Adam([params["features_rest"]], eps=1e-15)
    )
    colors = stored_sh_colors if layout.packed else sh_colors
    seen = torch.arange(COUNT) < layout.visible * COUNT
    for step in range(2):
        if step:
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        drawn = colors(layout.sh_degree, params["means"] + 1, params["features_dc"].abs() + 50, params["features_rest"])
        others = sum(params[name].square().sum() for name in shapes)
        (drawn[seen].sum() + others).backward()
    densifier = make_densifier(DensifyOptions(stop_scale2d=100 * (layout.statistics == 3)), 1.0)
    radii = torch.ones(COUNT, dtype=torch.int32)
    rendered = Rasterization(torch.zeros(4, 4, 3), torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(COUNT, 2), radii)
    densifier.after_backward(1, rendered, params, optimizers)
    statistics = [value for name, value in densifier.state_dict().items() if name != "generator"]
    means = params["means"].detach()
    neighbours = nearest_neighbours(means, layout.neighbours)
    if layout.index_bytes == 8:
        neighbours = neighbours.long()
    camera = torch.eye(4)[None], torch.eye(3)[None], torch.tensor([4]), torch.tensor([4])
    return params, optimizers, [*statistics, neighbours, smoothing_filter(means, *camera)]


LAYOUTS = {
    "naive": Layout.naive(COUNT),
    "naive, degree 1": Layout.naive(COUNT, sh_degree=1),
    "float32, half seen": Layout(COUNT, visible=0.5),
    "float16, float32": Layout(COUNT, storage="float16"),
    "float16, bfloat16, degree 2": Layout(COUNT, sh_degree=2, storage="float16", moments="bfloat16"),
    "float16, int8, by size": Layout(COUNT, storage="float16", moments="int8", statistics=3, visible=0.25),
    "selective": Layout(COUNT, storage="selective", moments="int8", reflective=0.25),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_are_those_of_real_tensors(layout: Layout) -> None:
    params, optimizers, others = trained(layout)
    held = held_bytes(params, optimizers, *others)
    assert held["parameters"] == group(layout, "parameters") + COUNT * 3 * sh_rest_count(layout.sh_degree) * (
        2 if layout.storage != "float32" else 4
    )
    assert held["moments"] == group(layout, "moments", "remainders")
    assert held["others"] == group(layout, "statistics", "neighbours", "filter")
    mark = params["features_rest"].element_size() if layout.packed else 0  # the number that .grad is expanded from
    assert held["gradients"] == total(account(layout), "gradient") + mark
    assert sum(held.values()) == total(account(layout), "kept", "gradient") + mark


def test_memory_that_is_shared_counts_once() -> None:
    whole = torch.zeros(10, 3)
    assert held_bytes({"means": whole}, {}, whole[:5], whole.T) == {
        "parameters": 120,
        "moments": 0,
        "gradients": 0,
        "others": 120,
    }


def test_six_million_gaussians_before_and_after() -> None:
    """The figures of the manual: persistent tensors, gradients and copies of harmonics."""
    naive = account(Layout.naive(MILLIONS, points=1_000_000))
    ours = account(Layout.of(MemoryOptions(optimize_memory=True), MILLIONS, points=1_000_000))
    same = ("kept", "gradient", "in flight")
    assert total(naive, *same) / GB == pytest.approx(9.744)
    assert total(ours, *same) / GB == pytest.approx(3.636)
    assert peak(naive) / GB == pytest.approx(10.92)
    assert peak(ours) / GB <= 5.5  # with a picture's intermediates and a million points, every Gaussian visible
    assert total(naive) - total(naive, *same) == total(ours) - total(ours, *same)  # counted alike


def _saved_percent(sh_degree: int, planar: bool) -> int:
    """What optimize-memory saves of the peak of six million Gaussians, with planar or with the points of others."""
    points = 0 if planar else RegularizationOptions().samples
    layouts = (
        Layout.of(options, MILLIONS, sh_degree, points)
        for options in (MemoryOptions(), MemoryOptions(optimize_memory=True))
    )
    default, ours = (
        peak(account(replace(layout, neighbours=0, planes=True) if planar else layout)) for layout in layouts
    )
    return round(100 * (1 - ours / default))


def test_what_is_said_of_optimize_memory_is_what_the_account_says() -> None:
    help_text = tyro.extras.get_parser(MemoryOptions).format_help()
    words = " ".join(re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", " ", help_text).split())
    documentation = Path(__file__).parents[4] / "docs"
    splats, benchmarks = (
        " ".join((documentation / name).read_text().split()) for name in ("splats.md", "benchmarks.md")
    )
    said = "{} % less at SH degree 3 and {} % less at degree 2"
    default, others = ([_saved_percent(degree, planar) for degree in (3, 2)] for planar in (True, False))
    assert said.format(*default) in words and f"{said.format(*default)} with `planar`" in splats
    assert "with SuGaR's losses {} and {} %".format(*others) in splats
    assert said.format(*others) in benchmarks and "in place of neighbours and points, {} and {} %".format(*default) in (
        benchmarks
    )
    assert not re.search(r"about 60\s?%", words)


def test_a_peak_is_the_worse_of_regularisation_and_picture() -> None:
    without = account(Layout(1000))
    assert peak(without) == total(without)
    few, many = (account(Layout(1000, points=count)) for count in (10_000, 10_010))
    assert peak(few) - total(few, "kept") == total(few, "rendering") / 2 + total(few, "regularization")
    assert peak(many) - peak(few) == 10 * POINT_BYTES


def test_planes_take_memory_but_no_neighbours_and_no_points() -> None:
    million = 1_000_000
    plain, planar = Layout(million, neighbours=0), Layout(million, neighbours=0, planes=True)
    assert peak(account(planar)) - peak(account(plain)) == million * sum(PLANES.values()) * 4
    assert peak(account(planar)) < peak(account(Layout(million, points=million)))


def test_facts_about_the_naive_layout() -> None:
    """59 numbers per Gaussian at degree 3; parameters, gradients and two moments of 6 M are 5402 MiB."""
    items = {item.name: item.bytes for item in account(Layout.naive(MILLIONS))}
    parameters = items["parameters but harmonics"] + items["harmonics"]
    assert parameters == MILLIONS * 59 * 4
    everything = sum(value for name, value in items.items() if "moments" in name or "gradients" in name) + parameters
    assert everything / 2**20 == pytest.approx(5402, abs=1)
    assert items["harmonics"] / 2**20 == pytest.approx(1030, abs=1)


def test_degree_zero_has_no_harmonics() -> None:
    items = {item.name: item.bytes for item in account(Layout(10, sh_degree=0))}
    assert items["harmonics"] == items["gradients of harmonics"] == 0


def test_fewer_visible_gaussians_need_less() -> None:
    layout = Layout(1000)
    less = total(account(layout)) - total(account(replace(layout, visible=0.25)))
    assert less == 750 * 32
    assert layout == copy.copy(layout)
