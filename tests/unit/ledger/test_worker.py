"""What a worker changes about a run, and what is taken from runs that are finished."""

import copy
import time
from dataclasses import replace as replaced
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.engine.trainer import TrainerConfig

from f3rm_ext.engine import cost
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.ledger import stopwatch
from f3rm_ext.ledger.conditions import commit, config_digest, hardware, versions
from f3rm_ext.ledger.entry import anomalies
from f3rm_ext.ledger.runs import training_figures
from f3rm_ext.ledger.stopwatch import Stopwatch
from f3rm_ext.ledger.worker import (
    EvalJob,
    TrainJob,
    _ViewEvaluator,
    evaluate,
    first_step,
    recorded_first_step,
    set_window,
)
from f3rm_ext.method_configs.nerf import f3rm_ext_lite
from f3rm_ext.profiling.device import DeviceMemory, DeviceSampler

JOB = TrainJob(["f3rm-ext-lite"], "out", steps=100, warm_up=10, seed_offset=2)


@pytest.fixture
def config() -> F3rmTrainerConfig:
    made = copy.deepcopy(f3rm_ext_lite.config)
    assert isinstance(made, F3rmTrainerConfig)
    made.max_num_iterations = 30_000
    return made


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:09d}.ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_a_window_keeps_the_schedule_of_the_whole_run(config: F3rmTrainerConfig, tmp_path: Path) -> None:
    config.load_checkpoint = checkpoint(tmp_path, 2999)
    assert set_window(config, replaced(JOB, steps=1000)) == 1000
    assert (config.max_num_iterations, config.schedule_steps) == (4000, 30_000)
    assert config.machine.seed == f3rm_ext_lite.config.machine.seed + 2


def test_nerfstudios_own_methods_count_from_where_they_start(tmp_path: Path) -> None:
    config = TrainerConfig(load_dir=tmp_path)
    checkpoint(tmp_path, 1999)
    checkpoint(tmp_path, 2999)
    assert set_window(config, JOB) == 100 and config.max_num_iterations == 100
    assert first_step(config) == 3000
    checkpoint(tmp_path / "run" / config.relative_model_dir, 999)
    config.load_dir = tmp_path / "run"
    assert first_step(config) == 1000, "ns-train takes the run folder, too"


def test_a_finished_run_began_where_its_config_says(config: F3rmTrainerConfig, tmp_path: Path) -> None:
    assert recorded_first_step(config) == 0
    config.load_dir, config.load_step = tmp_path / "gone", 999
    assert recorded_first_step(config) == 1000
    config.load_step = None
    assert recorded_first_step(config) is None, "the newest checkpoint of that time is not known"
    config.load_checkpoint = tmp_path / "step-000000009.ckpt"
    assert recorded_first_step(config) == 10


def test_a_config_that_names_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark, config = tmp_path / "mark", tmp_path / "config.yml"
    checkpoint(tmp_path / "nerfstudio_models", 1)
    config.write_text(f"!!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises((ConfigError, CheckpointError)):
        evaluate(EvalJob(str(config), str(tmp_path), train_views=1))
    assert not mark.exists()


def test_the_rest_of_a_run_is_the_default(config: F3rmTrainerConfig) -> None:
    config.max_num_iterations = 70
    assert set_window(config, replaced(JOB, steps=0)) == 70


def test_windows_that_cannot_be_measured(config: F3rmTrainerConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"30001, .*30000.*--steps"):
        set_window(config, replaced(JOB, steps=30_001))
    with pytest.raises(ConfigError, match=r"11.*10.*--warm-up"):
        set_window(config, replaced(JOB, steps=11))
    assert set_window(copy.deepcopy(config), replaced(JOB, eval_step=100)) == 100
    with pytest.raises(ConfigError, match="--eval-step is 101"):
        set_window(copy.deepcopy(config), replaced(JOB, eval_step=101))
    config.load_checkpoint = tmp_path / "step-000000009.ckpt"
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        set_window(config, JOB)
    config.load_checkpoint, config.load_dir = None, tmp_path
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        set_window(config, JOB)
    config.machine.num_devices = 2
    with pytest.raises(ConfigError, match=r"--machine.num-devices"):
        set_window(config, JOB)
    config.load_config = tmp_path
    with pytest.raises(ConfigError, match="--load-config"):
        set_window(config, JOB)


def test_the_hash_of_a_configuration_is_of_what_is_computed(config: F3rmTrainerConfig, tmp_path: Path) -> None:
    digest = config_digest(config)
    config.output_dir, config.timestamp, config.data, config.vis = tmp_path, "now", tmp_path, "tensorboard"
    config.machine.seed, config.pipeline.datamanager.data = 7, tmp_path
    assert config_digest(config) == digest
    config.pipeline.model.num_samples += 1  # type: ignore[attr-defined]
    assert config_digest(config) != digest and config.machine.seed == 7


class Trainer:
    """Stands for nerfstudio's: a growing cost in callbacks, and steps that take their time."""

    def __init__(self, clock: "Clock", step_s: float, callback_s: float) -> None:
        from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

        self._start_step = 3000
        self.rays = 0
        manager = SimpleNamespace(get_train_rays_per_batch=lambda: self.rays)
        self.pipeline = SimpleNamespace(device=torch.device("cpu"), datamanager=manager)
        self.saved: list[int] = []
        self.clock, self.step_s = clock, step_s
        after = TrainingCallbackLocation.AFTER_TRAIN_ITERATION
        self.callbacks = [
            TrainingCallback([after], lambda step: clock.advance(10_000.0 if step == 3109 else callback_s))
        ]

    def train_iteration(self, step: int) -> tuple[torch.Tensor, dict, dict]:
        self.clock.advance(self.step_s if step >= 3010 else 100.0)
        self.rays = 1000 if step < 3010 else 8 if step < 3043 else 32
        return torch.tensor(float(step)), {}, {}

    def save_checkpoint(self, step: int) -> None:
        self.clock.advance(1000.0)
        self.saved.append(step)

    def train(self, steps: int) -> None:
        from nerfstudio.engine.callbacks import TrainingCallbackLocation as Location

        for step in range(self._start_step, self._start_step + steps):
            for callback in self.callbacks:
                callback.run_callback_at_location(step, Location.BEFORE_TRAIN_ITERATION)
            self.train_iteration(step)
            for callback in self.callbacks:
                callback.run_callback_at_location(step, Location.AFTER_TRAIN_ITERATION)


class Clock:
    """A clock that is set by hand; the wall clock goes backwards meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "time", lambda: -self.now_s)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def timed(monkeypatch: pytest.MonkeyPatch, steps: int = 110, **options: Any) -> tuple[Trainer, Stopwatch]:
    """A training whose window has 110 steps, of which so many are made."""
    trainer, watch = Trainer(Clock(monkeypatch), step_s=0.3, callback_s=0.2), Stopwatch(10, **options)
    watch.attach(trainer, 110)
    trainer.train(steps)
    return trainer, watch


def test_warm_up_is_excluded_and_callbacks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    _, watch = timed(monkeypatch, report=lambda *counts: seen.append(counts))
    figures = watch.figures()
    assert figures["it_per_s"] == pytest.approx(2.0)
    assert (watch.first_step, watch.last_step) == (3000, 3110)
    assert figures["loss"] == pytest.approx(sum(range(3060, 3110)) / 50), "the mean of the last 50 steps"
    assert figures["train_peak_mib"] > 1 and "device_mib" not in figures
    assert seen[-1] == (110, 110)


def test_what_follows_the_last_step_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run cleans splats and lifts features in the callbacks of its last step, here for 10,000 s."""
    monkeypatch.setattr(cost, "peak_mib", lambda device: time.perf_counter())
    _, watch = timed(monkeypatch)
    assert 0.0 < watch.figures()["train_peak_mib"] < 10_000.0
    assert watch.figures()["it_per_s"] == pytest.approx(2.0)


def test_rays_are_those_of_the_steps_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splats begin with small images: 33 steps of 8 pixels, then 66 of 32."""
    _, watch = timed(monkeypatch)
    assert watch.figures()["rays_per_s"] == pytest.approx(2.0 * 24)


def test_a_checkpoint_within_the_window_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, watch = timed(monkeypatch, save_after=3050)
    assert trainer.saved == [3049]
    assert watch.figures()["it_per_s"] == pytest.approx(2.0)


def test_memory_of_the_whole_gpu_and_what_moved_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of the pretended GPU of 16 GiB moves to main memory what torch holds above that."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 17 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * gib))
    watch = Stopwatch(10)
    watch.device = torch.device("cuda")

    def figures(spills: bool, *, nvml: bool = True) -> dict[str, float]:
        watch._sampler = DeviceSampler(lambda: DeviceMemory(15 * gib, 16 * gib), period_s=60.0) if nvml else None
        watch._spilled = 0.0
        monkeypatch.setattr(stopwatch, "drivers_spill", lambda: spills)
        watch._update_spill()
        return watch.figures()

    found = figures(True)
    assert (found["device_peak_mib"], found["spilled_mib"]) == (15 * 1024, 2 * 1024)
    assert any("2048 MiB" in phrase for phrase in anomalies(found))
    assert any("90 %" in phrase for phrase in anomalies(found))
    assert figures(False)["spilled_mib"] == 0
    assert "spilled_mib" not in figures(True, nvml=False), "it cannot be seen"
    assert "device_peak_mib" not in figures(True, nvml=False)


def test_a_window_that_was_not_finished_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch = timed(monkeypatch, steps=50)
    assert "it_per_s" not in watch.figures()


def test_figures_of_views_are_means_and_those_of_training_are_kept_apart() -> None:
    photo, rendering = torch.tensor([[0.0, 1.0], [0.5, 0.75]])[..., None], torch.full((2, 2, 1), 0.25)
    given = {  # l1 of the model, if it has one; else of the photo beside the rendering
        0: ({"psnr": 20.0, "l1": 0.5, "train_steps": 7.0, "eval_s": 1.0}, {"img": torch.zeros(2, 4, 1)}),
        1: ({"psnr": 25.0}, {"img": torch.cat([photo, rendering], dim=1)}),
    }
    model = SimpleNamespace(
        device=torch.device("cpu"),
        get_outputs_for_camera=lambda camera: camera,
        get_image_metrics_and_images=lambda camera, batch: given[camera],
    )
    evaluator = _ViewEvaluator(model)
    found = evaluator.mean_metrics([(0, {}), (1, {})])
    assert found == pytest.approx({"psnr": 22.5, "l1": (0.5 + (0.25 + 0.75 + 0.25 + 0.5) / 4) / 2})
    assert evaluator.cost == {"train_steps": 7.0} and evaluator.peak_mib > 1


def test_figures_of_a_finished_run_are_those_that_it_recorded() -> None:
    assert training_figures({}, {}) == {}
    assert training_figures({"train_it_per_s": 0.0, "train_peak_memory_mib": 0.0}, {}) == {}, "0: not measured"
    curves = {
        "Train Iter (time)": [(0.0, 9.0), (10.0, 0.5), (20.0, 0.25)],
        "Train Rays / Sec": [(10.0, 100.0), (20.0, 300.0)],
        "Train Loss": [(float(step), float(step)) for step in range(10)],
    }
    assert training_figures({}, curves) == {"it_per_s": 2.0, "rays_per_s": 200.0, "loss": 7.0}
    ours = {"train_it_per_s": 3.0, "train_peak_memory_mib": 500.0}
    assert training_figures(ours, curves) == {
        "it_per_s": 3.0,
        "train_peak_mib": 500.0,
        "rays_per_s": 200.0,
        "loss": 7.0,
    }


def test_machine_and_versions() -> None:
    assert hardware("cpu").endswith(" cores") and hardware("cpu") == hardware("cpu")
    assert {"python", "torch", "nerfstudio"} <= versions().keys()
    assert commit().keys() in ({"commit", "changed"}, set())
