"""Speeds come from the ledger where it has them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nerfstudio.engine.callbacks import TrainingCallback

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.ledger.conditions import hardware
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.planning import throughput
from f3rm_ext.planning.question import parse
from f3rm_ext.planning.request import ImageSizes
from f3rm_ext.planning.throughput import Throughput, probe, read_throughput, stage_starts


def test_a_real_ledger_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = parse("f3rm-ext-lite", ["--machine.device-type", "cpu"])
    sizes = ImageSizes.from_assumption(config)
    assert read_throughput(config, sizes) is None
    book = Ledger()
    for name, method, where, rays, speeds in (
        ("here", "f3rm-ext-lite", hardware("cpu"), 1024, (2.0, 4.0, 5.0)),
        ("other-batch", "f3rm-ext-lite", hardware("cpu"), 2048, (90.0,)),
        ("elsewhere", "f3rm-ext-lite", "another machine", 1024, (90.0,)),
        ("other-method", "nerfacto", hardware("cpu"), 1024, (90.0,)),
    ):
        book.add(name, method, conditions={"hardware": where})
        for speed in speeds:
            book.add_repeat(name, {"it_per_s": speed, "rays_per_step": rays}, session="s")
    found = read_throughput(config, sizes)
    assert found == Throughput(4.0, "the median of 3 trainings in the ledger (here)")
    assert Throughput(4.0, "").duration_s(8) == 2
    splats = parse("sugar-ext", [])
    book.add("splats", "sugar-ext", conditions={"hardware": hardware(splats.machine.device_type)})
    book.add_repeat("splats", {"it_per_s": 3.0, "rays_per_step": 200}, session="s")
    assert read_throughput(splats, ImageSizes.from_numbers(splats, 9, 20, 10)) is not None
    assert read_throughput(splats, ImageSizes.from_numbers(splats, 9, 20, 20)) is None
    mixed = ImageSizes(np.array([10, 40]), np.array([20, 50]), 0)
    assert read_throughput(splats, mixed) is not None, "a run tells the pixels of its first photo"


def test_a_window_of_splats_tells_no_speed_of_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps get slower while Gaussians are added; those of fields are all alike."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    book = Ledger()
    for method in ("sugar-ext", "f3rm-ext-lite"):
        device = hardware(parse(method, []).machine.device_type)
        for name, first, last, speed in (("start", 0, 1000, 90.0), ("end", 14_000, 15_000, 1.0)):
            conditions = {"hardware": device, "first_step": first, "last_step": last}
            book.add(f"{method}-{name}", method, conditions=conditions, origin={"schedule_steps": 15_000})
            book.add_repeat(f"{method}-{name}", {"it_per_s": speed, "rays_per_step": 1024}, session="s")
    splats, fields = parse("sugar-ext", []), parse("f3rm-ext-lite", [])
    sizes = ImageSizes.from_numbers(splats, 9, 32, 32)
    assert read_throughput(splats, sizes) is None and read_throughput(fields, sizes) is not None
    conditions = {"hardware": hardware(splats.machine.device_type), "first_step": 0, "last_step": 15_000}
    book.add("whole", "sugar-ext", conditions=conditions, origin={"schedule_steps": 15_000})
    book.add_repeat("whole", {"it_per_s": 3.0, "rays_per_step": 1024}, session="s")
    found = read_throughput(splats, sizes)
    assert found is not None and found.steps_per_s == 3.0


def test_a_ledger_that_cannot_be_read_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    Ledger().add("here", "f3rm-ext-lite")
    Ledger().path.write_bytes(b"not a database" * 1000)
    config = parse("f3rm-ext-lite", ["--machine.device-type", "cpu"])
    assert read_throughput(config, ImageSizes.from_assumption(config)) is None
    assert str(Ledger().path) in capsys.readouterr().err


def test_several_devices_are_unknown() -> None:
    config = parse("f3rm-ext-lite", ["--machine.num-devices", "2"])
    assert read_throughput(config, ImageSizes.from_assumption(config)) is None
    with pytest.raises(ConfigError, match="one device"):
        probe(config)


class SteppingTrainer:
    """Trains without work: a step takes 0.1 s before step 3000, and 0.4 s from there on."""

    device = "cpu"

    def __init__(self) -> None:
        self.callbacks: list[TrainingCallback] = []
        self.pipeline = SimpleNamespace(datamanager=SimpleNamespace(close=lambda: None, small_start=(0, 1)))
        self.clock_s, self._start_step = 0.0, 0

    def setup(self) -> None:
        """Has nothing to set up."""

    def train(self) -> None:
        for step in range(self._start_step, 5000):
            self.clock_s += 0.1 if step < 3000 else 0.4
            for callback in self.callbacks:
                callback.run_callback(step)


def test_a_probe_weighs_each_stage_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SteppingTrainer()
    monkeypatch.setattr(throughput, "device_time", lambda device: trainer.clock_s)
    monkeypatch.setattr(F3rmTrainerConfig, "setup", lambda config: trainer)
    config = parse("sugar-ext", ["--regularization", "none", "--max-num-iterations", "5000"])
    assert probe(config, 4).duration_s(5000) == pytest.approx(3000 * 0.1 + 2000 * 0.4)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("f3rm-ext-lite", ("--max-num-iterations", "300"), [0]),
        ("sugar-ext", ("--regularization", "none"), [0, 3000, 6000]),
        ("sugar-ext", ("--regularization", "none", "--max-num-iterations", "5000"), [0, 3000]),
        ("sugar-ext", ("--regularization", "sdf", "--max-num-iterations", "15000"), [0, 3000, 6000, 7000, 9000]),
        ("sugar-ext", ("--regularization", "planar", "--max-num-iterations", "15000"), [0, 2500, 3000, 6000]),
    ],
)
def test_steps_change_with_stages_and_image_sizes(method: str, options: tuple[str, ...], expected: list[int]) -> None:
    assert stage_starts(parse(method, list(options))) == expected


def test_a_small_start_has_stages_of_its_own() -> None:
    """Sides are halved four times at first, and twice before step 3000."""
    config = parse("sugar-ext", ["--regularization", "none", "--max-num-iterations", "5000"])
    assert stage_starts(config, (4, 200)) == [0, 200, 400, 3000]
    assert stage_starts(config, (3, 2000)) == [0, 2000, 4000]
