"""Gaussians by schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import Device
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.planning.gaussians import ASSUMED_GAUSSIANS, final_gaussians, plan_growth, starting_gaussians
from f3rm_ext.planning.request import CaptureSizes, PlanRequest, RefinementStart
from f3rm_ext.splat.files import SplatInfo, export_splats
from f3rm_ext.splat.gaussians import Gaussians


def request_of(
    points: int = 10_000, gaussians: int | None = None, method: str = "sugar-ext", **densify: Any
) -> PlanRequest:
    config: Any = make_splat_config(method)
    for name, value in densify.items():
        setattr(config.pipeline.model.densify, name, value)
    capture = CaptureSizes(train_images=20, eval_images=2, width_px=64, height_px=48, points=points)
    return PlanRequest(config, capture, Device("cpu", 1 << 33), gaussians=gaussians)


def test_a_run_starts_with_the_points_or_with_random_ones() -> None:
    assert starting_gaussians(request_of(points=10_000)) == 10_000
    assert starting_gaussians(request_of(points=0)) == 50_000
    assert starting_gaussians(request_of(points=10_000, max_gaussians=4000)) == 4000


def test_nothing_grows_without_a_strategy() -> None:
    assert final_gaussians(request_of(strategy="none")) == 10_000


def test_the_default_strategy_ends_at_its_limit_or_at_what_is_usual() -> None:
    assert final_gaussians(request_of()) == ASSUMED_GAUSSIANS
    assert final_gaussians(request_of(max_gaussians=200_000)) == 200_000
    assert final_gaussians(request_of(gaussians=6_000_000)) == 6_000_000


def test_mcmc_grows_by_a_share_in_each_round() -> None:
    """The first round is at step 600 of a run of 15,000 steps: gsplat's strategy asks for a step above 500."""
    for stop, count in ((500, 10_000), (600, 10_000), (601, 10_500), (701, 11_025)):
        assert final_gaussians(request_of(strategy="mcmc", max_gaussians=0, mcmc_stop=stop)) == count
    assert final_gaussians(request_of(strategy="mcmc", max_gaussians=12_000)) == 12_000
    assert 11_025 < final_gaussians(request_of(strategy="mcmc", max_gaussians=0)) < 1_000_000


def test_mcmc_removes_no_points_above_its_own_limit() -> None:
    many = request_of(points=1_500_000, strategy="mcmc")
    growth = plan_growth(many)
    assert growth is not None and growth.last == growth.first == 1_500_000 == final_gaussians(many)
    assert growth.source == "above the limit of growth, which removes none"
    limited = plan_growth(request_of(points=1_500_000, strategy="mcmc", max_gaussians=12_000))
    assert limited is not None and limited.last == 12_000 and limited.source.startswith("the limit")


@pytest.mark.parametrize(
    ("densify", "end"),
    [
        ({}, 14_000),
        ({"stop": 3000}, 6000),
        ({"stop": 400}, 1000),
        ({"start": 8000}, 16_000),
        ({"start": 20_000}, 40_000),
        ({"strategy": "mcmc", "stop": 400}, 14_000),
        ({"strategy": "mcmc", "mcmc_stop": 3000}, 6000),
        ({"strategy": "mcmc", "mcmc_stop": 0}, 1000),
    ],
)
def test_growth_ends_where_the_options_say(densify: dict[str, Any], end: int) -> None:
    """The run has twice the steps that the options are for. A stop that is not after the start lets nothing grow."""
    request = request_of(**densify)
    request.config.max_num_iterations = 30_000
    growth = plan_growth(request)
    assert growth is not None and growth.end == end
    assert (growth.last > growth.first) is (growth.end > growth.begin)
    assert growth.end > growth.begin or growth.source == "growth stops before it starts"


def test_a_run_that_starts_from_a_file_needs_its_number() -> None:
    request = request_of(strategy="none")
    request.config.pipeline.model.start_from = Path("splats.ply")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="give --gaussians"):
        final_gaussians(request)


def test_a_refinement_has_the_gaussians_of_its_mesh(tmp_path: Path) -> None:
    request = request_of(method="sugar-ext-refine")
    model: Any = request.config.pipeline.model
    with pytest.raises(ConfigError, match=r"--mesh.*--gaussians"):
        starting_gaussians(request)
    assert starting_gaussians(replace(request, gaussians=700)) == 700
    model.mesh, model.gaussians_per_triangle = tmp_path / "ball.ply", 3
    trimesh.creation.icosphere(subdivisions=1).export(tmp_path / "ball.ply")
    assert starting_gaussians(request) == final_gaussians(request) == 240
    growth = plan_growth(request)
    assert growth is not None and growth.begin == growth.end and growth.source == "on the triangles of the mesh"


def test_a_refinement_counts_divided_triangles_and_free_splats(tmp_path: Path) -> None:
    request = request_of(method="sugar-ext-refine")
    model: Any = request.config.pipeline.model
    ball = trimesh.creation.icosphere(subdivisions=1)
    ball.export(tmp_path / "ball.ply")
    dense = np.repeat(ball.triangles_center[:1], 40, axis=0) + np.random.default_rng(0).normal(0, 0.01, (40, 3))
    means = torch.from_numpy(np.concatenate([dense, [[0, 0, 9.0]]])).float()  # and one that is far from the mesh
    sizes, grey = torch.full((41, 3), -4.0), torch.zeros(41, 3)
    turns = torch.tensor([[1.0, 0, 0, 0]]).expand(41, 4)
    splats = Gaussians(means, sizes, turns, torch.zeros(41, 1), grey, torch.zeros(41, 0, 3))
    export_splats(splats, tmp_path / "splats.ply", SplatInfo(), {"made_by": "a test"})
    model.mesh, model.mesh_frame, model.start_from = tmp_path / "ball.ply", "scene", tmp_path / "splats.ply"
    place = torch.eye(4)[None, :3].clone()
    place[:, 2, 3] = 3.0
    outputs = DataparserOutputs([tmp_path / "0.png"], Cameras(place, 50.0, 50.0, 32.0, 24.0, 64, 48))
    start = RefinementStart.from_options(model, tmp_path, outputs)
    assert start.free == 1 and start.triangles > 80 and start.vertices == start.triangles // 2 + 2
    request = replace(request, start=start)
    assert final_gaussians(request) == start.triangles + 1
    growth, alone = plan_growth(request), plan_growth(replace(request, start=None))
    assert growth is not None and alone is not None
    assert growth.source == f"{start.triangles} triangles, divided where splats are dense; 1 are free"
    assert alone.last == 80 and "give --data" in alone.source


@pytest.mark.parametrize(("mode", "skipped"), [("planar", 7 / 15), ("dn-consistency", 9 / 15)])
def test_a_run_that_starts_regularized_skips_the_stages_of_its_regularization(mode: str, skipped: float) -> None:
    request = request_of()
    model: Any = request.config.pipeline.model
    model.regularization, model.start_stage = mode, "regularized"
    schedule = model.schedule(schedule_length(request.config))
    assert schedule.offset / schedule.whole == pytest.approx(skipped, abs=1e-3)
