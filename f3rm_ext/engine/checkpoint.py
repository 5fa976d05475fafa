"""Checkpoint files: written atomically, checked before use, made of tensors and plain Python values only.

Files are named as nerfstudio names them, ``step-000000123.ckpt``. Nerfstudio's loader parses every file name in the
folder, so temporary files are put in its parent, the run folder.
"""

import contextlib
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from f3rm_ext.errors import CheckpointError, reason_of
from f3rm_ext.utils.atomic_files import sync_folder
from f3rm_ext.utils.output_folder import new_folder

SPARES = 1
"""Checkpoints kept besides the newest with ``save_only_latest_checkpoint``, in case the newest is damaged."""

_NAME = re.compile(r"step-(\d+)\.ckpt|ckpt_(\d+)\.pth")
"""Names by nerfstudio, and by `f3rm-ext sfm train`, which has those of the released code."""
_WRITE_FAILURES = ("PytorchStreamWriter", "unexpected pos")


def plain(value: Any) -> Any:
    """Returns a copy of nested containers in which numpy values are Python numbers and tensors.

    Nerfstudio's schedulers leave numpy scalars in their state, which ``torch.load(weights_only=True)`` refuses.
    """
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value


def make_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.ckpt"


def parse_step(path: Path) -> int | None:
    """Returns the step in a checkpoint's file name; None if the file has another name.

    >>> parse_step(make_path(Path("nerfstudio_models"), 123)), parse_step(Path("config.yml"))
    (123, None)
    """
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else None


def folder_of(load_config: Path, name: str = "nerfstudio_models") -> Path:
    """Returns the checkpoint folder of a run: beside its config.yml or, if that is a link, beside its target."""
    folder = load_config.absolute().parent / name
    return folder if folder.is_dir() else load_config.resolve().parent / name


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Returns steps and files of a checkpoint folder, damaged or not; empty if there is no such folder."""
    if not folder.is_dir():
        return []
    files = [(step, path) for path in folder.iterdir() if (step := parse_step(path)) is not None]
    return sorted(files, reverse=True)


def is_intact(path: Path, read_all: bool = True) -> bool:
    """Returns whether a checkpoint file is complete.

    Args:
        read_all: compare the checksum of every part. Otherwise only look for the table of contents at the end, which
            a truncated file lacks.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            return bool(names) and (not read_all or archive.testzip() is None)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError):
        return False


def write(state: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint so that the file is either absent or complete at any moment.

    Raises:
        CheckpointError: the disk refuses it; earlier checkpoints are untouched.
    """
    folder = path.parent
    temporary = folder.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in _stale_files(folder.parent):
            stale.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            torch.save(plain(state), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch reports a short write as RuntimeError
        if isinstance(error, RuntimeError) and not any(part in str(error) for part in _WRITE_FAILURES):
            raise
        raise CheckpointError(
            f"The checkpoint {path} could not be written ({reason_of(error)}): earlier checkpoints are untouched, "
            "make room, then resume."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def prune(folder: Path, spares: int = SPARES) -> None:
    """Deletes all checkpoints but the newest intact one and `spares` intact ones before it."""
    kept = 0
    for _, path in newest_first(folder):
        if kept <= spares and is_intact(path, read_all=False):
            kept += 1
        else:
            path.unlink(missing_ok=True)


def set_aside(folder: Path, start_step: int) -> Path | None:
    """Moves the checkpoints of an earlier training out of the way of one that began at a step, so that neither loses
    its own and `ns-eval`, which takes the newest, does not take the other's.

    Returns:
        The folder beside this one in which they are now; None if there were none from that step on.
    """
    others = [path for step, path in newest_first(folder) if step >= start_step]
    if not others:
        return None
    target = new_folder(folder.with_name(f"{folder.name}-earlier"))
    target.mkdir()
    for path in others:
        path.rename(target / path.name)
    return target


def newest_intact(folder: Path, warn: Callable[[str], None]) -> Path:
    """Returns the newest intact checkpoint of a folder.

    Args:
        warn: called with a sentence about newer checkpoints that are damaged, if there are any.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    damaged: list[str] = []
    for _, path in newest_first(folder):
        if is_intact(path):
            if damaged:
                warn(f"Skipping damaged {', '.join(damaged)} in {folder}: using {path.name} instead.")
            return path
        damaged.append(path.name)
    if damaged:
        raise CheckpointError(
            f"Every checkpoint in {folder} is damaged ({', '.join(damaged)}): restore one from a backup, or train "
            "again."
        )
    raise CheckpointError(
        f"There is no checkpoint in {folder}: give --load-dir the folder of a run, or its nerfstudio_models folder, "
        "which contains a file step-*.ckpt."
    )


def find_folder(given: Path, relative_model_dir: Path) -> Path:
    """Returns the checkpoint folder for ``--load-dir``, which may name that folder or the run folder around it.

    Raises:
        CheckpointError: there is no such folder, or it is a file.
    """
    if given.is_file():
        option = "--load-config" if given.name == "config.yml" else "--load-checkpoint"
        raise CheckpointError(f"--load-dir names the file {given}, but takes a folder: use {option} for a file.")
    if not given.is_dir():
        raise CheckpointError(f"The folder {given} given by --load-dir does not exist: name the folder of a run.")
    inside = given / relative_model_dir
    return inside if not newest_first(given) and inside.is_dir() else given


def load(path: Path, needed: Collection[str] = ("step", "pipeline", "optimizers")) -> dict[str, Any]:
    """Reads a checkpoint to the CPU without running any code in it.

    Raises:
        CheckpointError: the file is missing, damaged, or not a nerfstudio checkpoint.
    """
    if not path.is_file():
        raise CheckpointError(f"The checkpoint {path} does not exist: name a file step-*.ckpt of a run.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and I/O errors of many types
        raise CheckpointError(
            f"The checkpoint {path} cannot be read ({reason_of(error)}): it may be from another program, "
            "use an earlier one with --load-step."
        ) from error
    if not isinstance(state, dict) or not set(needed) <= state.keys():
        raise CheckpointError(f"The file {path} is not a checkpoint of a nerfstudio run: name a file step-*.ckpt.")
    return state


def _stale_files(run: Path) -> Iterator[Path]:
    """Yields temporary files of processes that were killed while writing."""
    for path in run.glob(".*.tmp"):
        name, _, pid = path.name[1 : -len(".tmp")].rpartition(".")
        if parse_step(Path(name)) is not None and pid.isdigit() and not _is_running(int(pid)):
            yield path


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # os.kill would end the process there
        return pid != os.getpid()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
