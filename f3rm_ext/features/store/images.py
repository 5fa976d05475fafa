"""The images of a data set as extraction sees them: their pixels, and keys that follow the pixels, not the names."""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from f3rm_ext.errors import CaptureError
from f3rm_ext.utils.atomic_files import write_atomic

INDEX_NAME = "images.json"
_MAX_INDEX_ENTRIES = 100_000
_DECODERS = 4
_SAVE_EVERY_S = 5.0


@runtime_checkable
class ImageDataset(Protocol):
    """What extraction needs of a data set; nerfstudio's ``InputDataset`` is one.

    Where it has ``image_filenames`` (and ``scale_factor``) too, known images need not be decoded again; a method
    ``pixels_identity(image_idx)`` names what decides the pixels besides the file.
    """

    def __len__(self) -> int: ...

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        """Pixels of an image, uint8, (height, width, 3 or 4)."""
        ...


def image_key(image: UInt8[np.ndarray, "h w c"]) -> str:
    """Key of an image: 32 hex digits of the BLAKE2b of its shape and pixels."""
    digest = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def set_key(keys: Sequence[str]) -> str:
    """Key of a set of images, whatever their order: 16 hex digits."""
    return hashlib.blake2b("".join(sorted(set(keys))).encode(), digest_size=8).hexdigest()


def on_white(image: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "h w 3"]:
    """An RGBA image laid on white; an RGB image as it is."""
    if image.shape[2] == 3:
        return image
    alpha = image[..., 3:].astype(np.uint16)
    color = image[..., :3].astype(np.uint16)
    return ((color * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


class ImageIndex:
    """Remembers which file has which key, so that starting does not decode every image.

    Advisory: an entry counts only while the file's size and modification time are the same. A lost or damaged
    index costs time, nothing else. One file for all captures, replaced as a whole.
    """

    def __init__(self, path: Path):
        self.path = path
        self._entries: dict[str, list[Any]] = {}
        self._new: dict[str, list[Any]] = {}
        self._saved_s = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Reads what other processes have added."""
        try:
            entries = json.loads(self.path.read_bytes())["entries"]
            self._entries = {name: entry for name, entry in entries.items() if _is_entry(entry)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._entries = {}

    def get(self, name: str, signature: tuple[int, int]) -> str | None:
        """Key of a file, or None where it is not known as it is now."""
        entry = self._new.get(name) or self._entries.get(name)
        return entry[2] if entry is not None and tuple(entry[:2]) == signature else None

    def set(self, name: str, signature: tuple[int, int], key: str) -> None:
        """Remembers a file's key; on the disk from the next :meth:`save` on."""
        self._new[name] = [*signature, key]

    def save(self, *, now: bool = True) -> None:
        """Writes the index. A failure is ignored: the index only saves time.

        Args:
            now: Otherwise only if that was some seconds ago.
        """
        if not self._new or not (now or time.monotonic() - self._saved_s > _SAVE_EVERY_S):
            return
        self._saved_s = time.monotonic()
        self.refresh()
        entries = list({**self._entries, **self._new}.items())[-_MAX_INDEX_ENTRIES:]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({"format": 1, "entries": dict(entries)}, indent=0).encode())
        except OSError:
            return


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str)


@dataclass(frozen=True)
class Decoded:
    """One image, decoded."""

    key: str
    """See :func:`image_key`."""
    pixels: UInt8[np.ndarray, "h w 3"]
    """RGB, on white where it had transparency."""
    file: Path
    """Where it was read from; only a name where the data set has no files."""


class ImageSet:
    """The images of one data set with their keys, as far as they are known."""

    def __init__(self, dataset: ImageDataset, index: ImageIndex):
        self.dataset = dataset
        self.index = index
        self._keys: list[str | None] = [None] * len(dataset)
        self._first_size_px: tuple[int, int] | None = None
        self.look_up()

    def __len__(self) -> int:
        return len(self._keys)

    def known(self) -> list[str | None]:
        """The key of each image, None where it is not known yet."""
        return list(self._keys)

    def keys(self) -> list[str]:
        """The key of each image; those unknown are decoded now."""
        unknown = [i for i, key in enumerate(self._keys) if key is None]
        for _ in decode([(self, i) for i in unknown], ahead=_DECODERS):
            pass
        return [key for key in self._keys if key is not None]

    def look_up(self) -> None:
        """Takes the keys that the index knows."""
        for i, key in enumerate(self._keys):
            file = self._file(i) if key is None else None
            if file is not None:
                self._keys[i] = self.index.get(*file)

    def read(self, i: int) -> Decoded:
        """Decodes an image and remembers its key. Safe to call from several threads.

        Raises:
            CaptureError: When it cannot be read.
        """
        file = self._file(i)
        try:
            image = self.dataset.get_numpy_image(i)
        except (OSError, SyntaxError, ValueError, AssertionError) as error:
            raise CaptureError(
                f"Image {self.name(i)} cannot be read ({error}): mend or replace it, or take it out of the capture."
            ) from error
        key = image_key(image)
        self._keys[i] = key
        if file is not None:
            self.index.set(*file, key)
        return Decoded(key, on_white(image), Path(self.name(i)))

    def name(self, i: int) -> str:
        """What to call an image in a message."""
        names = getattr(self.dataset, "image_filenames", None)
        return str(names[i]) if names is not None else f"number {i}"

    def size_px(self, i: int) -> tuple[int, int]:
        """Height and width of an image as its camera has them; without cameras, those of the first image."""
        cameras = getattr(self.dataset, "cameras", None)
        if cameras is not None:
            return int(cameras.height[i]), int(cameras.width[i])
        if self._first_size_px is None:
            height_px, width_px = self.read(0).pixels.shape[:2]
            self._first_size_px = (height_px, width_px)
        return self._first_size_px

    def _file(self, i: int) -> tuple[str, tuple[int, int]] | None:
        names = getattr(self.dataset, "image_filenames", None)
        if names is None:
            return None
        path = os.path.abspath(names[i])
        try:
            stat = os.stat(path)
        except OSError:
            return None
        loader = f"{type(self.dataset).__name__}|{getattr(self.dataset, 'scale_factor', 1.0)}|{path}"
        identity = getattr(self.dataset, "pixels_identity", None)
        if identity is not None:  # more than the file decides the pixels
            loader += f"|{identity(i)}"
        return loader, (stat.st_size, stat.st_mtime_ns)


def decode(todo: Sequence[tuple[ImageSet, int]], *, ahead: int) -> Generator[tuple[ImageSet, int, Decoded], None, None]:
    """Decodes images in order on a few threads, at most ``ahead`` images before they are asked for."""
    with ThreadPoolExecutor(min(_DECODERS, os.cpu_count() or 1), "f3rm_ext-decode") as pool:
        futures: deque[Future[Decoded]] = deque()
        position = 0
        try:
            for image_set, i in todo:
                while position < len(todo) and len(futures) < max(1, ahead):
                    following, j = todo[position]
                    futures.append(pool.submit(following.read, j))
                    position += 1
                yield image_set, i, futures.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
