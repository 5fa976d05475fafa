"""Options that make a run fit."""

import functools
from collections.abc import Callable

import pytest

from f3rm_ext.data import cycling_config
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.estimate import Category, MemoryEstimate
from f3rm_ext.memory.options import QualityImpact
from f3rm_ext.planning.advice import Advice, advise, largest, list_options
from f3rm_ext.planning.question import Question
from f3rm_ext.planning.request import Options, PlanRequest

Estimate = Callable[[PlanRequest], MemoryEstimate]


@functools.cache  # advice is not changed, and takes seconds
def advice_for(estimate: Estimate, gib: float | int, method: str = "sugar-ext", *arguments: str) -> Advice:
    gaussians = 6_000_000 if method.startswith("sugar") else None
    return advise(Question(method, arguments, vram_gib=gib, gaussians=gaussians).request, estimate)


def named(advice: Advice) -> dict[str, str]:
    return {name.removeprefix("pipeline."): value for name, value in advice.options}


def test_what_fits_needs_no_advice(estimate: Estimate) -> None:
    advice = advice_for(estimate, 16)
    assert advice.fits and advice.savings == ()


def test_smaller_cards_need_more_and_lose_more(estimate: Estimate) -> None:
    found = [advice_for(estimate, gib) for gib in (6.5, 5.3, 2.3)]
    assert all(advice.fits for advice in found)
    assert named(found[0]) == {"datamanager.cache-images": "cpu"}
    worst = [max(saving.quality_impact for saving in advice.savings) for advice in found]
    assert worst == sorted(worst) and worst[0] == QualityImpact.NONE and worst[-1] == QualityImpact.DETAIL
    assert {"model.optimize-memory": "True"}.items() <= named(found[1]).items()


def test_nothing_is_advised_that_the_run_fits_without(estimate: Estimate) -> None:
    for gib in (3, 2.3):
        advice = advice_for(estimate, gib)
        question = Question("sugar-ext", (), vram_gib=gib, gaussians=6_000_000)
        detail = [saving for saving in advice.savings if saving.quality_impact == QualityImpact.DETAIL]
        for saving in detail:
            rest = tuple(option for option in advice.options if option not in saving.options)
            assert estimate(question.request(rest)).peak("train") > question.request().device.usable_bytes


def test_what_a_later_option_makes_unnecessary_is_left_out() -> None:
    tried = []

    def estimate(request: PlanRequest) -> MemoryEstimate:
        pipeline = request.config.pipeline
        on_cpu, optimized = pipeline.datamanager.cache_images == "cpu", pipeline.model.memory.optimize_memory  # type: ignore[attr-defined]
        tried.append((on_cpu, optimized))
        return MemoryEstimate({"train": {"images": (1 - on_cpu) << 30, "activations": (1 if optimized else 4) << 30}})

    advice = advice_for(estimate, 4)
    assert advice.fits and named(advice) == {"model.optimize-memory": "True"}
    assert (True, False) in tried, "images in main memory were tried first"


def test_the_present_value_is_that_of_the_run_as_it_is() -> None:
    def estimate(request: PlanRequest) -> MemoryEstimate:
        rays: int = request.config.pipeline.datamanager.train_num_rays_per_batch  # type: ignore[attr-defined]
        return MemoryEstimate({"train": {"activations": rays << 20}})

    (saving,) = advice_for(estimate, 1.5, "f3rm-ext").savings
    assert saving.options == (("pipeline.datamanager.train-num-rays-per-batch", "1024"),), "halved twice"
    assert saving.now == "4096" and saving.saved_bytes == 3 << 30


def test_what_cannot_fit_is_said(estimate: Estimate) -> None:
    advice = advice_for(estimate, 0.3, "f3rm-ext-lite")
    assert not advice.fits and advice.savings


def test_an_option_that_was_typed_gives_way(estimate: Estimate) -> None:
    advice = advice_for(estimate, 0.75, "f3rm-ext", "--pipeline.datamanager.images-on-gpu=False",
                        "--pipeline.datamanager.train_num_rays_per_batch", "4096")  # fmt: skip
    assert advice.fits and advice.request.config.pipeline.datamanager.train_num_rays_per_batch < 4096  # type: ignore[attr-defined]


def test_pictures_get_smaller_chunks_once_training_fits(estimate: Estimate) -> None:
    advice = advice_for(estimate, 1.8, "f3rm-ext")
    assert advice.fits and advice.pictures_fit
    assert named(advice) == {"model.eval-num-rays-per-chunk": "16384"}
    assert [saving.peak for saving in advice.savings] == ["pictures"]


def test_an_option_that_cannot_be_planned_is_passed_over(estimate: Estimate) -> None:
    question = Question("sugar-ext", (), vram_gib=2.3, gaussians=6_000_000)

    def request_with(options: Options) -> PlanRequest:
        if "pipeline.model.optimize-memory" in dict(options):
            raise ConfigError("It does not go with this run.")
        return question.request(options)

    advice = advise(request_with, estimate)
    assert advice.savings and "model.optimize-memory" not in named(advice)


def test_an_option_that_others_need_is_kept(estimate: Estimate) -> None:
    """A run that cannot do without an option makes no trouble when one looks whether it can."""
    question, tried = Question("sugar-ext", (), vram_gib=2.3, gaussians=6_000_000), []

    def request_with(options: Options) -> PlanRequest:
        words = [name for name, _ in options]
        if tried and "pipeline.model.optimize-memory" in tried[-1] and "pipeline.model.optimize-memory" not in words:
            raise ConfigError("It does not go without.")
        tried.append(words)
        return question.request(options)

    assert "model.optimize-memory" in named(advise(request_with, estimate))


def test_nothing_is_advised_for_pictures_that_do_not_fit_anyway(estimate: Estimate) -> None:
    def large_pictures(request: PlanRequest) -> MemoryEstimate:
        found = estimate(request)
        pictures: dict[Category, int] = {**found.device["evaluation"], "workspace": 4 << 30}
        return MemoryEstimate({"train": found.device["train"], "evaluation": pictures}, found.host)

    advice = advice_for(large_pictures, 4, "f3rm-ext")
    assert advice.fits and not advice.pictures_fit and advice.savings == ()


@pytest.mark.parametrize("gib", [0.9, 4])
def test_options_are_those_of_a_shortage(estimate: Estimate, gib: float | int) -> None:
    request = Question("f3rm-ext", (), vram_gib=gib).request()
    names = [option.name for option in list_options(request, estimate(request))]
    assert names[-3:] == [
        "pipeline.datamanager.images-on-gpu",
        "pipeline.datamanager.train-num-rays-per-batch",
        "pipeline.datamanager.feature-ray-fraction",
    ]
    assert "pipeline.model.feature-grid.log2-hashmap-size" in names


def test_a_smaller_window_is_half_of_the_one_that_memory_holds(
    estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splats keep as many photos as fit into an eighth of 4 GiB; fields keep some pixels of all."""
    monkeypatch.setattr(cycling_config, "total_bytes", lambda device: 4 << 30)
    name, found = "pipeline.datamanager.train-num-images-to-sample-from", {}
    for method in ("sugar-ext", "f3rm-ext"):
        request = Question(
            method, ("--machine.device-type", "cpu"), images=400, width_px=4096, height_px=2048
        ).request()
        found[method] = {option.name: option for option in list_options(request, estimate(request))}
    option = found["sugar-ext"][name]
    assert option.now == "21 of 400, for ever" and option.settings()[0] == (name, "10")
    assert name not in found["f3rm-ext"]


@pytest.mark.parametrize(("memory", "expected"), [(10_100, 500), (999, 40), (100, 0), (50, 0)])
def test_the_largest_number_that_fits(memory: int, expected: int) -> None:
    assert largest(lambda count: 100 + 20 * count, memory, 200, unit=10) == expected


def test_the_largest_number_takes_few_estimates() -> None:
    counts: list[int] = []

    def with_count(count: int) -> int:
        counts.append(count)
        return 100_000 + 20 * count

    assert largest(with_count, 1_000_000_000, 1000) == 49_995_000 and len(counts) == 3


def test_the_largest_number_is_tried_where_memory_is_not_proportional() -> None:
    def squared(count: int) -> int:
        return count * count

    found = largest(squared, 100 * 100, 20)
    assert 0 < found <= 100
