"""Masks of photos: found by name, checked, and turned and reduced as their photos were."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageOps

from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError, reason_of
from f3rm_ext.sfm.photos import SUFFIXES, Photo
from f3rm_ext.utils.pictures import UNREADABLE


def find_masks(folder: Path, photos: Sequence[Path], images: Path) -> dict[Path, Path]:
    """Returns the mask of each photo: ``a.png`` or ``a.jpg.png`` for ``a.jpg``, in the same subfolder.

    Args:
        folder: folder of the masks.

    Raises:
        CaptureError: photos have no mask.
    """
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder: give the folder of the masks with --masks.")
    there: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            there[path.relative_to(folder).with_suffix("").as_posix()] = path
    found: dict[Path, Path] = {}
    for photo in photos:
        name = photo.relative_to(images)
        mask = there.get(name.as_posix()) or there.get(name.with_suffix("").as_posix())
        if mask is not None:
            found[photo] = mask
    missing = [photo.relative_to(images) for photo in photos if photo not in found]
    if missing:
        raise CaptureError(
            f"{len(missing)} of {len(photos)} photos have no mask in {folder} ({name_some(missing)}): "
            "add them (white keeps everything), or leave those photos out."
        )
    return found


def read_mask(path: Path, photo_path: Path, photo: Photo) -> Bool[np.ndarray, "h w"]:
    """Reads a mask and brings it to the size of its photo in the capture.

    Args:
        path: the mask; what is darker than half grey is ignored.
        photo_path: the original photo, whose EXIF orientation applies to a mask that is not upright yet.

    Raises:
        CaptureError: the mask cannot be read or has another size than its photo.
    """
    try:
        with Image.open(path) as image:
            mask = image.convert("L")
        with Image.open(photo_path) as original:
            orientation = original.getexif().get(274, 1)
    except UNREADABLE as error:
        raise CaptureError(f"The mask {path} cannot be read ({reason_of(error)}): write it again.") from error
    stored = photo.stored_size
    upright = stored[::-1] if photo.turned and orientation >= 5 else stored
    if mask.size == stored and photo.turned and (stored != upright or orientation < 5):
        mask.getexif()[274] = orientation
        mask = ImageOps.exif_transpose(mask)
    elif mask.size != upright:
        raise CaptureError(
            f"The mask {path} has {mask.width} × {mask.height} pixels, but its photo has {upright[0]} × {upright[1]}: "
            "make masks of the photos' size."
        )
    if mask.size != (photo.width, photo.height):
        mask = mask.resize((photo.width, photo.height), Image.Resampling.NEAREST)
    return np.asarray(mask) >= 128
