"""A stage: one command that a user could type, what its result depends on, and what it writes."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.engine.checkpoint import folder_of, newest_first
from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.photos import find_photos
from f3rm_ext.utils.atomic_files import hash_bytes, hash_file
from f3rm_ext.workflow.manifest import Record
from f3rm_ext.workflow.options import StageOptions, Words, option_words

POSES = "Camera poses"
SCORES, PICTURES = "scores.json", "pictures"
_TRAINING = ("--vis", "tensorboard", "--logging.local-writer.max-log-size", "0")
"""Options of all trainings. Without a limit of lines, nerfstudio moves no cursor, which would garble the log."""


@dataclass(frozen=True)
class Stage:
    """A stage, ready to be run."""

    name: str
    title: str
    """Title of the stage in messages and reports."""
    program: Words
    """The command without options."""
    options: StageOptions
    """Options that decide the result."""
    inputs: dict[str, str]
    """Hashes of what the result is made of, by name; with those of files that options name, such as --page.notes."""
    arguments: Words = ()
    """Further arguments, which do not decide the result: where files are, how many steps a training has."""
    outputs: dict[str, Path] = field(default_factory=dict)
    """Files that it writes, by name; those of a training follow from its record, see :meth:`files`."""
    pictures: Path | None = None
    experiment: str = ""
    """Folder of a training in ``runs``; by default the name of the stage."""
    is_rewritten: bool = False
    """Whether a later stage rewrites the checkpoint of this training, so that a change of it says nothing."""
    limit_s: float = float("inf")
    """Time of work after which a training is saved and stopped."""
    remainder: str = ""
    """What is left to do although nothing has changed, such as more steps; the stage then resumes."""

    def __post_init__(self) -> None:
        hashes = {}
        for option, words in self.options.items():
            if files := [Path(word) for word in words if os.path.isfile(word)]:
                hashes[f"--{self.name}.{option}"] = " ".join(map(hash_file, files))
        object.__setattr__(self, "inputs", self.inputs | hashes)

    @property
    def is_training(self) -> bool:
        """Whether it leaves checkpoints from which it can resume."""
        return self.program[0] == "ns-train"

    @property
    def decided(self) -> dict[str, str]:
        """The options as the manifest keeps them."""
        method = {"method": self.program[1]} if self.is_training else {}
        return method | {f"--{name}": " ".join(values) for name, values in self.options.items()}

    def run_folder(self, folder: Path, record: Record) -> Path:
        """Returns the run folder of a training."""
        return folder / "runs" / (self.experiment or self.name) / self.program[1] / record.key

    def command(self, folder: Path, record: Record) -> Words:
        """Returns the command to type, see :meth:`run_folder`."""
        words = (*self.program, *self.arguments, *option_words(self.options))
        if not self.is_training:
            return words
        run = self.run_folder(folder, record)
        words = (*words, "--output-dir", str(folder / "runs"), "--experiment-name", run.parent.parent.name)
        words = (*words, "--timestamp", record.key, *_TRAINING)
        return (*words, "--load-dir", str(run / "nerfstudio_models")) if self.steps_done(folder, record) else words

    def files(self, folder: Path, record: Record) -> dict[str, Path]:
        """Returns the files that it has written, see :meth:`run_folder`."""
        if not self.is_training:
            return self.outputs
        config = self.run_folder(folder, record) / "config.yml"
        saved = [] if self.is_rewritten else newest_first(folder_of(config))
        return {"config": config, **({"checkpoint": saved[0][1]} if saved else {})}

    def steps_done(self, folder: Path, record: Record) -> int:
        """Returns the number of steps in the newest checkpoint of a training; 0 without one, and for other stages."""
        saved = newest_first(folder_of(self.run_folder(folder, record) / "config.yml")) if self.is_training else []
        return saved[0][0] + 1 if saved else 0


def pose_stage(images: Path, capture: Path, options: StageOptions, start_over: bool = False) -> Stage:
    """Returns the stage that makes a capture of photos without poses, or of a video."""
    inputs = {"photos": hash_path(images) if images.is_file() else _hash_files(find_photos(images), images)}
    if "masks" in options:
        inputs["masks"] = hash_path(Path(" ".join(options["masks"])))
    words = ("--images", str(images.absolute()), "--output", str(capture), *(("--start-over",) if start_over else ()))
    outputs = {"poses": capture / "transforms.json", "points": capture / "sparse_pc.ply"}
    missing = _missing_photo(capture)
    remainder = f"{missing} is missing" if missing else ""
    program = ("f3rm-ext", "sfm", "process")
    return Stage("sfm", POSES, program, options, inputs, words, outputs, remainder=remainder)


def _missing_photo(capture: Path) -> str:
    """Returns the name of a photo that a capture has lost; empty if it is whole, or there is none yet."""
    try:
        meta, folder = read_transforms(capture)
    except CaptureError:
        return ""
    return next((name for frame in meta["frames"] if not (folder / (name := frame["file_path"])).is_file()), "")


def view_stage(name: str, title: str, folder: Path, config: str, inputs: Mapping[str, str]) -> Stage:
    """Returns the stage that renders and measures the held-out views of a run."""
    scores = scores_file(folder, name)
    pictures = scores.parent / PICTURES
    words = ("--load-config", config, "--output-path", str(scores), "--render-output-path", str(pictures))
    return Stage(name, title, ("ns-eval",), {}, dict(inputs), words, {"scores": scores}, pictures)


def scores_file(folder: Path, name: str) -> Path:
    """Returns the file in which an evaluation writes its scores.

    >>> scores_file(Path("out"), "eval-mesh").as_posix()
    'out/eval/mesh/scores.json'
    """
    return folder / "eval" / name.removeprefix("eval-") / SCORES


def hash_path(path: Path) -> str:
    """Returns a hash of a file's content, or of the names, sizes and times of a folder's files."""
    if path.is_file():
        return hash_file(path)
    return _hash_files((item for item in path.rglob("*") if item.is_file()), path)


def _hash_files(files: Iterable[Path], folder: Path) -> str:
    stats = [(str(file.relative_to(folder)), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(files)]
    return hash_bytes(repr(stats).encode())


def hide_home(text: str) -> str:
    """Returns a text with ``~`` in place of the home folder: reports are shared, and must not reveal its path."""
    home = os.path.expanduser("~")
    # It is "/" for users without a folder in a container, and stays "~" where nobody knows it.
    return re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w-])", "~", text) if len(home) > 1 else text
