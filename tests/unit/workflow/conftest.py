"""A capture of two photos, and a stand-in for the commands of the workflows."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext import compat
from f3rm_ext.html.content import ReportContent
from f3rm_ext.workflow import chain, demo, runner
from f3rm_ext.workflow.commands import Command, Outcome
from f3rm_ext.workflow.options import ChainOptions

_NAMES = {"ns-train": (0, 2), "ns-eval": (0, 1)}
_OF_TWO = ("export", "eval", "scene", "features", "splats")


def make_capture(folder: Path, photos: Path) -> None:
    """Writes what `f3rm-ext sfm process` would, as far as workflows look at it."""
    folder.mkdir(exist_ok=True)
    files = [photos] if photos.is_file() else [path for path in photos.iterdir() if path.is_file()]
    names = sorted(path.name for path in files)
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "transforms.json").write_text(json.dumps({"frames": [{"file_path": name} for name in names]}))
    (folder / "sparse_pc.ply").write_bytes(b"points")


class Player:
    """Stands in for run_command: writes what the commands would write, and remembers them."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.all: list[list[str]] = []
        """The same of all calls."""
        self.folders: list[Path] = []
        """Working directories of the commands."""
        self.limits_s: list[float] = []
        """Time limits of the trainings."""
        self.failures: dict[str, BaseException] = {}
        """What ends the command of a stage, by its title, after a training has saved a checkpoint."""
        self.notes: dict[str, list[str]] = {}
        """Notes of the commands, by title."""
        self.reach: int | None = None
        """Steps after which a training is stopped by its time limit."""
        self.eval_images = 3
        """Photos that trainings hold out."""
        self.device_type = "cuda"
        self.shortages: list[str] = []
        """What stages will do without."""
        self.estimates: list[list[str]] = []
        """Commands that estimate how long trainings take."""
        self.timing: dict[str, Any] = {"steps": 3000, "seconds": 600.0}
        """What such a command tells."""
        self.measured: dict[str, Any] = {}

    def __call__(self, command: Command, folder: Path, console: Console) -> Outcome:
        words = [str(word) for word in command.arguments]
        outcome = Outcome(1.0, 1.0, False, 100.0, self.notes.get(command.title, []))
        failure = self.failures.pop(command.title, None)
        if "f3rm_ext.planning.throughput" in words:
            self.estimates.append(words)
            outcome.result = {"eval_images": self.eval_images, **self.timing}
        else:
            self.ran.append(words)
            self.all.append(words)
            self.folders.append(folder)
        if words[0] == "ns-train":
            self.limits_s.append(command.limit_s)
            steps = int(words[words.index("--max-num-iterations") + 1]) if "--max-num-iterations" in words else 100
            reach = steps if failure is None else steps // 2
            self._train(words, reach if self.reach is None else self.reach)
            outcome.result = {"eval_images": self.eval_images}
            if self.reach is not None:
                outcome.working_s, outcome.stopped_by_limit = command.limit_s + 1, True
        if failure is not None:
            raise failure
        if words[1:3] == ["sfm", "process"]:
            make_capture(Path(words[words.index("--output") + 1]), Path(words[words.index("--images") + 1]))
        if words[1:3] == ["scene", "synth"]:
            make_capture(Path(words[3]), Path(words[3]))
            Path(words[3], "scene.json").write_text(" ".join(words[4:]))
        if words[1:3] == ["splats", "clean"]:
            given, out = (Path(words[words.index(option) + 1]) for option in ("--load-config", "--out"))
            shutil.copytree(given.parent, out, dirs_exist_ok=True)
            return outcome
        for option in ("--out", "--output-path"):
            if option in words:
                path = Path(words[words.index(option) + 1])
                if "f3rm_ext.workflow.measure" in words:
                    path.mkdir(exist_ok=True)
                    (path / "measure.json").write_text(json.dumps(self.measured))
                else:
                    path.write_text(json.dumps({"results": {"psnr": 20.0, "ssim": 0.5, "l1": 0.1}, "of": words}))
        return outcome

    def _train(self, words: list[str], steps: int) -> None:
        def value(name: str) -> str:
            return words[words.index(name) + 1]

        run = Path(value("--output-dir"), value("--experiment-name"), words[1], value("--timestamp"))
        (run / "nerfstudio_models").mkdir(parents=True, exist_ok=True)
        (run / "config.yml").write_text("config")
        if not steps:
            return
        decided = [word for word in words[1:] if "/" not in word]
        (run / "nerfstudio_models" / f"step-{steps - 1:09d}.ckpt").write_text(" ".join(decided))

    def names(self) -> list[str]:
        """What ran, by the distinctive words of the commands."""
        return [
            " ".join(words[slice(*_NAMES.get(words[0], (1, 3 if words[1] in _OF_TWO else 2)))]) for words in self.ran
        ]

    def forget(self) -> None:
        """Begins new lists."""
        self.ran, self.limits_s = [], []


@pytest.fixture
def player(monkeypatch: pytest.MonkeyPatch, make_content: Callable[..., ReportContent]) -> Player:
    player = Player()
    player.measured = make_content().measured
    for module in (runner, chain):
        monkeypatch.setattr(module, "run_command", player)
    for module in (demo, chain):
        monkeypatch.setattr(module, "check_requirements", lambda *_, **__: player.shortages)
    monkeypatch.setattr(compat, "default_device_type", lambda: player.device_type)
    monkeypatch.setattr(chain, "write_page", lambda *_: "<html>")
    return player


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    folder = tmp_path / "room"
    folder.mkdir()
    frames = []
    for number in range(2):
        (folder / f"{number}.png").write_bytes(b"photo" * (number + 1))
        frames.append({"file_path": f"{number}.png"})
    (folder / "transforms.json").write_text(json.dumps({"frames": frames}))
    (folder / "gt_mesh.npz").write_bytes(b"truth")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of three photos without poses."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(b"photo" * (number + 1))
    return folder


@pytest.fixture
def run_chain(player: Player, capture: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the chain with options; gives what it said. The list of commands begins anew."""

    def run(**options: Any) -> str:
        player.forget()
        console = Console(file=io.StringIO(), width=200)
        given = ChainOptions(**{"data": capture, "output": tmp_path / "out", **options})
        chain.ChainRun(given, console).run()
        return console.file.getvalue()  # type: ignore[attr-defined]

    return run
