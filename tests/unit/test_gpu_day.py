"""What the GPU day is made of, as far as it needs no GPU: its list of programs, their processes, and the step watch."""

import argparse
import ast
import doctest
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_program_understands_its_options(
    load: Callable[[str], ModuleType], tmp_path: Path, rehearse: bool
) -> None:
    import tyro

    gpu_day = load("gpu_day")
    options = argparse.Namespace(
        data=tmp_path, rehearse=rehearse, extractor=None, scale=1.0, gaussians=1000, seconds=5.0
    )
    calls = gpu_day.programs(options, tmp_path)
    assert list(calls) == ["build", "speed", "checks"]
    for todo in calls.values():
        assert sum(program.seconds for program in todo) <= gpu_day.CALL_S < 600
    labels = [program.label for todo in calls.values() for program in todo]
    assert len(set(labels)) == len(labels)
    if not rehearse:
        assert {label for _, label, _, peer in gpu_day.TARGETS for label in (label, peer)} <= {*labels, ""}
    for program in calls["speed"] + calls["checks"]:
        if not program.has_result:
            continue
        script, words = load(Path(program.command[0]).stem), [str(word) for word in program.command[1:]]
        if hasattr(script, "make_parser"):
            extra = ["--extractor", "--picture"] if script.__name__ == "gpu_day_splats" else []
            known, rest = script.make_parser().parse_known_args(words)
            assert known.device == ("cpu" if rehearse else "cuda") and {w for w in rest if w[:2] == "--"} <= set(extra)
        elif hasattr(script, "GpuDayField"):
            run = tyro.cli(script.GpuDayField, args=words)
            assert run.seconds == 5.0 and run.make_config().method_name


def test_the_default_regularisation_is_measured(load: Callable[[str], ModuleType]) -> None:
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    model: Any = make_splat_config("sugar-ext").pipeline.model
    measured = {load("splat_speed").VARIANTS[name].get("regularization") for name in load("gpu_day").VARIANTS}
    assert model.regularization in measured


def test_rows_failures_and_targets_are_shown(load: Callable[[str], ModuleType]) -> None:
    gpu_day = load("gpu_day")
    environment = dict(os.environ)

    def row(label: str, code: str, has_result: bool = True, limit_s: float = 60.0) -> dict[str, Any]:
        return gpu_day.measure(gpu_day.Program("fields", label, 1.0, ("-c", code), has_result), limit_s, environment)

    rows = [
        row("f3rm-ext, triton", 'print(\'RESULT {"rays_per_s": 900.0, "query": {"ms": 12.5}}\')'),
        row("f3rm-ext, tcnn", "print('RESULT {\"rays_per_s\": 1000.0}')"),
        row("nerfacto", "raise ValueError('no | such thing')"),
        row("tests", "print('3 passed')", has_result=False),
        row("late", "", limit_s=1.0),
    ]
    text = gpu_day.tables({"date": "2026-01-01", "machine": {"device": "a GPU"}, "rows": rows})
    assert "| f3rm-ext: Triton ÷ tiny-cuda-nn, rays/s, ≥ 0.8 | 0.9 |" in text
    assert "| text query at 1080p, field, ms, ≤ 50 | 12.5 |" in text
    assert "| text query at 1080p, splats, ms, ≤ 50 | – |" in text
    assert "nerfacto: ValueError: no / such thing" in text and "tests: 3 passed" in text and "late: " in text


# --- processes -------------------------------------------------------------------------------------------------------


def test_what_was_handed_over_stays_when_time_runs_out(load: Callable[[str], ModuleType]) -> None:
    processes = load("processes")
    code = "import threading; print('RESULT {\"speed\": 3}', flush=True); threading.Event().wait()"
    found = processes.attempt(lambda: processes.result_of([sys.executable, "-c", code], 1.0, os.environ))
    assert found == {"speed": 3, "problem_of_all": "It was ended after 1 s."}


def test_a_child_that_survives_does_not_keep_the_rest_waiting(load: Callable[[str], ModuleType]) -> None:
    # In a session of its own, as servers of tests are, it is not ended with its parent.
    program = "echo early; setsid sleep 20 & sleep 100"
    began = time.monotonic()
    code, said = load("processes").run(["bash", "-c", program], 0.5, os.environ)
    assert (code, said) == (124, "early\n") and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("code", "limit_s", "sentence"),
    [
        ("import sys; sys.exit(3)", 60.0, "The process ended with exit code 3 and said nothing."),
        ("import threading; print('so far', flush=True); threading.Event().wait()", 1.0, "It was ended after 1 s."),
    ],
)
def test_a_process_that_fails_gives_a_sentence(
    load: Callable[[str], ModuleType], code: str, limit_s: float, sentence: str
) -> None:
    processes = load("processes")
    found = processes.attempt(lambda: processes.result_of([sys.executable, "-c", code], limit_s, os.environ))
    assert found["problem"] == sentence
    assert "so far" not in code or "so far" in found["log"]


# --- the step watch and the peer -------------------------------------------------------------------------------------


def trainer_of(step: Callable[[], object]) -> Any:
    """What a watch needs of a trainer: callbacks around each of a hundred steps."""
    from nerfstudio.engine.callbacks import TrainingCallbackLocation as Location

    trainer = SimpleNamespace(callbacks=[], steps=0)

    def train() -> None:
        for index in range(100):
            for location in (Location.BEFORE_TRAIN_ITERATION, Location.AFTER_TRAIN_ITERATION):
                if location == Location.AFTER_TRAIN_ITERATION:
                    step()
                    trainer.steps += 1
                for callback in trainer.callbacks:
                    callback.run_callback_at_location(index, location=location)

    trainer.train = train
    return trainer


def test_a_watch_times_counts_and_ends_a_run(load: Callable[[str], ModuleType]) -> None:
    watch = load("step_watch").StepWatch(CPU, steps=7, warm_up=2, counted=4)
    trainer = trainer_of(lambda: torch.ones(3) + torch.ones(3))
    watch.attach(trainer)
    watch.run(trainer.train)
    found = watch.result()
    assert trainer.steps == 11, "seven, and four that are counted"
    assert found["steps"] == 7 and found["timed_steps"] == 5 and found["it_per_s"] > 0
    assert found["operators_per_step"] >= 3
    assert found["launches_per_step"] is found["sync_warnings_per_step"] is None, "the CPU launches nothing"


def test_the_peer_renders_features_and_their_loss_moves_the_density(
    load: Callable[[str], ModuleType],
    make_rays: Callable[[int], Any],
    make_spec: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torchmetrics.image.lpip
    from nerfstudio.data.scene_box import SceneBox

    peers = load("peers")
    no_lpips = lambda **_: torch.nn.Identity()  # noqa: E731
    monkeypatch.setattr(torchmetrics.image.lpip, "LearnedPerceptualImagePatchSimilarity", no_lpips)
    small = {"num_proposal_samples_per_ray": (8, 8), "num_nerf_samples_per_ray": 6, "log2_hashmap_size": 10}
    model = peers.F3rmPeerConfig(implementation="torch", max_res=32, **small).setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
        num_train_data=5,
        metadata={"feature_specs": (make_spec("dense", 12),)},
    )
    batch = {"image": torch.rand(16, 3), "features": {"dense": torch.rand(16, 12)}}
    outputs = model.train()(make_rays(16))
    assert outputs["feature"].shape == (16, 12)
    losses = model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))
    losses["feature_loss"].backward()
    assert any(value.grad is not None and value.grad.any() for value in model.field.parameters())
    assert any(value.grad.any() for value in model.get_param_groups()["feature_field"] if value.grad is not None)
    assert "feature" not in model.eval()(make_rays(4))


def test_the_wheels_have_whatever_a_module_imports_at_its_top(load: Callable[[str], ModuleType]) -> None:
    def canonical(requirement: str) -> str:
        return re.sub("[-_.]+", "-", re.split("[=<>]", requirement)[0]).lower()

    collect_wheels, owners = load("collect_wheels"), importlib.metadata.packages_distributions()
    there = {canonical(name) for name in (*collect_wheels.NEEDED, *collect_wheels.USUAL)}
    there |= {"f3rm-ext", "torch", "triton", "jinja2", "markupsafe"}  # Jinja comes with PyTorch.
    for path in Path(ROOT, "f3rm_ext").rglob("*.py"):
        for line in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in line.names] if isinstance(line, ast.Import) else []
            modules += [line.module or ""] if isinstance(line, ast.ImportFrom) and not line.level else []
            for name in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names:
                assert there & {canonical(owner) for owner in owners.get(name, [name])}, f"{path} imports {name}"


@pytest.mark.parametrize(
    "name", ["gpu_day", "processes", "step_watch", "collect_wheels", "build_kernels", "training_steps"]
)
def test_examples_in_docstrings(name: str, load: Callable[[str], ModuleType]) -> None:
    found = doctest.testmod(load(name))
    assert found.attempted and not found.failed
