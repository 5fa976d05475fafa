"""Gaussians by schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trimesh

from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.planning.gaussians import growth_of
from f3rm_ext.planning.growth import GROWN, final_gaussians, gaussians_at, schedule_of, starting_gaussians
from f3rm_ext.planning.request import CaptureSizes, Device, PlanRequest


def request_of(points: int = 10_000, gaussians: int | None = None, **densify: Any) -> PlanRequest:
    config: Any = make_splat_config("sugar-ext")
    for name, value in densify.items():
        setattr(config.pipeline.model.densify, name, value)
    capture = CaptureSizes(train_images=20, eval_images=2, width_px=64, height_px=48, points=points)
    return PlanRequest(config, capture, Device("cpu", 1 << 33), gaussians=gaussians)


def test_a_run_starts_with_the_points_or_with_random_ones() -> None:
    assert starting_gaussians(request_of(points=10_000)) == 10_000
    assert starting_gaussians(request_of(points=0)) == 50_000
    assert starting_gaussians(request_of(points=10_000, max_gaussians=4000)) == 4000


def test_nothing_grows_without_a_strategy() -> None:
    request = request_of(strategy="none")
    assert final_gaussians(request) == gaussians_at(request, 14_999) == 10_000


def test_the_default_strategy_ends_at_its_limit_or_at_what_is_usual() -> None:
    assert final_gaussians(request_of()) == GROWN
    assert final_gaussians(request_of(max_gaussians=200_000)) == 200_000
    assert final_gaussians(request_of(gaussians=6_000_000)) == 6_000_000
    counts = [gaussians_at(request_of(max_gaussians=200_000), step) for step in range(0, 15_000, 500)]
    assert counts == sorted(counts) and counts[0] == 10_000 and counts[-1] == 200_000


def test_mcmc_grows_by_a_share_in_each_round() -> None:
    """The first round is at step 600 of a run of 15 000 steps: gsplat's strategy asks for a step above 500."""
    request = request_of(strategy="mcmc", max_gaussians=0)
    assert gaussians_at(request, 600) == 10_000
    assert gaussians_at(request, 601) == 10_500
    assert gaussians_at(request, 701) == 11_025
    assert final_gaussians(request_of(strategy="mcmc", max_gaussians=12_000)) == 12_000
    assert final_gaussians(request) == gaussians_at(request, 14_999) < 1_000_000


def test_a_run_that_starts_from_a_file_needs_its_number() -> None:
    request = request_of(strategy="none")
    request.config.pipeline.model.start_from = Path("splats.ply")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="give --gaussians"):
        final_gaussians(request)


def test_a_refinement_has_the_gaussians_of_its_mesh(tmp_path: Path) -> None:
    config: Any = make_splat_config("sugar-ext-refine")
    capture = CaptureSizes(train_images=20, eval_images=2, width_px=64, height_px=48, points=10_000)
    request = PlanRequest(config, capture, Device("cpu", 1 << 33))
    with pytest.raises(ConfigError, match="give the mesh by --mesh, or --gaussians"):
        starting_gaussians(request)
    assert starting_gaussians(replace(request, gaussians=700)) == 700
    config.pipeline.model.mesh, config.pipeline.model.gaussians_per_triangle = tmp_path / "ball.ply", 3
    trimesh.creation.icosphere(subdivisions=1).export(tmp_path / "ball.ply")
    assert starting_gaussians(request) == final_gaussians(request) == 240
    growth = growth_of(request)
    assert growth is not None and growth.begin == growth.end and growth.source == "on the triangles of the mesh"


@pytest.mark.parametrize(("mode", "skipped"), [("planar", 7 / 15), ("dn-consistency", 9 / 15)])
def test_a_run_that_starts_regularized_skips_the_stages_of_its_regularization(mode: str, skipped: float) -> None:
    request = request_of()
    model: Any = request.config.pipeline.model
    model.regularization, model.start_stage = mode, "regularized"
    schedule = schedule_of(request)
    assert schedule.offset / schedule.whole == pytest.approx(skipped, abs=1e-3)
