"""A plan as data and as text."""

import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import Device
from f3rm_ext.memory.estimate import MemoryEstimate
from f3rm_ext.planning.estimator import cached
from f3rm_ext.planning.plan import Plan, make_plan
from f3rm_ext.planning.question import Question
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.table import bar, show
from f3rm_ext.planning.throughput import Throughput
from f3rm_ext.scripts import plan as cli

Estimate = Callable[[PlanRequest], MemoryEstimate]


def text_of(plan: Plan) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(show(plan))
    return stream.getvalue()


def plan_of(estimate: Estimate, method: str, *arguments: str, **question: Any) -> Plan:
    return make_plan(Question(method, arguments, **question), estimate, wanted_epochs=10)


def test_a_plan_that_fits(estimate: Estimate) -> None:
    plan = plan_of(estimate, "sugar-ext", "--sh-degree", "3", gpu="5060 ti 16gb", gaussians=6_000_000)
    text = text_of(plan)
    assert plan.fits and "sugar-ext on RTX 5060 Ti 16GB (16 GiB, 448 GB/s)" in text
    assert "6,000,000 at the end (as given by --gaussians)" in text and "It fits, with" in text
    assert text.rstrip().endswith("ns-train sugar-ext --sh-degree 3")
    assert "assumed: give --data" in text and "--probe" in text


def test_a_plan_that_does_not(estimate: Estimate) -> None:
    plan = plan_of(estimate, "sugar-ext", "--sh-degree", "3", vram_gib=4, gaussians=6_000_000)
    text = text_of(plan)
    assert "It does not fit as it is." in text and "--pipeline.model.optimize-memory True" in text
    assert shlex.split(plan.command)[:2] == ["ns-train", "sugar-ext"] and plan.command in text
    data = json.loads(json.dumps(plan.to_dict()))
    assert not data["memory"]["fits"] and data["advice"]["fits"]
    assert data["advice"]["command"] == plan.command
    assert data["memory"]["peak_bytes"]["train"] == sum(data["memory"]["device_bytes"]["train"].values())
    saved = sum(option["saved_bytes"] for option in data["advice"]["options"])
    assert data["memory"]["peak_bytes"]["train"] - saved == data["advice"]["peak_bytes"]["training"] < 4 << 30


@pytest.mark.parametrize(("gib", "fits"), [(6, False), (6.5, True)])
def test_a_card_is_not_filled_to_the_last_byte(gib: float | int, fits: bool) -> None:
    """What CUDA takes is a guess, and a card of 6 GiB reports less."""
    plan = plan_of(lambda _: MemoryEstimate({"train": {"parameters": int(5.94 * 2**30)}}), "sugar-ext", vram_gib=gib)
    assert plan.fits is fits and plan.request.device.memory_bytes == gib * 2**30
    assert ("It fits" in text_of(plan)) is fits
    assert Device("cpu", 1000).usable_bytes == 1000, "the memory of this machine is measured, and the process known"


def test_a_plan_without_options_that_help_names_none(estimate: Estimate) -> None:
    def large_pictures(request: PlanRequest) -> MemoryEstimate:
        found = estimate(request)
        return MemoryEstimate({**found.device, "evaluation": {"workspace": 5 << 30}}, found.host)

    plan = plan_of(large_pictures, "sugar-ext-lite", vram_gib=4)
    text = text_of(plan)
    assert not plan.fits and plan.advice.fits and "With these options" not in text
    assert "Pictures of evaluation take 5.00 of" in text and "--vis viewer, which evaluates nothing" in text


def test_a_viewer_that_does_not_fit_is_left_out(estimate: Estimate) -> None:
    def large_query(request: PlanRequest) -> MemoryEstimate:
        found = estimate(request)
        return MemoryEstimate({**found.device, "query": {"workspace": 5 << 30}}, found.host)

    plan = plan_of(large_query, "f3rm-ext-lite", vram_gib=4)
    text = " ".join(text_of(plan).split())
    assert not plan.fits and plan.advice.fits and "Pictures of evaluation and of the viewer take 5.00 of" in text
    assert "(--vis tensorboard --steps-per-eval-image 0 --steps-per-eval-all-images 0)" in text


def test_numbers_of_steps(estimate: Estimate) -> None:
    plan = plan_of(
        estimate,
        "f3rm-ext",
        *("--pipeline.datamanager.train-num-rays-per-batch", "8192", "--max-num-iterations", "120000"),
        *("--pipeline.datamanager.train-num-images-to-sample-from", "32"),
        *("--pipeline.datamanager.train-num-times-to-repeat-images", "30000", "--machine.num-devices", "1"),
        vram_gib=24,
    )
    text = text_of(plan)
    assert "9.38 epochs of 104.9 M pixels, with 12,800 steps each" in text and "--max-num-iterations 128000" in text
    assert "seen in one block and then forgotten" not in text, "some images are in two windows"
    assert "--optimizers.fields.optimizer.lr 0.014" in text, "√2 times the rate for twice the batch of the method"
    assert "optimizer.lr" not in text_of(plan_of(estimate, "f3rm-ext", vram_gib=24))
    assert plan.to_dict()["coverage"]["steps_for_wanted_epochs"] == 128_000


def test_one_pass_in_blocks_is_warned_of(estimate: Estimate) -> None:
    blocks = ("--pipeline.datamanager.train-num-images-to-sample-from=25",
              "--pipeline.datamanager.train-num-times-to-repeat-images=7500")  # fmt: skip
    assert "seen in one block and then forgotten" in text_of(plan_of(estimate, "f3rm-ext", *blocks, vram_gib=24))
    assert "never used" in text_of(plan_of(estimate, "f3rm-ext", blocks[0], vram_gib=24))


def test_time_is_measured_or_not_said(estimate: Estimate) -> None:
    seen: list[int] = []

    def measure(config: Any, sizes: Any) -> Throughput:
        seen.append(config.max_num_iterations)
        return Throughput(4.0, "measured here")

    plan = make_plan(Question("f3rm-ext-lite", ()), estimate, measure=measure)
    assert seen == [4000] and plan.to_dict()["time"]["eta_s"] == 1000
    assert "Time: 16 min 40 s at 4 steps per second, measured here" in text_of(plan)
    splats = make_plan(Question("sugar-ext", ()), estimate, measure=measure)
    assert "Time: at least" in text_of(splats), "steps get slower while Gaussians are added"


def test_several_devices_share_a_batch(estimate: Estimate) -> None:
    plan = plan_of(estimate, "f3rm-ext", "--machine.num-devices", "2", vram_gib=24)
    assert plan.request.processes == 2 and "4,096 rays over all devices, 2,048 on each" in text_of(plan)


def test_divided_gaussians_are_told_of_all_devices_and_of_each(estimate: Estimate) -> None:
    devices = ("--machine.num-devices", "4", "--pipeline.model.densify.max-gaussians", "500001")
    whole = text_of(plan_of(estimate, "sugar-ext", *devices, vram_gib=16))
    divided = text_of(plan_of(estimate, "sugar-ext", *devices, "--pipeline.model.shard-gaussians=True", vram_gib=16))
    assert "500,001 at the end (the limit, --pipeline.model.densify.max-gaussians), 125,001 on each device." in divided
    assert "on each device." not in whole.replace("of images on each device.", "")


def test_the_limit_of_growth_holds(estimate: Estimate) -> None:
    plan = plan_of(estimate, "sugar-ext-lite", vram_gib=4, gaussians=1_000_000)
    assert plan.growth is not None and plan.growth.last == plan.request.gaussians == 40_000
    assert "the limit, --pipeline.model.densify.max-gaussians" in text_of(plan)
    numbers = {"images": 9, "width_px": 64, "height_px": 48, "points": 1_500_000, "gaussians": 2_000_000}
    plan = plan_of(estimate, "sugar-ext", "--pipeline.model.densify.strategy=mcmc", vram_gib=16, **numbers)
    assert plan.request.gaussians == 1_500_000, "mcmc's own limit removes no points"


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ({"images": 3}, "--width-px"),
        ({"gaussians": 0}, "--gaussians is 0"),
        ({"images": 0, "width_px": 1, "height_px": 1}, "--images is 0"),
        ({"gpu": "voodoo"}, "voodoo"),
        ({"vram_gib": 0}, "--vram-gib is 0"),
    ],
)
def test_bad_questions(estimate: Estimate, question: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan_of(estimate, "sugar-ext", **question)


@pytest.mark.parametrize(("gib", "share"), [(1, "200%"), (2, "100%"), (8, "25%")])
def test_the_bar_has_the_card_s_end(gib: int, share: str) -> None:
    memory = MemoryEstimate({"train": {"parameters": 1 << 30, "activations": 1 << 30}})
    line = bar(memory, gib << 30)
    picture = line.split(" ")[0]
    assert share in line and picture.count("┃") == 1 and len(picture) == 61
    assert abs(picture.count("P") - 60 / max(2, gib)) <= 0.5 >= abs(picture.count("A") - 60 / max(2, gib))


def test_a_run_is_started_by_the_ns_train_of_this_python_or_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append([path, *words]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="install nerfstudio"):
        cli.Plan()._start(["ns-train", "sugar-ext"])
    for folder in ("bin", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        program = tmp_path / folder / "ns-train"
        program.touch(0o755)
        cli.Plan()._start(["ns-train", "sugar-ext"])
        assert started.pop() == [str(program), str(program), "sugar-ext"]


def test_estimates_are_made_once(estimate: Estimate) -> None:
    calls: list[PlanRequest] = []

    def counted(request: PlanRequest) -> MemoryEstimate:
        calls.append(request)
        return estimate(request)

    remembered, question = cached(counted), Question("f3rm-ext-lite", (), vram_gib=8)
    assert remembered(question.request()) == remembered(question.request()) and len(calls) == 1
    remembered(question.request((("pipeline.model.num-samples", "16"),)))
    assert len(calls) == 2
    remembered(replace(question.request(), pictures=False))
    assert len(calls) == 2
    remembered(replace(question.request((("pipeline.model.num-samples", "12"),)), pictures=False))
    assert len(calls) == 3 and not calls[-1].pictures
