"""The file of a profile, one JSON object a line: ``start``, then ``snapshot`` after ``snapshot``, and ``end``.

Lines are flushed as they are written, so a killed run leaves all but perhaps the last one, which readers skip if torn.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.profiling.snapshot import Snapshot

NAME = "tensor_profile.jsonl"
"""Name of the file in a run folder."""
FORMAT = 1


class ProfileWriter:
    """Appends records to a profile.

    Args:
        path: the file; records of an earlier process stay.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8")
        if self._stream.tell():
            self._stream.write("\n")  # the last line may be torn; readers skip empty ones

    def write(self, kind: str, content: dict[str, Any]) -> None:
        """Appends a record and hands it to the system, so that it survives the end of this process.

        Raises:
            OSError: the disk is full or gone.
        """
        self._stream.write(json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


@dataclass
class Profile:
    """A profile that was read."""

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    """Method, device and sizes."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order of writing; since the last start only, if a run was resumed in the same folder."""
    end: str = ""
    """How the run ended; empty if it was killed or goes on."""
    damaged: int = 0
    """Lines that could not be read."""

    @property
    def device(self) -> str:
        """Type of the training device."""
        return str(self.start.get("device", "cpu"))

    @property
    def device_total(self) -> int:
        """Memory of the device, or of the machine for the CPU; 0 if unknown."""
        return int(self.start.get("device_total", 0))

    def peaks(self, of: str = "tensors") -> dict[str, int]:
        """Returns the peaks of the whole run by phase, bytes.

        Args:
            of: "tensors" (on the CPU: the process) or "device" (all processes, by NVML).
        """
        peaks: dict[str, int] = {}
        for snapshot in self.snapshots:
            for phase, values in snapshot.phases.items():
                if of in values:
                    peaks[phase] = max(peaks.get(phase, 0), values[of])
        return peaks


def read_profile(path: Path) -> Profile:
    """Reads a profile. Lines that are torn or of another format are counted and skipped.

    Raises:
        ConfigError: the file cannot be read or holds no snapshot.
    """
    profile = Profile(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"The profile {path} cannot be read ({error.strerror}): give the folder of another run."
        ) from error
    for line in lines:
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "start":
                profile.start, profile.snapshots, profile.end = record, [], ""
            elif kind == "snapshot":
                profile.snapshots.append(Snapshot.from_json(record))
            elif kind == "end":
                profile.end = str(record["reason"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            profile.damaged += bool(line.strip())
    if not profile.snapshots:
        raise ConfigError(
            f"The profile {path} holds no snapshot yet: train a step longer, or give the folder of another run."
        )
    return profile


def find_profile(run: str, outputs: Path) -> Path:
    """Returns the file of a profile.

    Args:
        run: a run folder, a file in it such as config.yml, or "latest" for the newest profile.

    Raises:
        ConfigError: there is none.
    """
    if run == "latest" and not Path(run).exists():
        profiles = sorted(outputs.rglob(NAME), key=lambda path: path.stat().st_mtime) if outputs.is_dir() else []
        if not profiles:
            raise ConfigError(
                f"There is no profile below {outputs}{os.sep}: train with --profile-tensors True, or say by --outputs "
                "where the runs are."
            )
        return profiles[-1]
    path = Path(run)
    if not path.exists():
        raise ConfigError(f"There is no run {path}: give its folder, its config.yml, or latest.")
    path = path if path.is_dir() else path.parent
    if not (path / NAME).is_file():
        raise ConfigError(f"The run {path} has no profile: train it with --profile-tensors True.")
    return path / NAME
