"""The folder of a capture while it is made: whose it is, what is finished, and what can be kept."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import FolderLock, is_disk_full, write_atomic
from f3rm_ext.utils.output_folder import made_by
from f3rm_ext.utils.provenance import MADE_BY, require_own_folder

STATE = "sfm.json"
REPORT = "sfm_report.html"
COMMAND = "sfm process"


def stamp_of(path: Path) -> str:
    """Returns size and time of a file: while both stay, its content is taken to be the same."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


class WorkFolder:
    """A capture in the making, with its state in ``sfm.json``.

    Args:
        out: the folder; created if needed.

    Raises:
        ConfigError: the folder holds something else, cannot be written, or another process works there.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.images, self.masks = out / "images", out / "masks"
        self.database, self.feature_masks = out / "colmap" / "database.db", out / "colmap" / "masks"
        state = require_own_folder(out, STATE, str(made_by(COMMAND)[MADE_BY]))
        if state is not None and not isinstance(state.get("photos"), dict):
            raise ConfigError(f"{out / STATE} is damaged: choose a new folder with --output.")
        self.state: dict[str, Any] = state or {}
        try:
            for folder in (self.images, self.database.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {out} cannot be created ({error.strerror}): choose another.") from error
        if state is None:
            self.save()  # from now on the folder is known as ours
        self.lock = FolderLock(out / ".lock")
        if self.lock.is_held():
            raise ConfigError(f"Another process works in {out}: wait for it, or choose another folder with --output.")

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

    def begin(self, options: Mapping[str, Any], stamps: Mapping[str, str]) -> str:
        """Keeps what fits these options and photos, and removes other features, matches and results.

        Args:
            options: those on which features depend.
            stamps: of the original photos and their masks, by name without suffix.

        Returns:
            Why finished work cannot be kept; empty if it can.
        """
        reason = ""
        if self.state.get("options", dict(options)) != dict(options):
            before = self.state["options"]
            changed = [name for name in options if before.get(name) != options[name]]
            reason = f"{', '.join('--' + name.replace('_', '-') for name in changed)} changed"
        for name, known in self.photos.items():
            if stamps.get(Path(name).stem) != known["stamp"]:
                reason = reason or f"{known['source']} or its mask was changed or removed"
        if reason:
            # Copies of photos stay: somebody may have deleted the originals.
            for path in (self.database, *self.database.parent.glob(f"{self.database.name}-*")):
                path.unlink(missing_ok=True)
            for folder in (self.feature_masks, self.database.parent / "sparse"):
                shutil.rmtree(folder, ignore_errors=True)
            for name in ("transforms.json", "sparse_pc.ply", REPORT):
                (self.out / name).unlink(missing_ok=True)
            self.state = {"video": self.state["video"]} if "video" in self.state else {}
        self.save(options=dict(options), complete=False)
        return reason
