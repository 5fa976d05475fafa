"""A capture of two photos, and a stand-in for the commands of the chain."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext import compat
from f3rm_ext.workflow import estimate, runner
from f3rm_ext.workflow.commands import Command, CommandError, Outcome
from f3rm_ext.workflow.options import ChainOptions

_NAMED = {"ns-train": (0, 2), "ns-eval": (0, 1)}


def make_capture(folder: Path, photos: Path) -> None:
    """Writes what `f3rm-ext sfm process` would, as far as the chain looks at it."""
    folder.mkdir(exist_ok=True)
    names = sorted(path.name for path in photos.iterdir())
    for name in names:
        (folder / name).write_bytes((photos / name).read_bytes())
    (folder / "transforms.json").write_text(json.dumps({"frames": [{"file_path": name} for name in names]}))
    (folder / "sparse_pc.ply").write_bytes(b"points")


class Player:
    """Stands in for run_command: writes what the commands would write, and remembers them."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.places: list[Path] = []
        """Working directories of the commands."""
        self.fails: dict[str, BaseException] = {}
        """What ends the command of a stage, by its title, after a training has saved a checkpoint."""
        self.says: dict[str, list[str]] = {}
        """Lines of the commands, by title."""
        self.device_type = "cuda"
        self.notes: list[str] = []
        """On what stages will do without."""
        self.estimates: list[list[str]] = []
        """Commands that were to tell how long the trainings take."""

    def __call__(self, command: Command, folder: Path, console: Console) -> Outcome:
        words = [str(word) for word in command.arguments]
        self.ran.append(words)
        self.places.append(folder)
        for line in self.says.get(command.name, []):
            command.on_line(line)
        failure = self.fails.pop(command.name, None)
        if words[0] == "ns-train":
            self._train(words, whole=failure is None)
        if failure is not None:
            raise failure
        if words[1:3] == ["sfm", "process"]:
            make_capture(Path(words[words.index("--output") + 1]), Path(words[words.index("--images") + 1]))
        for option in ("--out", "--output-path"):
            if option in words:
                path = Path(words[words.index(option) + 1])
                path.write_text(json.dumps({"results": {}, "of": words}))
        return Outcome(1.0, 1.0, False, 100.0)

    def estimate(self, command: Command, folder: Path, console: Console) -> Outcome:
        """Stands in for a few steps: 3000 take 600 s."""
        self.estimates.append([str(word) for word in command.arguments])
        if failure := self.fails.pop(command.name, None):
            raise failure
        command.on_line("Steps: 3000, seconds: 600.0")
        return Outcome(1.0, 1.0, False, 100.0)

    def _train(self, words: list[str], whole: bool) -> None:
        def value(name: str) -> str:
            return words[words.index(name) + 1]

        run = Path(value("--output-dir"), value("--experiment-name"), words[1], value("--timestamp"))
        (run / "nerfstudio_models").mkdir(parents=True, exist_ok=True)
        (run / "config.yml").write_text("config")
        decided = [word for word in words[1:] if "/" not in word]
        (run / "nerfstudio_models" / f"step-{99 if whole else 49:09d}.ckpt").write_text(" ".join(decided))

    def names(self) -> list[str]:
        """What ran, by the distinctive words of the commands."""
        return [
            " ".join(words[slice(*_NAMED.get(words[0], (1, 3 if words[1] in ("export", "eval") else 2)))])
            for words in self.ran
        ]

    def forget(self) -> None:
        """Begins a new list."""
        self.ran.clear()


@pytest.fixture
def player(monkeypatch: pytest.MonkeyPatch) -> Player:
    player = Player()
    monkeypatch.setattr(runner, "run_command", player)
    monkeypatch.setattr(estimate, "run_command", player.estimate)
    monkeypatch.setattr(runner, "check_requirements", lambda *_, **__: player.notes)
    monkeypatch.setattr(compat, "default_device_type", lambda: player.device_type)
    monkeypatch.setattr(runner, "write_report", lambda *_: "<html>")
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
    """Runs the chain with options; gives what it said."""

    def run(**options: Any) -> str:
        console = Console(file=io.StringIO(), width=200)
        given = ChainOptions(**{"data": capture, "output": tmp_path / "out", **options})
        runner.ChainRun(given, console).run()
        return console.file.getvalue()  # type: ignore[attr-defined]

    return run


@pytest.fixture
def failure() -> Callable[[str], CommandError]:
    return CommandError
