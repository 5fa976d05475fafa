"""The folder of a capture in the making: its owner, its state, and the results that can be kept."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import FolderLock, is_disk_full, write_atomic
from f3rm_ext.utils.output_folder import made_by
from f3rm_ext.utils.provenance import MADE_BY, read_provenance, require_own_folder

STATE = "sfm.json"
REPORT = "sfm_report.html"
TRANSFORMS, POINTS = "transforms.json", "sparse_pc.ply"
NEXT = ".next"
"""Subfolder of a capture for its replacement, which takes its place when it is complete."""
COMMAND = "sfm process"


class _Focal(TypedDict, total=False):
    """Focal length of a photo that is smaller than its EXIF says, px; other photos have none here."""

    focal_px: Annotated[float, Meta(gt=0)]


class _Photo(_Focal):
    """Properties of a photo."""

    source: str
    stamp: str
    size: Annotated[list[int], Meta(min_length=2, max_length=2)]
    camera: str
    turned: bool
    blur: float
    fingerprint: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")]


class _Video(TypedDict):
    """Source and names of the frames of a video."""

    wanted: dict[str, Any]
    frames: list[str]


class _Result(TypedDict):
    """Figures that a repeated command prints again."""

    key: dict[str, Any]
    photos: int
    registered: int
    without_pose: dict[str, str]
    blurred: list[str]
    same: dict[str, str]
    points: int
    track_length: float
    reprojection_error_px: float
    gps_error_m: float | None
    doubt: str


class _BaseState(TypedDict):
    """Keys that the state always has."""

    made_by: str
    photos: dict[str, _Photo]


class _State(_BaseState, total=False):
    """Content of ``sfm.json``."""

    options: dict[str, Any]
    unreadable: dict[str, str]
    video: _Video
    result: _Result
    complete: bool


def file_stamp(path: Path) -> str:
    """Returns size and modification time of a file, which identify its content."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


class WorkFolder:
    """A capture in the making, with its state in ``sfm.json``.

    ``out`` is where it is made, ``final`` where it belongs; they differ while an older capture is there.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = self.final = out
        state = read_state(out)
        self.state: dict[str, Any] = state or {}
        if state is None:
            self.save()  # marks the folder as ours
        self._use(out)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other processes away. Raises ConfigError if one works in the folder."""

        def refuse(_waited_s: float) -> None:
            raise ConfigError(f"Another process uses {self.final}: wait for it, or choose another --output.")

        with FolderLock(self.final / ".lock").hold(on_wait=refuse):
            self.state = read_state(self.final) or {}  # another process may have finished in the meantime
            yield

    def _use(self, folder: Path) -> None:
        """Makes this folder the one to work in."""
        self.out = folder
        self.images, self.masks = folder / "images", folder / "masks"
        self.database, self.feature_masks = folder / "colmap" / "database.db", folder / "colmap" / "masks"
        try:
            for part in (self.images, self.database.parent):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {folder} cannot be created ({error.strerror}): choose another.") from error

    @property
    def photos(self) -> dict[str, dict[str, Any]]:
        """Properties of each photo, by its file name in ``images/``."""
        return self.state.setdefault("photos", {})

    def save(self, **values: Any) -> None:
        """Changes and writes the state."""
        self.state |= values
        content = {**made_by(COMMAND), **self.state, "photos": self.photos}
        self.write(self.out / STATE, json.dumps(content, indent=1).encode())

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file under a temporary name and renames it. Raises ConfigError if the disk is full or read-only."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data, sync_parent=False)
        except OSError as error:
            remedy = "free some space" if is_disk_full(error) else "choose another --output"
            raise ConfigError(
                f"{path} cannot be written ({error.strerror or error}): {remedy}, then repeat the command to continue."
            ) from error

    @property
    def has_trusted_capture(self) -> bool:
        """Whether the folder holds a capture whose poses are not doubtful."""
        result = read_provenance(self.final / STATE).get("result")
        return (self.final / TRANSFORMS).is_file() and result is not None and not result["doubt"]

    def find_result(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the figures of an earlier call with the same key, if its capture is complete."""
        result = self.state.get("result")
        is_complete = all((self.out / name).is_file() for name in (TRANSFORMS, POINTS))
        return result if is_complete and result is not None and result["key"] == key else None

    def begin(
        self, options: Mapping[str, Any], stamps: Mapping[str, str] | None = None, start_over: bool = False
    ) -> str:
        """Keeps results that fit these options and photos, and otherwise starts over.

        An existing capture stays until its replacement, which is made in :data:`NEXT`, is complete and
        :meth:`publish` is called.

        Args:
            options: the options that features depend on.
            stamps: stamps of the original photos and their masks, by name without suffix; None for frames of a video,
                which follow from the options.

        Returns:
            The reason why earlier results cannot be kept; empty if they can.
        """
        if read_provenance(self.final / NEXT / STATE).get("complete") is True:  # killed while it took its place
            self._take_next()
        reason = "of --start-over" if start_over and self.photos else self._restart_reason(options, stamps)
        if reason and (self.final / TRANSFORMS).is_file():
            self.state = read_provenance(self.final / NEXT / STATE)  # of a call that was stopped
            if start_over or not isinstance(self.state.get("photos"), dict) or self._restart_reason(options, stamps):
                shutil.rmtree(self.final / NEXT, ignore_errors=True)
                self.state = {}
            self._use(self.final / NEXT)
        elif reason:
            # Copies of photos stay: somebody may have deleted the originals.
            self._remove_database()
            for folder in (self.feature_masks, self.database.parent / "sparse"):
                shutil.rmtree(folder, ignore_errors=True)
            for name in (POINTS, REPORT):
                (self.out / name).unlink(missing_ok=True)
            self.state = {"video": self.state["video"]} if "video" in self.state else {}
        else:
            shutil.rmtree(self.final / NEXT, ignore_errors=True)
        self.save(options=dict(options), complete=False)
        return reason

    def publish(self, result: Mapping[str, Any]) -> None:
        """Saves the figures of the complete capture and replaces the earlier one; other files of the folder stay."""
        self.save(result=result, complete=True)
        if self.out != self.final:
            self._take_next()

    def _restart_reason(self, options: Mapping[str, Any], stamps: Mapping[str, str] | None) -> str:
        before = self.state.get("options", options)
        changed = [name for name in options if before.get(name) != options[name]]
        if changed:
            return f"{', '.join('--' + name.replace('_', '-') for name in changed)} changed"
        for name, known in self.photos.items():
            if stamps is not None and stamps.get(Path(name).stem) != known["stamp"]:
                return f"{known['source']} or its mask was changed or removed"
        return ""

    def _take_next(self) -> None:
        """Moves the new capture into place, its state last, so that the next call can finish after a kill."""
        fresh = self.final / NEXT
        self._use(self.final)
        files = sorted((path for path in fresh.rglob("*") if path.is_file()), key=lambda path: path == fresh / STATE)
        try:
            if (fresh / self.database.relative_to(self.final)).is_file():
                self._remove_database()
            for path in files:
                target = self.final / path.relative_to(fresh)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(fresh)
        except OSError as error:
            raise ConfigError(
                f"{self.final} cannot be written ({error.strerror or error}): make it writable, then repeat the "
                "command to continue."
            ) from error
        self.state = read_state(self.final) or {}

    def _remove_database(self) -> None:
        # With its journals: SQLite would apply them to another database of the same name.
        for path in (self.database, *self.database.parent.glob(f"{self.database.name}-*")):
            path.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Returns the state in a folder; None if the folder is new or empty. Raises ConfigError if the state is damaged, or
    the folder holds something else."""
    return require_own_folder(folder, STATE, str(made_by(COMMAND)[MADE_BY]), ignored=(".lock", NEXT), kind=_State)
