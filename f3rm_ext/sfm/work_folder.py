"""The folder of a capture while it is made: whose it is, what is finished, and what can be kept."""

import json
import os
import shutil
from collections.abc import Mapping
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
"""Folder, in that of a capture, of one that takes its place as soon as it is whole."""
COMMAND = "sfm process"


class _Photo(TypedDict):
    """What is known of a photo."""

    source: str
    stamp: str
    size: Annotated[list[int], Meta(min_length=2, max_length=2)]
    camera: str
    turned: bool
    blur: float
    fingerprint: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")]


class _Video(TypedDict):
    """What frames were taken from."""

    wanted: dict[str, Any]
    frames: list[str]


class _Result(TypedDict):
    """What a finished command says again."""

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


class _Begun(TypedDict):
    """What is there from the beginning."""

    made_by: str
    photos: dict[str, _Photo]


class _State(_Begun, total=False):
    """The file."""

    options: dict[str, Any]
    unreadable: dict[str, str]
    video: _Video
    result: _Result
    complete: bool


def stamp_of(path: Path) -> str:
    """Returns size and time of a file: while both stay, its content is taken to be the same."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


class WorkFolder:
    """A capture in the making, with its state in ``sfm.json``.

    ``out`` is where it is made, ``final`` where it belongs; they differ while an older capture is there.

    Args:
        out: the folder; created if needed.

    Raises:
        ConfigError: the folder holds something else, cannot be written, or another process works there.
    """

    def __init__(self, out: Path) -> None:
        self.out = self.final = out
        state = read_state(out)
        self.state: dict[str, Any] = state or {}
        if state is None:
            self.save()  # from now on the folder is known as ours
        self._use(out)
        self.lock = FolderLock(out / ".lock")
        if self.lock.is_held():
            raise ConfigError(f"Another process works in {out}: wait for it, or choose another folder with --output.")

    def _use(self, folder: Path) -> None:
        """Works in this folder from now on."""
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
        """What is known about each photo, by its file name in ``images/``."""
        return self.state.setdefault("photos", {})

    def save(self, **values: Any) -> None:
        """Changes and writes the state."""
        self.state |= values
        content = {**made_by(COMMAND), **self.state, "photos": self.photos}
        self.write(self.out / STATE, json.dumps(content, indent=1).encode())

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file under a temporary name and renames it.

        Raises:
            ConfigError: the disk is full or read-only.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data, sync_parent=False)
        except OSError as error:
            remedy = "free some space" if is_disk_full(error) else "choose another --output"
            raise ConfigError(
                f"{path} cannot be written ({error.strerror or error}): {remedy}; the same command goes on from here."
            ) from error

    def begin(
        self, options: Mapping[str, Any], stamps: Mapping[str, str] | None = None, start_over: bool = False
    ) -> str:
        """Keeps what fits these options and photos; otherwise begins anew.

        A capture that is there already stays until the new one is whole: this is then made in :data:`NEXT`, until
        :meth:`publish`.

        Args:
            options: those on which features depend.
            stamps: of the original photos and their masks, by name without suffix; None for frames of a video, which
                follow from the options.
            start_over: keep nothing.

        Returns:
            Why finished work cannot be kept; empty if it can.
        """
        if read_provenance(self.final / NEXT / STATE).get("complete") is True:  # killed while it took its place
            self._take_next()
        reason = "of --start-over" if start_over and self.photos else self._why_anew(options, stamps)
        if reason and (self.final / TRANSFORMS).is_file():
            self.state = read_provenance(self.final / NEXT / STATE)  # of a call that was stopped
            if start_over or not isinstance(self.state.get("photos"), dict) or self._why_anew(options, stamps):
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

    def publish(self) -> None:
        """Puts a capture that is whole in the place of the one before; other files of the folder stay.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self.save(complete=True)
        if self.out != self.final:
            self._take_next()

    def _why_anew(self, options: Mapping[str, Any], stamps: Mapping[str, str] | None) -> str:
        before = self.state.get("options", options)
        changed = [name for name in options if before.get(name) != options[name]]
        if changed:
            return f"{', '.join('--' + name.replace('_', '-') for name in changed)} changed"
        for name, known in self.photos.items():
            if stamps is not None and stamps.get(Path(name).stem) != known["stamp"]:
                return f"{known['source']} or its mask was changed or removed"
        return ""

    def _take_next(self) -> None:
        """Moves the new capture to its place, its state last, so that a kill leaves what the next call can finish."""
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
                f"{self.final} cannot be written ({error.strerror or error}): make that possible; the same command "
                "goes on from here."
            ) from error
        self.state = read_state(self.final) or {}

    def _remove_database(self) -> None:
        for path in (self.database, *self.database.parent.glob(f"{self.database.name}-*")):
            path.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Returns the state in a folder; None where there is none, and the folder is new or empty.

    Raises:
        ConfigError: the state is damaged, or the folder holds something else.
    """
    return require_own_folder(folder, STATE, str(made_by(COMMAND)[MADE_BY]), ignored=(".lock", NEXT), kind=_State)
