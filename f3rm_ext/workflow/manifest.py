"""What a workflow has done: its capture, and options, inputs, outputs, time and memory of each stage, as JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from f3rm_ext import __version__
from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.capture.colmap_model import capture_files
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.utils.atomic_files import hash_bytes, hash_file, write_atomic
from f3rm_ext.utils.provenance import require_own_folder

NAME, FORMAT = "manifest.json", 1
INTERRUPTED = "it was interrupted"
_KNOWN = {".lock", "logs"}
"""Names of files and folders that a workflow makes before its manifest."""


@dataclass(frozen=True)
class Output:
    """A file that a stage has written."""

    path: str
    """Relative to the folder, if it is in it."""
    size: int
    """Bytes."""
    digest: str
    """BLAKE2b hash."""


@dataclass
class Record:
    """A stage as it was run."""

    state: Literal["running", "finished"] = "running"
    title: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """Values of the options that the user decided, by name."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Hashes of what it was made of, by name."""
    outputs: dict[str, Output] = field(default_factory=dict)
    command: str = ""
    seconds: float = 0.0
    """Wall time of all its runs."""
    working_s: float = 0.0
    """The part of it after the first step, without preparations, of runs that were not interrupted."""
    peak_mib: float = 0.0
    """Peak resident memory of its process, MiB."""
    runs: int = 0
    """Times that it was started with these options and inputs."""
    attempt: int = 1
    """Times that it was begun from nothing."""
    notes: list[str] = field(default_factory=list)
    """Sentences of the command for the user."""
    result: dict[str, Any] = field(default_factory=dict)
    """Values that the command told, such as ``eval_images``: how many photos a training holds out."""

    @property
    def holds_out_nothing(self) -> bool:
        """Whether there is no photo to measure a training by: its capture has few."""
        return self.result.get("eval_images") == 0

    @property
    def key(self) -> str:
        """Names options and inputs, and the attempt."""
        text = json.dumps([self.options, self.inputs], sort_keys=True)
        return hash_bytes(text.encode())[:8] + (f"-{self.attempt}" if self.attempt > 1 else "")


class _Capture(TypedDict):
    path: str
    digest: str


class _Defaults(TypedDict, total=False):
    """Options that :mod:`~f3rm_ext.workflow.defaults` chooses."""

    coarse_method: str
    vertices: int
    refinement_time: Literal["short", "medium", "long"]
    resolution_scale: float


@dataclass
class Manifest:
    """The manifest of a folder; :meth:`open` reads or begins one."""

    made_by: str
    """The command that makes the folder, such as ``f3rm-ext sugar run``."""
    capture: _Capture | None
    """Result of :func:`identify` or :func:`identify_photos`; None where the folder may be used for any capture."""
    stages: dict[str, Record] = field(default_factory=dict)
    checked: str = ""
    """Options of trainings that :mod:`~f3rm_ext.workflow.check` has accepted."""
    defaults: _Defaults = field(default_factory=_Defaults)
    """Options that were chosen for the machine on which the work began."""
    format: int = FORMAT
    version: str = ""
    """Version of f3rm_ext that wrote the manifest, for people; nothing reads it."""
    folder: Path = Path()
    """Output of the workflow; not in the file."""

    @classmethod
    def open(cls, folder: Path, command: str, option: str, capture: Mapping[str, Any] | None) -> "Manifest":
        """Reads the manifest of a folder, which an option gave, or begins one.

        Raises:
            ConfigError: the folder holds other files, a damaged manifest, or one of another capture.
        """
        advice = f"choose a new folder with {option}"
        manifest: Manifest | None = require_own_folder(folder, NAME, command, option, _KNOWN, cls)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option} {folder} cannot be used ({error.strerror}): choose another folder.") from error
        if manifest is None:
            manifest = cls(command, capture)  # type: ignore[arg-type]
        if manifest.format != FORMAT:
            raise ConfigError(f"{folder / NAME} is not of this version of `{command}`: {advice}.")
        if capture is not None and capture["digest"] != (manifest.capture or {}).get("digest"):
            previous = (manifest.capture or {}).get("path")
            other = "which has changed since" if previous == capture["path"] else f"not of {capture['path']}"
            raise ConfigError(f"The folder {folder} is of {previous}, {other}: {advice}.")
        manifest.capture, manifest.folder = capture, folder  # type: ignore[assignment]
        return manifest

    def save(self) -> None:
        """Writes the manifest under a temporary name and renames it.

        Raises:
            ConfigError: it cannot be written; the old one stays.
        """
        content = {**asdict(self), "version": __version__}
        del content["folder"]
        try:
            write_atomic(self.folder / NAME, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise ConfigError(
                f"{self.folder / NAME} cannot be written ({error.strerror or error}): make room and run the same "
                "command again."
            ) from error

    def output(self, path: Path) -> Output:
        """Describes a file that was written."""
        name = str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)
        return Output(name, path.stat().st_size, hash_file(path))

    def get_record(self, name: str, options: Mapping[str, str], inputs: Mapping[str, str]) -> Record:
        """Returns the record of a stage; a new one if options or inputs have changed, see :meth:`reason_to_run`."""
        record = self.stages.get(name)
        if record is None or (record.options, record.inputs) != (options, inputs):
            record = Record(options=dict(options), inputs=dict(inputs))
        return record

    def reason_to_run(self, name: str, options: Mapping[str, str], inputs: Mapping[str, str]) -> str | None:
        """Returns why a stage has to be run again; empty if it never was, None if it need not."""
        record = self.stages.get(name)
        if record is None:
            return ""
        for option in sorted(set(record.options) | set(options)):
            before, now = record.options.get(option), options.get(option)
            if before != now:
                was = "" if before is None else f"was {before} and "
                return f"{option} {was}is now {'left out' if now is None else now}"
        for item in sorted(set(record.inputs) | set(inputs)):
            if record.inputs.get(item) != inputs.get(item):
                return f"its input ({item}) has changed"
        if record.state != "finished":
            return INTERRUPTED
        for output in record.outputs.values():
            path = self.folder / output.path
            if not path.is_file():
                return f"{output.path} is missing"
            if path.stat().st_size != output.size or hash_file(path) != output.digest:
                return f"{output.path} was changed"
        return None


def identify(data: Path) -> dict[str, Any]:
    """Returns what identifies a capture: its path, the number of its photos and of those to train on, whether they have
    masks, and a hash.

    The hash is of transforms.json or COLMAP's model, and of names and sizes of the photos and masks in it.

    Raises:
        CaptureError: there is no such capture, or it cannot be read.
    """
    poses = capture_files(data)
    if data.is_dir() and not poses:
        raise CaptureError(
            f"{data} has neither transforms.json nor COLMAP's sparse/0: give --data a capture with poses, or --images "
            "a folder of photos without."
        )
    meta, folder = read_transforms(data)
    frames = meta["frames"]
    files = [str(frame[key]) for frame in frames for key in ("file_path", "mask_path") if key in frame]
    sizes = [(name, item.stat().st_size if (item := folder / name).is_file() else -1) for name in files]
    text = json.dumps([*map(hash_file, poses), sizes])
    return {
        "path": str(data.resolve()),
        "photos": len(frames),
        "train_photos": len(meta.get("train_filenames") or frames),
        "has_masks": any("mask_path" in frame for frame in frames),
        "digest": hash_bytes(text.encode()),
    }


def identify_photos(images: Path) -> dict[str, Any]:
    """Returns what identifies photos without poses: their folder, or video. Photos may be added and removed."""
    path = str(images.resolve())
    return {"path": path, "digest": hash_bytes(os.fsencode(path))}
