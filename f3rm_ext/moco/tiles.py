"""The pictures of a folder, decoded once into a memory-mapped array of bytes."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.pictures import SUFFIXES, WHOLE_PICTURE, PictureOptions, read_tiles
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.json_shape import parse_json
from f3rm_ext.utils.pictures import UNREADABLE
from f3rm_ext.utils.provenance import MADE_BY

COMMAND = "f3rm-ext moco train"
LIST = "tiles.json"
"""The first file that a run writes, which marks the folder as its own."""
_ARRAY = "tiles.npy"


class _List(TypedDict):
    fingerprint: str
    files: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Tiles:
    array: Path
    """The bytes, (tiles, side, side, 3), as a .npy file."""
    files: tuple[str, ...]
    """File of each tile, relative to the folder, with row and column if a picture gives several tiles."""
    skipped: dict[str, str]
    """Reason why each unreadable file was skipped."""
    fingerprint: str
    """Hash of the files, their sizes and times, the side of the views and the options of decoding; 16 hex digits."""

    def __len__(self) -> int:
        return len(self.files)

    def open(self) -> UInt8[np.ndarray, "tiles side side 3"]:
        return np.load(self.array, mmap_mode="r", allow_pickle=False)


def find_files(folder: Path) -> list[Path]:
    """Returns the pictures of a folder and its subfolders, sorted.

    Raises:
        ConfigError: There is no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"--data is {folder}, which is no folder: give the folder of your pictures.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise ConfigError(f"There are no pictures in {folder}: give files that end in {', '.join(sorted(SUFFIXES))}.")
    return paths


def prepare(
    folder: Path,
    cache: Path,
    image_size: int,
    reading: PictureOptions = WHOLE_PICTURE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tiles:
    """Decodes a folder of pictures into an array in `cache`, or opens that of an earlier call.

    The side of all tiles is the median short side of the pictures (or of the tiles that they are cut into), clamped to
    1 to 2 times `image_size`, so that partial crops are still sharp. Unreadable files are skipped and listed.

    Raises:
        ConfigError: There are no readable pictures, or the cache cannot be written.
    """
    paths = find_files(folder)
    stats = [(str(path.relative_to(folder)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    fingerprint = hashlib.sha256(json.dumps([image_size, asdict(reading), stats]).encode()).hexdigest()[:16]
    known = _read_list(cache / LIST)
    if known.get("fingerprint") == fingerprint and (cache / _ARRAY).is_file():
        return Tiles(cache / _ARRAY, tuple(known["files"]), dict(known["skipped"]), fingerprint)
    temporary = cache / f".{_ARRAY}.{os.getpid()}.tmp"
    is_new = not (cache / LIST).exists()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(cache / LIST, json.dumps({MADE_BY: COMMAND}).encode())
        side = _tile_side(paths, image_size, reading)
        files, skipped = _decode(folder, paths, temporary, side, reading, progress)
        temporary.replace(cache / _ARRAY)
        record = {MADE_BY: COMMAND, "fingerprint": fingerprint, "files": files, "skipped": skipped}
        write_atomic(cache / LIST, json.dumps(record, indent=1).encode())
    except OSError as error:
        if is_new:
            (cache / LIST).unlink(missing_ok=True)
        raise ConfigError(
            f"The tiles cannot be written to {cache} ({error.strerror or error}): free space or use another --output."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Tiles(cache / _ARRAY, tuple(files), skipped, fingerprint)


def _decode(
    folder: Path,
    paths: Sequence[Path],
    out: Path,
    side: int,
    reading: PictureOptions,
    progress: Callable[[int, int], None],
) -> tuple[list[str], dict[str, str]]:
    """Writes the readable tiles in turn, then rewrites the header with their number."""
    files: list[str] = []
    skipped: dict[str, str] = {}
    with out.open("w+b") as stream:
        _header(stream, len(paths), side)
        start = stream.tell()
        for done, path in enumerate(paths, 1):
            name = str(path.relative_to(folder))
            try:
                tiles = read_tiles(path, side, reading)
                for place, tile in tiles.items():
                    stream.write(tile.tobytes())
                    files.append(name + (place if len(tiles) > 1 else ""))
            except UNREADABLE as error:
                if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                    raise  # from our file, not from a damaged picture
                skipped[name] = str(error)
            progress(done, len(paths))
        if not files:
            name, reason = next(iter(skipped.items()))
            raise ConfigError(
                f"None of the {len(paths)} pictures in {folder} can be read (the reason for {name} is: {reason}): "
                "convert them or copy them again."
            )
        stream.seek(0)
        _header(stream, len(files), side)
        if stream.tell() != start:
            raise RuntimeError("the header of the tiles has changed its length")
        stream.flush()
        os.fsync(stream.fileno())
    return files, skipped


def _header(stream: BinaryIO, count: int, side: int) -> None:
    """Writes a header whose length does not depend on the number of tiles: numpy pads it to grow."""
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "|u1", "fortran_order": False, "shape": (count, side, side, 3)}
    )


def _tile_side(paths: Sequence[Path], image_size: int, reading: PictureOptions) -> int:
    if reading.tile_px is not None:
        return min(max(reading.tile_px, image_size), 2 * image_size)
    sides = []
    for path in paths[:: max(1, len(paths) // 200)]:
        try:
            with Image.open(path) as image:
                sides.append(min(image.size))
        except UNREADABLE:
            continue
    median = int(np.median(sides)) if sides else image_size
    return min(max(median, image_size), 2 * image_size)


def _read_list(path: Path) -> dict:
    try:
        return dict(parse_json(path.read_bytes(), _List))
    except (OSError, ValueError):
        return {}
