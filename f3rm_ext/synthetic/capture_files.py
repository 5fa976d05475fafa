"""Writes the files of a synthetic capture, and replaces an old capture by a finished one."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from f3rm_ext.errors import CaptureError

GENERATOR = "f3rm-ext scene synth"
IMAGE_FOLDERS = ("images", "depth", "normals", "labels")
_OUR_NAMES = (
    *IMAGE_FOLDERS,
    *("scene.json", "classes.txt", "classes.json", "gt_mesh.ply", "gt_mesh.npz", "transforms.json"),
)
_PARTIAL = ".f3rm-ext-partial-"
"""Beginning of the name of an unfinished capture in a folder that was there before."""
_FRAME = re.compile(r"frame_\d{5}\.png")
DEPTH_UNIT_M = 1e-3


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Writes uint8 (h, w[, 3]) or uint16 (h, w) pixels."""
    Image.fromarray(pixels).save(path, compress_level=4)
    sync(path)


def write_json(path: Path, content: Any) -> None:
    """Writes readable JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Waits until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def encode_depth(depth_m: Float[np.ndarray, "h w"]) -> np.ndarray:
    """Converts metres to uint16 millimetres. 0 stays 0 and means that nothing was hit.

    >>> encode_depth(np.array([[0.0, 1.2346, 100.0]])).tolist()
    [[0, 1235, 65535]]
    """
    return np.clip(np.rint(depth_m / DEPTH_UNIT_M), 0, 65535).astype(np.uint16)


def encode_normals(normals: Float[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    """Maps components from [-1, 1] to 0 … 255. The zero vector (nothing hit) becomes 128."""
    return np.floor(np.clip((normals + 1) * 127.5, 0, 255) + 0.5).astype(np.uint8)


def check_target(out: Path, overwrite: bool) -> None:
    """Raises :class:`CaptureError` unless a new capture may take the place of ``out``."""
    if out.exists() and not out.is_dir():
        raise CaptureError(f"{out} is not a folder, so no capture can be written there: choose another name.")
    if not out.exists() or all(path.name.startswith(_PARTIAL) for path in out.iterdir()):
        return
    if not overwrite:
        raise CaptureError(
            f"{out} is not empty, and writing there could replace your files: choose a new folder, "
            "or use --overwrite to replace a synthetic capture."
        )
    try:
        made_here = json.loads((out / "scene.json").read_text(encoding="utf-8")).get("generator") == GENERATOR
    except (OSError, ValueError, AttributeError):
        made_here = False
    if not made_here:
        raise CaptureError(
            f"{out} holds no synthetic capture (no scene.json of `{GENERATOR}`) and --overwrite replaces nothing else: "
            "choose a new folder."
        )
    for folder in IMAGE_FOLDERS:
        for path in sorted((out / folder).iterdir()) if (out / folder).is_dir() else ():
            if not _FRAME.fullmatch(path.name):
                raise CaptureError(
                    f"{path} was not written by `{GENERATOR}` and --overwrite would lose it: move it away first."
                )


@contextmanager
def replace_capture(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a new folder, which becomes ``out`` if the block succeeds and is deleted otherwise.

    Files in an old ``out`` that are not part of a synthetic capture are kept.

    Raises:
        CaptureError: ``out`` must not be replaced, or cannot be written (no permission, disk full).
    """
    out = Path(os.path.realpath(out))
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        check_target(out, overwrite)
        if out.exists():  # which may be a file system of its own
            partial = out / f"{_PARTIAL}{os.getpid()}"
        partial.mkdir(parents=True)
        yield partial
        _swap(partial, out)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CaptureError(f"Cannot write {out}: {reason}; free some space or choose a writable folder.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    # The folder itself stays: it may be a shell's working folder, or a mount point.
    made = sorted(partial.iterdir(), key=lambda path: path.name == "transforms.json")
    old = partial / "replaced"
    old.mkdir()
    moves = [(out / name, old / name) for name in reversed(_OUR_NAMES) if (out / name).exists()]
    moves += [(path, out / path.name) for path in made]  # what makes them a capture comes last
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            source.rename(target)
            done.append((source, target))
    except OSError:
        for source, target in reversed(done):
            target.rename(source)
        raise
