"""Bad input, as the command a user types: one sentence, exit code 2, nothing lost, no run folder where nothing ran."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="runs commands in forks of one process, to import only once"),
]


SMALL_TABLES = [
    word
    for grid in ("grid", "feature-grid", "proposals.0.grid")
    for word in (f"--pipeline.model.{grid}.log2-hashmap-size", 13)
]
"""The optimiser's pass over tables of the usual size takes most of a step of few rays."""


class Shell:
    """Runs commands in the folder of a test."""

    def __init__(self, server: Any, folder: Path) -> None:
        self._server, self.folder = server, folder
        self.cache = folder / "cache"

    def start(self, *argv: object) -> int:
        """Starts a command and returns its process id."""
        return self._server.start(*argv, folder=self.folder)

    def finish(self) -> Any:
        """Waits for the command that was started last."""
        return self._server.finish(200)

    def run(self, *argv: object) -> Any:
        self.start(*argv)
        return self.finish()

    def train_line(self, *options: object, dataparser: tuple = (), steps: int = 2) -> tuple[object, ...]:
        return (
            *("ns-train", "f3rm-ext-lite", "--data", "capture", "--vis", "tensorboard"),
            *("--max-num-iterations", steps, "--pipeline.datamanager.train-num-rays-per-batch", 64),
            *("--pipeline.datamanager.features.cache-dir", self.cache, "--machine.device-type", "cpu"),
            *SMALL_TABLES,
            *options,
            *dataparser,
        )

    def train(self, *options: object, dataparser: tuple = (), steps: int = 2) -> Any:
        return self.run(*self.train_line(*options, dataparser=dataparser, steps=steps))

    def trained_nothing(self) -> bool:
        return not list(self.folder.glob("outputs/**/*.ckpt"))


@pytest.fixture
def shell(command_server: Any, tmp_path: Path) -> Shell:
    return Shell(command_server, tmp_path)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Six views of noise, 48x36, on a circle."""
    folder = tmp_path / "capture"
    (folder / "images").mkdir(parents=True)
    frames = []
    for index in range(6):
        name = f"images/{index:02d}.png"
        pixels = np.random.default_rng(index).integers(0, 255, (36, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        angle = index / 6 * 2 * np.pi
        pose = np.eye(4)
        pose[:3, 0] = [-np.sin(angle), np.cos(angle), 0]
        pose[:3, 1] = [0, 0, 1]
        pose[:3, 2] = [np.cos(angle), np.sin(angle), 0]
        pose[:3, 3] = pose[:3, 2] * 2
        frames.append({"file_path": name, "transform_matrix": pose.tolist()})
    write_meta(folder, frames)
    return folder


def write_meta(folder: Path, frames: list[dict]) -> None:
    meta = {"fl_x": 50.0, "fl_y": 50.0, "cx": 24.0, "cy": 18.0, "w": 48, "h": 36, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(meta))


def frames_of(folder: Path) -> list[dict]:
    return json.loads((folder / "transforms.json").read_text())["frames"]


class TestCapture:
    def test_no_capture_there(self, shell: Shell) -> None:
        shell.train().refuses("capture")
        assert shell.trained_nothing()

    def test_missing_image_and_going_on_without(self, shell: Shell, capture: Path) -> None:
        (capture / "images" / "03.png").unlink()
        shell.train().refuses(r"images/03\.png.*--drop-missing-frames")
        assert shell.trained_nothing()
        shell.train(dataparser=("f3rm-ext-data", "--drop-missing-frames", "True")).succeeds()


class TestOptions:
    def test_unknown_extractor(self, shell: Shell, capture: Path) -> None:
        shell.train("--pipeline.datamanager.features.extractors", "dense-dasy").refuses(r"dense-dasy.*dense-daisy")

    def test_device_that_is_not_there(self, shell: Shell, capture: Path) -> None:
        import torch

        if torch.backends.mps.is_available():
            pytest.skip("this machine has an Apple GPU")
        shell.train("--machine.device-type", "mps").refuses(r"mps.*--machine\.device-type cpu")
        assert not (shell.folder / "outputs").exists()

    def test_nothing_to_resume_from(self, shell: Shell, capture: Path) -> None:
        shell.train("--load-dir", "nowhere").refuses(r"nowhere.*does not exist")
        assert not (shell.folder / "outputs").exists()


class TestRun:
    @pytest.fixture
    def run(self, shell: Shell, capture: Path) -> Path:
        shell.train("--timestamp", "first", "--steps-per-save", 2, steps=4).succeeds()
        return shell.folder / "outputs" / "capture" / "f3rm-ext-lite" / "first"

    def test_truncated_shard_and_damaged_checkpoints(self, shell: Shell, run: Path) -> None:
        shard = max(shell.cache.rglob("*.npy"), key=lambda path: path.stat().st_size)
        content = shard.read_bytes()
        shard.write_bytes(content[: len(content) // 2])
        verified = shell.run("f3rm-ext", "features", "verify", "--cache-dir", shell.cache)
        assert verified.code == 2 and shard.stem[:8] in verified.text, verified.text

        checkpoints = sorted((run / "nerfstudio_models").iterdir())
        for path in checkpoints:
            os.truncate(path, 1000)
        shell.run("ns-eval", "--load-config", run / "config.yml").refuses(r"Every checkpoint in .* is damaged")
        shell.train("--load-dir", run).refuses(r"Every checkpoint in .* is damaged")
        assert sorted((run / "nerfstudio_models").iterdir()) == checkpoints

    def test_interrupt_then_go_on(self, shell: Shell, run: Path) -> None:
        options = ("--timestamp", "second", "--load-dir", run, "--steps-per-save", 2)
        process = shell.start(*shell.train_line(*options, steps=100_000))
        folder = run.parent / "second" / "nerfstudio_models"
        until = time.monotonic() + 200
        while not list(folder.glob("*.ckpt")) and time.monotonic() < until:
            time.sleep(0.05)  # a file cannot be awaited
        os.kill(process, signal.SIGINT)
        result = shell.finish()
        assert result.code == 130, result.stderr[-3000:]
        assert "Traceback" not in result.text
        assert "continue with: ns-train f3rm-ext-lite --load-dir" in result.stderr
        assert f"Saved up to step {max(int(path.stem[5:]) for path in folder.iterdir())};" in result.stderr


def test_installed_scripts_do_the_same(capture: Path, run_command: Any) -> None:
    """One of the above through the real script, so that the stand-in for it above proves something."""
    words = ("ns-train", "f3rm-ext-lite", "--data", capture, "--load-dir", "nowhere", "--machine.device-type", "cpu")
    run_command(*words, fresh=True).refuses(r"nowhere.*does not exist")
