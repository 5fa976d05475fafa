"""The GPU day's parts that need no GPU: budgets, the file, targets and tables, and what a step is counted by."""

import doctest
import functools
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
SECTIONS = ["kernels", "tests", "features", "fields", "splats", "splat-features", "plan", "poses", "moco"]


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark by its name, as its siblings do."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def pages(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gpu_day_report")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- budgets and the file --------------------------------------------------------------------------------------------


def test_a_failing_section_is_recorded_and_the_next_one_runs(pages: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    day = pages.Day({}, path, 600.0, Clock())

    def broken(part: Any) -> None:
        part.row("first", lambda limit: {"figure": 1})
        raise ValueError("no such thing")

    day.run("broken", 10.0, broken)
    day.run("whole", 10.0, lambda part: part.row("a", lambda limit: {"limit": limit}))
    sections = json.loads(path.read_text())["sections"]
    assert sections["broken"]["state"] == "failed" and sections["broken"]["problem"] == "ValueError: no such thing"
    assert sections["broken"]["rows"][0]["figure"] == 1
    assert sections["whole"]["state"] == "done" and sections["whole"]["rows"][0]["limit"] == 10.0


def test_rows_are_on_disk_as_soon_as_they_are_there(pages: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    day = pages.Day({}, path, 600.0, Clock())

    def work(part: Any) -> None:
        part.row("first", lambda limit: {})
        found = json.loads(path.read_text())["sections"]["s"]
        assert found["state"] == "running" and [row["label"] for row in found["rows"]] == ["first"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        day.run("s", 10.0, work)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_killed_writer_leaves_the_old_file(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    pages.write_report({"a": 1}, path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        pages.write_report({"a": 2}, path)
    assert json.loads(path.read_text()) == {"a": 1}


def test_sections_and_rows_share_what_time_there_is(pages: ModuleType, tmp_path: Path) -> None:
    clock, limits = Clock(), []
    day = pages.Day({}, tmp_path / "report.json", 100.0, clock)

    def measure(limit: float) -> dict[str, Any]:
        limits.append(limit)
        clock.now += 40.0
        return {}

    def two_rows(part: Any) -> None:
        part.row("a", measure, share=0.5)
        part.row("b", measure)

    day.run("first", 60.0, two_rows)
    assert limits == [30.0, 20.0], "half of the budget, then what was left of it"
    found = day.run("second", 60.0, lambda part: part.row("c", measure))
    assert limits[2:] == [20.0] and found["state"] == "done", "no more than is left of the whole"
    found = day.run("third", 60.0, lambda part: part.row("d", measure))
    assert found["state"] == "left out" and "100 s of the whole were over" in found["problem"] and len(limits) == 3


def test_a_row_without_time_says_so(pages: ModuleType, tmp_path: Path) -> None:
    clock = Clock()
    day = pages.Day({}, tmp_path / "report.json", 100.0, clock)

    def work(part: Any) -> None:
        clock.now += 9.0
        part.row("late", lambda limit: pytest.fail("it must not begin"))

    assert "time of this section was over" in day.run("s", 10.0, work)["rows"][0]["problem"]


# --- targets and tables ----------------------------------------------------------------------------------------------


def report_with(**sections: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": "2026-01-01",
        "rehearsal": False,
        "machine": {"device": "a GPU"},
        "versions": {"torch": "2", "triton": None},
        "capture": "room",
        "sections": {
            name.replace("_", "-"): {"state": "done", "rows": rows, "seconds": 1.0} for name, rows in sections.items()
        },
    }


def field_row(label: str, rays_per_s: float, **more: Any) -> dict[str, Any]:
    return {"label": label, "steps": 10, "rays_per_step": 4096, "rays_per_s": rays_per_s, "psnr": 20.123, **more}


def verdicts(pages: ModuleType, report: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {target.name: (target.found, target.met) for target in pages.targets(report)}


def test_targets_are_met_missed_or_not_measured(pages: ModuleType) -> None:
    fields = [
        field_row("f3rm-ext, triton", 900.0, query={"ms": 700.0}),
        field_row("f3rm-ext, tcnn", 1000.0),
        {"label": pages.F3RM_PEER, "problem": "It failed."},
    ]
    splats = [
        {"label": pages.PEER, "steps_per_s": 100.0},
        {"label": pages.VANILLA, "steps_per_s": 120.0},
        {"label": pages.REGULARIZED, "steps_per_s": 49.0},
    ]
    lifted = [{"label": "sugar-ext", "lifting_s": 3.0, "views": 25, "query": {"ms": 50.0}}]
    found = verdicts(pages, report_with(fields=fields, splats=splats, splat_features=lifted))
    assert found["f3rm-ext: Triton ÷ tiny-cuda-nn, rays/s"] == (0.9, True)
    assert found[f"f3rm-ext, Triton ÷ {pages.F3RM_PEER}, rays/s"] == (None, None)
    assert found["sugar-ext, vanilla stage ÷ splatfacto, it/s"] == (1.2, True)
    assert found["sugar-ext, regularised ÷ splatfacto, it/s"] == (0.49, False)
    assert found["text query at 1080p, splats"] == (50.0, True)
    assert found["text query at 1080p, field"] == (700.0, False)
    assert found["features lifted from 25 views"] == (3.0, True)


def test_a_missing_figure_says_why(pages: ModuleType) -> None:
    fields = [field_row("f3rm-ext, triton", 900.0), {"label": "f3rm-ext, tcnn", "problem": "It is not installed."}]
    whys = {target.name: target.why for target in pages.targets(report_with(fields=fields))}
    assert whys["f3rm-ext: Triton ÷ tiny-cuda-nn, rays/s"] == "It is not installed."
    assert whys["features lifted"] == "the section splat-features was not asked for"
    assert whys["text query at 1080p, field"] == "no figure"


def test_a_rehearsal_meets_no_target(pages: ModuleType) -> None:
    lifted = [{"label": "sugar-ext", "lifting_s": 3.0, "query": {"ms": 1.0}}]
    report = report_with(splat_features=lifted) | {"rehearsal": True}
    assert {target.met for target in pages.targets(report)} == {None}
    assert "rehearsal" in pages.tables(report).splitlines()[0]


def test_tables_show_rows_and_problems(pages: ModuleType) -> None:
    fields = [
        field_row("nerfacto", 1234567.0, launches_per_step=1200.0, query={"ms": 1234.5}),
        {"label": "f3rm-ext, tcnn", "problem": "tiny-cuda-nn | is not installed."},
    ]
    report = report_with(fields=fields)
    cut = {"label": "tests/gpu", "passed": 3, "failed": 1, "skipped": 0, "seconds": 9.0, "failures": ["a.py::b"]}
    report["sections"]["tests"] = {"state": "done", "rows": [{**cut, "problem_of_all": "The tests were ended."}]}
    report["sections"]["splats"] = {"state": "failed", "problem": "KeyError: 'x'", "rows": [], "seconds": 0.0}
    text = pages.tables(report)
    assert "| nerfacto | 10 × 4096 | 1,234,567 | – | 20.12 | – | – | 1,200 | – | – | 1,234 |" in text
    assert "fields (done): f3rm-ext, tcnn: tiny-cuda-nn / is not installed." in text
    assert "splats (failed): KeyError: 'x'." in text
    assert "tests (done): tests/gpu: The tests were ended. tests/gpu: a.py::b failed." in text
    assert "torch 2" in text and "triton" not in text.splitlines()[0]
    for block in text.split("\n\n"):
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) < 2, block


TRAINING = {"step_ms": 1500.0, "step_ms_q1": 1400.0, "step_ms_q3": 1610.5, "steps_per_s": 0.667, "images_per_s": 26.0}
MEMORY = {"planned_mib": 17_140, "peak_mib": 17_483, "peak_to_plan": 1.02, "whole_planned_mib": 18_497}
SAID = "A batch of 8 does not fit: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_trainings_show_their_plan_and_what_did_not_fit(pages: ModuleType) -> None:
    full = {f"full_{name}": 2 * value for name, value in TRAINING.items()}
    poses = {"label": "sparse", "batch": 4, "images": 8, **TRAINING, **full, **MEMORY, "reserved_mib": None}
    poses |= {"synchronisations_per_step": 2, "stage_steps": 400_000, "stage_days": 6.94, "refused": [SAID]}
    moco = {"label": "low-vram", "architecture": "resnet50", "image_size": 224, "precision": "bfloat16", "batch": 64}
    moco |= {"accumulation": 4, "queue": 65_536, **TRAINING, **MEMORY, "reserved_mib": 19_000, "run_steps": 2325}
    moco |= {"run_hours": 0.969, "views_images_per_s": 85.2, "refused": []}
    text = pages.tables(report_with(poses=[poses], moco=[moco]))
    memory = "17,140 | 17,483 | 1.02 | 18,497"
    times = "1,500.0 (1,400.0–1,610.5)"
    assert (
        f"| sparse | 4 × 8 | 3,000.0 (2,800.0–3,221.0) | {times} | 0.67 | 26 | {memory} | – | 2 | 400,000 | 6.9 |"
    ) in text
    assert (
        f"| low-vram | resnet50, 224 px, bfloat16 | 64 × 4 | 65,536 | {times} | 0.67 | 26 | {memory} | 19,000 | – | "
        "2,325 | 0.97 | 85 |"
    ) in text
    assert f"poses (done): sparse: {SAID}" in text and "moco (done)" not in text


def test_trainings_are_asked_for_row_by_row(
    load: Callable[[str], ModuleType], pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_day = load("gpu_day")
    commands: list[list[str]] = []

    def result_of(command: list[object], *_: object) -> dict[str, Any]:
        commands.append(list(map(str, command)))
        return {"batch": 1}

    monkeypatch.setattr(gpu_day, "result_of", result_of)
    for more in ([], ["--rehearse"]):
        options = gpu_day.make_parser().parse_args(["--seconds", "5", *more])
        day, sections = pages.Day({}, tmp_path / "report.json", 600.0), gpu_day.GpuDay(options, tmp_path)
        for name in ("poses", "moco"):
            assert day.run(name, 300.0, functools.partial(gpu_day.call, sections, name))["state"] == "done"
    labels = [command[command.index("--one") + 1] for command in commands]
    assert labels == 2 * ["sparse", "dense-head", "dense-all", "low-vram", "optimized-16gb", "batch-80", "batch-128"]
    real, rehearsed = commands[:7], commands[7:]
    assert all("cuda" in command and "--tiny" not in command for command in real)
    assert all("cpu" in command and "--tiny" in command for command in rehearsed)
    for command in commands:  # the programs understand it
        program = load(Path(command[1]).stem)
        assert program.make_parser().parse_args(command[2:]).seconds == 5.0


def test_other_sections_of_the_same_machine_are_kept(load: Callable[[str], ModuleType]) -> None:
    now = {"rehearsal": False, "machine": {"device": "a GPU"}, "versions": {"torch": "2"}}
    before = {**now, "sections": {"fields": {"rows": [1]}, "poses": {"rows": [2]}}}
    kept_sections = load("gpu_day").kept_sections
    assert kept_sections(before, now, ["poses", "moco"]) == {"fields": {"rows": [1]}}
    assert kept_sections(before | {"machine": {"device": "another"}}, now, ["poses"]) == {}
    assert kept_sections(before | {"versions": {"torch": "1"}}, now, ["poses"]) == {}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_a_budget_and_a_table(pages: ModuleType, name: str) -> None:
    assert name in pages.BUDGETS_S and name in pages.SHOWN
    assert len(pages.BUDGETS_S) == len(pages.SHOWN) == len(SECTIONS)


def test_the_budgets_of_a_call_fit_into_ten_minutes(pages: ModuleType) -> None:
    assert sorted(name for call in pages.CALLS.values() for name in call) == sorted(SECTIONS)
    assert all(sum(call.values()) <= 600 - 15 for call in pages.CALLS.values()), "start-up takes some, too"


def test_the_default_regularisation_is_measured(load: Callable[[str], ModuleType], pages: ModuleType) -> None:
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    variants = load("splat_speed").VARIANTS
    model: Any = make_splat_config("sugar-ext").pipeline.model
    assert pages.PLANAR in load("gpu_day").VARIANTS
    assert variants[pages.PLANAR]["regularization"] == model.regularization
    assert load("splat_speed").accounted_mib(pages.PLANAR, 1000, 10) > 0


def test_what_was_handed_over_stays_when_time_runs_out(load: Callable[[str], ModuleType]) -> None:
    processes = load("processes")
    code = "import threading; print('RESULT {\"speed\": 3}', flush=True); threading.Event().wait()"
    found = processes.attempt(lambda: processes.result_of([sys.executable, "-c", code], 1.0, os.environ))
    assert found == {"speed": 3, "problem_of_all": "It was ended after 1 s."}


def test_sections_are_kept_from_another_place(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that empties the folder of outputs at each call."""
    gpu_day = load("gpu_day")
    same = {"rehearsal": True, "machine": {"device": "a CPU"}, "versions": {}, "date": "", "capture": ""}
    monkeypatch.setattr(gpu_day, "describe", lambda options: dict(same))
    monkeypatch.setattr(gpu_day, "make_capture", lambda folder: folder)
    monkeypatch.setattr(gpu_day, "call", lambda sections, name, part: None)
    before = tmp_path / "carried.json"
    fields = {"state": "done", "rows": [], "seconds": 1.0}
    before.write_text(json.dumps({**same, "sections": {"fields": fields}}))
    new = tmp_path / "out" / "report.json"
    words = ["gpu_day.py", "--rehearse", "--call", "checks", "--keep", str(before), "--out", str(new)]
    monkeypatch.setattr(sys, "argv", words)
    gpu_day.main()
    found = json.loads(new.read_text())["sections"]
    assert found.pop("fields") == fields and list(found) == list(load("gpu_day_report").CALLS["checks"])


def test_the_page_says_not_measured_until_there_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = BENCHMARKS.parent / "docs"
    monkeypatch.syspath_prepend(docs)  # as where a script of docs/ is run
    spec = importlib.util.spec_from_file_location("make_benchmarks", docs / "make_benchmarks.py")
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    empty = "<!-- table: gpu_day -->\n\nold\n\n<!-- end -->"
    assert "Not measured" in page.fill(empty)
    (tmp_path / "gpu_day.json").write_text(json.dumps(report_with(fields=[field_row("nerfacto", 5.0)])))
    assert "| nerfacto | 10 × 4096 | 5 |" in page.fill(empty)


# --- counting --------------------------------------------------------------------------------------------------------


def test_reports_of_pytest(load: Callable[[str], ModuleType]) -> None:
    said = """
tests/gpu/a.py::one PASSED [ 10%]
tests/gpu/a.py::two[x y] FAILED [ 20%]
tests/gpu/a.py::three SKIPPED (no CUDA device) [ 30%]
[gw1] [ 40%] PASSED tests/gpu/b.py::four[--option]
[gw0] [ 50%] ERROR tests/gpu/b.py::five
tests/gpu/b.py::six
=== short test summary info ===
FAILED tests/gpu/a.py::two[x y] - AssertionError
"""
    found = load("gpu_day").read_tests(said)
    assert found == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests/gpu/a.py::two[x y]", "tests/gpu/b.py::five"],
    }


def test_backends_that_are_missing_say_so(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = load("gpu_day")
    monkeypatch.setattr(gpu_day, "is_there", lambda name: name != "tinycudann")
    found = gpu_day.backends("cuda")
    assert found["torch"] == "" and "tinycudann" in found["tcnn"]
    assert set(gpu_day.backends("cpu")) == {"numba", "torch"}


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


def test_a_watch_ends_a_run_in_time(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    step_watch = load("step_watch")
    clock = Clock()
    monkeypatch.setattr(step_watch.time, "perf_counter", clock)

    def step() -> None:
        clock.now += 0.5

    watch = step_watch.StepWatch(CPU, steps=90, warm_up=4, seconds=2.9)
    trainer = trainer_of(step)
    watch.attach(trainer)
    watch.run(trainer.train)
    found = watch.result()
    assert (found["steps"], found["timed_steps"], found["timed_s"]) == (10, 6, 3.0)
    assert found["it_per_s"] == 2.0 and found["step_ms"] == 500.0


def test_a_run_that_ends_by_itself_is_an_error(load: Callable[[str], ModuleType]) -> None:
    watch = load("step_watch").StepWatch(CPU, steps=100, warm_up=1)
    trainer = trainer_of(lambda: None)
    watch.attach(trainer)
    with pytest.raises(RuntimeError, match="after 100 of 100"):
        watch.run(trainer.train)


# --- processes and peers ---------------------------------------------------------------------------------------------


def test_a_process_hands_over_its_result(load: Callable[[str], ModuleType]) -> None:
    processes = load("processes")
    code = "print('noise'); print('RESULT {\"a\": 1}'); print('more noise')"
    assert processes.result_of([sys.executable, "-c", code], 60.0, os.environ) == {"a": 1}


def test_a_child_that_survives_does_not_keep_the_rest_waiting(load: Callable[[str], ModuleType]) -> None:
    # In a session of its own, as servers of tests are, it is not ended with its parent.
    program = "echo early; setsid sleep 20 & sleep 100"
    began = time.monotonic()
    code, said = load("processes").run(["bash", "-c", program], 0.5, os.environ)
    assert (code, said) == (124, "early\n") and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("code", "limit_s", "sentence"),
    [
        ("raise ValueError('no such thing')", 60.0, "ValueError: no such thing"),
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


@pytest.mark.parametrize("name", ["gpu_day", "processes", "step_watch", "collect_wheels", "build_kernels"])
def test_examples_in_docstrings(name: str, load: Callable[[str], ModuleType]) -> None:
    found = doctest.testmod(load(name))
    assert found.attempted and not found.failed
