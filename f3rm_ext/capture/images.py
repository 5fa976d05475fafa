"""Checks of image files: present, readable and complete; their sizes; and what masks keep."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image

from f3rm_ext.errors import CaptureError
from f3rm_ext.utils.pictures import MOST_PIXELS, UNREADABLE

USABLE_MODES = ("L", "RGB", "RGBA")
_GREY_MODES = ("1", "L", "I", "I;16", "F")
_TAIL_BYTES = 1 << 16
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_THREADS = 8
_NAMED = 5
COPY_FACTORS = (2, 4, 8, 16)
"""Factors of the reduced copies of photos that programs write, which the names of their folders end in."""


def allow_large_photos() -> None:
    """Lets Pillow read pictures of up to :data:`MOST_PIXELS` from now on, such as the 200 megapixels of some phones.

    Photos of a capture are read by many threads until the process ends, so there is no end to it.
    """
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # it refuses twice this number


def name_some(names: Sequence[object]) -> str:
    """Returns up to five names, and how many more there are.

    >>> name_some(["a.png", "b.png"]), name_some(range(7))
    ('a.png, b.png', '0, 1, 2, 3, 4 and 2 more')
    """
    examples = ", ".join(str(name) for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"{examples} and {more} more" if more > 0 else examples


def tell_apart(files: Sequence[Path | str]) -> list[str]:
    """The names of files, with as many of their folders as it takes to tell them apart.

    >>> tell_apart([Path("room/left/1.png"), Path("room/right/1.png"), Path("room/right/2.png")])
    ['left/1.png', 'right/1.png', '2.png']
    """
    paths = [Path(file) for file in files]
    names = {path: path.name for path in paths}
    for parts in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        counts = Counter(names.values())
        names = {
            path: name if counts[name] == 1 else Path(*path.parts[-parts:]).as_posix() for path, name in names.items()
        }
    return [names[path] for path in paths]


def image_size(path: Path, *, mask: bool = False) -> tuple[int, int]:
    """Returns width and height of an image file, px, after checking it.

    The file is decoded only if it does not end like a complete JPEG or PNG file.

    Raises:
        CaptureError: the file is missing, unreadable, cut short, or of a kind that cannot be trained on.
    """
    try:
        with Image.open(path) as image:
            if not mask and image.mode not in USABLE_MODES:
                raise CaptureError(
                    f"The image {path} has colour mode {image.mode}, which would be misread: "
                    "convert it to 8-bit RGB, RGBA or grey."
                )
            size = image.size
            if not ends_whole(path, image.format):
                image.load()
    except FileNotFoundError as error:
        raise CaptureError(f"The image {path} is not there: copy it back, or take its frame out.") from error
    except UNREADABLE as error:
        reason = str(error).replace(f" {str(path)!r}", "").rstrip(".") or type(error).__name__
        raise CaptureError(
            f"The image {path} is damaged or not an image ({reason}): "
            "export it again, or take its frame out of transforms.json."
        ) from error
    return size


def image_sizes(paths: Sequence[Path], *, masks: bool = False) -> list[tuple[int, int]]:
    """Returns :func:`image_size` of many files, read in threads."""
    with ThreadPoolExecutor(max_workers=min(_THREADS, 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda path: image_size(path, mask=masks), paths))


def read_mask(path: Path) -> Bool[np.ndarray, "h w"]:
    """Returns the pixels that a mask keeps: those that are not black and, where it has alpha, not transparent. Raises
    OSError, SyntaxError or ValueError if the file cannot be read."""
    with Image.open(path) as image:
        if image.mode in _GREY_MODES:
            return np.asarray(image) != 0
        colors = np.asarray(image.convert("RGBA")) != 0
    return colors[..., :3].any(axis=-1) & colors[..., 3]


def ends_whole(path: Path, image_format: str | None) -> bool:
    """Returns whether a file ends like a complete JPEG or PNG file; False for other formats."""
    mark = _END_MARKS.get(image_format or "")
    if mark is None:
        return False
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return mark in file.read()
