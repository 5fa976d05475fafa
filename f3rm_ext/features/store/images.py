"""The images of a data set for extraction: their pixels, and keys that depend on the pixels, not on file names."""

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
WHITE = np.full(3, 255, np.uint8)
"""The colour behind transparent pixels where features are extracted."""
_MAX_INDEX_ENTRIES = 100_000
_DECODERS = 4
_SAVE_EVERY_S = 5.0


@runtime_checkable
class ImageDataset(Protocol):
    """What extraction needs of a data set; nerfstudio's ``InputDataset`` has it.

    A data set may also have a method ``pixels_identity(image_idx) -> str`` that names whatever else than the file and
    ``scale_factor`` determines the pixels, and ``at_scale(scale_factor)`` that returns it with images of another size.
    """

    image_filenames: Any
    cameras: Any
    """Nerfstudio's ``Cameras``; extraction reads ``height`` and ``width`` in pixels."""
    scale_factor: float
    """Factor by which images are scaled when they are read."""

    def __len__(self) -> int: ...

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        """Returns the pixels of an image, uint8, (height, width, 3 or 4)."""
        ...


def full_size(dataset: ImageDataset) -> ImageDataset:
    """Returns the data set with its images at the size of the photos; itself where it does not scale them."""
    scaled = getattr(dataset, "at_scale", None)
    return dataset if scaled is None or dataset.scale_factor == 1.0 else scaled(1.0)


def image_key(image: UInt8[np.ndarray, "h w c"]) -> str:
    """Returns the key of an image: 32 hex digits of the BLAKE2b hash of its shape and pixels."""
    digest = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def set_key(keys: Sequence[str]) -> str:
    """Returns the key of a set of images, 16 hex digits, which does not depend on their order."""
    return hashlib.blake2b("".join(sorted(set(keys))).encode(), digest_size=8).hexdigest()


def blend_background(
    image: UInt8[np.ndarray, "h w c"], color: UInt8[np.ndarray, "3"] = WHITE
) -> UInt8[np.ndarray, "h w 3"]:
    """Lays an RGBA image over a colour; returns an RGB image as it is.

    >>> blend_background(np.array([[[200, 0, 0, 0]]], dtype=np.uint8)).tolist()
    [[[255, 255, 255]]]
    """
    if image.shape[2] == 3:
        return image
    alpha = image[..., 3:].astype(np.uint16)
    return ((image[..., :3] * alpha + color * (255 - alpha) + 127) // 255).astype(np.uint8)


class ImageIndex:
    """Remembers the key of each file, so that a run need not decode every image when it starts.

    An entry counts only while the file keeps its size and modification time. A lost or damaged index costs time and
    nothing else. One file serves all captures and is replaced as a whole.
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
            self._entries = {
                name: entry
                for name, entry in entries.items()
                if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str)
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._entries = {}

    def get(self, name: str, signature: tuple[int, int]) -> str | None:
        """Returns the key of a file, or None if the file is unknown or has changed."""
        entry = self._new.get(name) or self._entries.get(name)
        return entry[2] if entry is not None and tuple(entry[:2]) == signature else None

    def set(self, name: str, signature: tuple[int, int], key: str) -> None:
        """Remembers a file's key; :meth:`save` writes it to the disk."""
        self._new[name] = [*signature, key]

    def save(self, *, now: bool = True) -> None:
        """Writes the index at once, or else every few seconds. Failures are ignored, because it only saves time."""
        if not self._new or not (now or time.monotonic() - self._saved_s > _SAVE_EVERY_S):
            return
        self._saved_s = time.monotonic()
        # The whole file is replaced, so what other processes have added meanwhile has to be in it.
        self.refresh()
        entries = list({**self._entries, **self._new}.items())[-_MAX_INDEX_ENTRIES:]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({"format": 1, "entries": dict(entries)}, indent=0).encode())
        except OSError:
            return


@dataclass(frozen=True)
class Decoded:
    key: str
    """Key of the image, see :func:`image_key`."""
    pixels: UInt8[np.ndarray, "h w 3"]
    """RGB; a transparent image is laid on white."""
    file: Path


class ImageSet:
    """The images of one data set and those of their keys that are known."""

    def __init__(self, dataset: ImageDataset, index: ImageIndex):
        self.dataset = dataset
        self.index = index
        self._keys: list[str | None] = [None] * len(dataset)
        self.look_up()

    def __len__(self) -> int:
        return len(self._keys)

    def known_keys(self) -> list[str | None]:
        """Returns the key of each image, None where it is not known yet."""
        return list(self._keys)

    def keys(self) -> list[str]:
        """Returns the key of each image. Decodes the images whose key is unknown."""
        unknown = [i for i, key in enumerate(self._keys) if key is None]
        for _ in decode([(self, i) for i in unknown], ahead=_DECODERS):
            pass
        return [key for key in self._keys if key is not None]

    def look_up(self) -> None:
        """Takes the missing keys from the index, where it knows them."""
        for i, key in enumerate(self._keys):
            file = self._file(i) if key is None else None
            if file is not None:
                self._keys[i] = self.index.get(*file)

    def read(self, i: int) -> Decoded:
        """Decodes an image and remembers its key. Safe to call from several threads.

        Raises:
            CaptureError: The image cannot be read.
        """
        file = self._file(i)
        try:
            image = self.dataset.get_numpy_image(i)
        except (OSError, SyntaxError, ValueError, AssertionError) as error:
            raise CaptureError(
                f"Image {self.name(i)} cannot be read ({error}): mend or replace it, or take it out of the capture."
            ) from error
        self._keys[i] = key = image_key(image)
        if file is not None:
            self.index.set(*file, key)
        return Decoded(key, blend_background(image), Path(self.name(i)))

    def name(self, i: int) -> str:
        """Returns the path of an image, for messages."""
        return str(self.dataset.image_filenames[i])

    def size_px(self, i: int) -> tuple[int, int]:
        """Returns height and width of an image according to its camera."""
        cameras = self.dataset.cameras
        return int(cameras.height[i]), int(cameras.width[i])

    def _file(self, i: int) -> tuple[str, tuple[int, int]] | None:
        """Returns an image's name in the index and its file's size and modification time; None without a file."""
        path = os.path.abspath(self.dataset.image_filenames[i])
        try:
            stat = os.stat(path)
        except OSError:
            return None
        loader = f"{type(self.dataset).__name__}|{self.dataset.scale_factor}|{path}"
        identity = getattr(self.dataset, "pixels_identity", None)
        if identity is not None:
            loader += f"|{identity(i)}"
        return loader, (stat.st_size, stat.st_mtime_ns)


def decode(todo: Sequence[tuple[ImageSet, int]], *, ahead: int) -> Generator[tuple[ImageSet, int, Decoded], None, None]:
    """Yields decoded images in order. A few threads decode them, at most ``ahead`` images in advance."""
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
