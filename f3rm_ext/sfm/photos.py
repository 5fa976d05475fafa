"""Photos as people have them: found in a folder, turned upright, in forms that every trainer reads."""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image
from PIL.ExifTags import IFD, Base

from f3rm_ext.capture.images import COPY_FACTORS, name_some
from f3rm_ext.errors import CaptureError, reason_of
from f3rm_ext.utils.output_folder import SUMMARY, file_names
from f3rm_ext.utils.pictures import TURNS, UNREADABLE, open_photo, to_eight_bits, turn_upright
from f3rm_ext.utils.provenance import MADE_BY, read_provenance

SUFFIXES = {".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".avif", ".heic", ".heif"}
RAW_SUFFIXES = {".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2"}
AUXILIARY_FOLDERS = set(
    "confidence corrected_images depth depths images_undistorted labels mask masks masks_undistorted normals".split()
)
"""Subfolders of captures, and of what apps for scanning export, whose pictures are no photos or copies of others."""
_OUTPUTS = {"manifest.json", "sfm.json", SUMMARY}
"""Files that say of a folder that a command of this package made it."""
LOSSY = {"JPEG", "MPO", "WEBP", "AVIF", "HEIF"}
_JPEG_QUALITY = 95
_MOST_EXIF_BYTES = 65_533
"""Largest size of the EXIF data in a JPEG file, bytes."""
THUMBNAIL_PX = 640
"""Longest side of the grey copy on which sharpness is judged."""
_UNITS_MM = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}
"""Units of the resolution of the focal plane in EXIF."""
_SAME_ASPECT = 0.02
"""Largest relative difference of the sides' ratio of a photo that was reduced, not cropped."""


@dataclass(frozen=True)
class Photo:
    """A photo as it is written to the capture."""

    data: bytes
    """The file: the original's bytes where they can be used as they are."""
    suffix: str
    """Suffix of the file: .jpg or .png."""
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    camera: str
    """Camera, lens setting and size as text: photos with the same text can share intrinsics."""
    turned: bool
    """Whether the file had to be turned upright."""
    stored_size: tuple[int, int]
    """Width and height in the original file, before turning and reducing."""
    alpha: np.ndarray | None
    """Bool (h, w): what is not transparent; None if everything is opaque."""
    grey: Float[np.ndarray, "h w"]
    """A small grey copy, 0 to 1."""
    focal_px: float | None
    """Focal length by EXIF where the photo is smaller than EXIF says, px. COLMAP reads the others right."""


def find_photos(folder: Path, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Returns the photos of a folder and its subfolders, in natural order (2 before 10).

    What captures and exports of phones have beside their photos is left out: reduced copies, as in ``images_4`` beside
    ``images``, and the subfolders in :data:`AUXILIARY_FOLDERS`, unless they hold all the photos there are. So is what
    this package has made of the photos, and what is hidden.

    Args:
        say: is told what is left out.

    Raises:
        CaptureError: there is no folder, or no photo in it.
    """
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder: give a folder of photos with --images, or a file with --video.")
    files = list(_find_files(folder))
    outputs = {path.parent for path in files if path.name in _OUTPUTS and MADE_BY in read_provenance(path)} - {folder}
    pictures = {path: _auxiliary_folder(path, folder, outputs) for path in files if path.suffix.lower() in SUFFIXES}
    photos = [path for path, auxiliary in pictures.items() if not auxiliary] or list(pictures)
    counts = Counter(pictures[path] for path in pictures.keys() - photos)
    if counts:
        others = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))
        say(f"Left out, because there are photos in other folders: {others}.")
    if not photos and any(path.suffix.lower() in RAW_SUFFIXES for path in files):
        raise CaptureError(f"The photos in {folder} are raw camera files: develop them to JPEG or PNG first.")
    if not photos:
        raise CaptureError(f"There are no photos in {folder}: formats that are read are {', '.join(sorted(SUFFIXES))}.")
    return sorted(photos, key=lambda path: _natural_key(path.relative_to(folder).as_posix()))


def _find_files(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, which may be links, without hidden ones."""
    known: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in known:  # a link to a folder around it
            folders.clear()
            continue
        known.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(place, name)).is_file())


def _auxiliary_folder(path: Path, folder: Path, outputs: Collection[Path]) -> str:
    """Returns the subfolder that makes a picture no photo, relative to the folder; empty for a photo."""
    parents = path.relative_to(folder).parents
    for parent in parents:
        if parent.name.lower() in AUXILIARY_FOLDERS or folder / parent in outputs:
            return parent.as_posix()
    return parents[0].as_posix() if path.parent != folder and _is_reduced_copy(path) else ""


def _is_reduced_copy(path: Path) -> bool:
    """Returns whether a photo of ``name_4`` is a quarter of that in ``name`` beside it."""
    name, _, factor = path.parent.name.rpartition("_")
    original = path.parent.with_name(name or "_") / path.name
    if factor not in map(str, COPY_FACTORS) or not original.is_file():
        return False
    try:
        with Image.open(path) as small, Image.open(original) as large:
            return all(abs(a - b / int(factor)) < 1 for a, b in zip(small.size, large.size, strict=True))
    except UNREADABLE:
        return False


def _natural_key(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", text)]


def capture_names(paths: Sequence[Path], folder: Path) -> list[str]:
    """Returns a file name without suffix for each photo, unique and without spaces; subfolders become prefixes.

    >>> capture_names([Path("in/left/photo 1.jpg"), Path("in/right/photo 1.jpg")], Path("in"))
    ['left_photo_1', 'right_photo_1']
    """
    return file_names([path.relative_to(folder).with_suffix("").as_posix() for path in paths])


def read_photo(path: Path, max_size: int = 0) -> Photo:
    """Reads a photo and turns it into a form that can be trained on.

    Upright 8-bit JPEG and PNG files keep their bytes. Others are turned upright, made 8-bit and written as JPEG (from
    lossy formats) or PNG; EXIF data stay.

    Args:
        max_size: longest side, px; larger photos are reduced. 0 keeps the size.

    Raises:
        CaptureError: the file cannot be read.
    """
    try:
        with open_photo(path) as image:
            image.load()
            return _convert(path, image, max_size)
    except UNREADABLE as error:
        reason = reason_of(error).replace(f" {str(path)!r}", "")
        raise CaptureError(f"The photo {path} cannot be read ({reason}): export it again, or leave it out.") from error


def _convert(path: Path, image: Image.Image, max_size: int) -> Photo:
    exif = image.getexif()
    details = exif.get_ifd(IFD.Exif)
    format_, stored_size, original_mode = image.format or "", image.size, image.mode
    turned, upright = exif.get(Base.Orientation) in TURNS, turn_upright(image)
    reduced = bool(max_size) and max(upright.size) > max_size
    pixels = to_eight_bits(upright)
    if reduced:
        pixels.thumbnail((max_size, max_size), Image.Resampling.LANCZOS)
    alpha = np.asarray(pixels.getchannel("A")) >= 128 if pixels.mode == "RGBA" else None
    keep = not turned and not reduced and pixels.mode == original_mode and format_ in ("JPEG", "PNG")
    if keep:
        data, suffix = path.read_bytes(), ".jpg" if format_ == "JPEG" else ".png"
    else:
        stream = io.BytesIO()
        suffix = ".jpg" if format_ in LOSSY and pixels.mode != "RGBA" else ".png"
        if suffix == ".jpg":
            pixels.save(stream, "JPEG", quality=_JPEG_QUALITY, subsampling=0, exif=_encode_exif(exif))
        else:
            pixels.save(stream, "PNG", compress_level=4, exif=_encode_exif(exif))
        data = stream.getvalue()
    small = pixels.convert("L")
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.BOX)
    lens = [exif.get(Base.Make, ""), exif.get(Base.Model, "")]
    lens += [details.get(Base.FocalLength, ""), details.get(Base.FocalLengthIn35mmFilm, "")]
    camera = " ".join([*(str(part).strip(" \0") for part in lens if part), f"{pixels.width}x{pixels.height}"])
    return Photo(
        data=data,
        suffix=suffix,
        width=pixels.width,
        height=pixels.height,
        camera=camera,
        turned=turned,
        stored_size=stored_size,
        alpha=None if alpha is None or bool(alpha.all()) else alpha,
        grey=np.asarray(small, dtype=np.float64) / 255,
        focal_px=_reduced_focal_px(details, pixels.size),
    )


def _encode_exif(exif: Image.Exif) -> bytes:
    """Returns the EXIF data of an upright photo, without entries that cannot be written."""
    exif[Base.Orientation] = 1
    if _can_encode(exif):
        return exif.tobytes()
    plain = Image.Exif()
    for source, target in ((exif, plain), (exif.get_ifd(IFD.Exif), plain.get_ifd(IFD.Exif))):
        for tag, value in source.items():
            target[tag] = value
            if not _can_encode(plain):
                del target[tag]
    return plain.tobytes()


def _can_encode(exif: Image.Exif) -> bool:
    try:
        return len(exif.tobytes()) <= _MOST_EXIF_BYTES
    except Exception:  # of many kinds, as entries may have any type
        return False


def _reduced_focal_px(details: Mapping[int, Any], size: tuple[int, int]) -> float | None:
    """Returns the focal length of a photo that is smaller than its EXIF says; None for others.

    COLMAP takes the resolution of the focal plane as it stands, which is that of the photo before it was reduced.
    """
    if details.get(Base.FocalLengthIn35mmFilm):
        return None  # does not depend on the size
    names = (Base.FocalLength, Base.FocalPlaneXResolution, Base.ExifImageWidth, Base.ExifImageHeight)
    try:
        focal_mm, resolution, *full_size = (float(details[name]) for name in names)
        pixels_per_mm = resolution / _UNITS_MM[details.get(Base.FocalPlaneResolutionUnit, 2)]
        scale = max(size) / max(full_size)
        is_reduced = scale < 1 and abs(min(size) / scale / min(full_size) - 1) < _SAME_ASPECT
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    focal_px = focal_mm * pixels_per_mm * scale
    return focal_px if is_reduced and np.isfinite(focal_px) and focal_px > 0 else None


def find_masks(folder: Path, photos: Sequence[Path], images: Path) -> dict[Path, Path]:
    """Returns the mask of each photo: ``a.png`` or ``a.jpg.png`` for ``a.jpg``, in the same subfolder. Raises
    CaptureError if photos have no mask."""
    if not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder: give the folder of the masks with --masks.")
    files = [path for path in sorted(_find_files(folder)) if path.suffix.lower() in SUFFIXES]
    by_name = {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}
    masks: dict[Path, Path] = {}
    for photo in photos:
        name = photo.relative_to(images)
        mask = by_name.get(name.as_posix()) or by_name.get(name.with_suffix("").as_posix())
        if mask is not None:
            masks[photo] = mask
    missing = [photo.relative_to(images) for photo in photos if photo not in masks]
    if missing:
        raise CaptureError(
            f"{len(missing)} of {len(photos)} photos have no mask in {folder} ({name_some(missing)}): "
            "add them (white keeps everything), or leave those photos out."
        )
    return masks


def _kept_pixels(image: Image.Image) -> Bool[np.ndarray, "h w"]:
    """Returns what a mask keeps: all that is not black, as in masks of classes; in grey ones what is at least half as
    bright as the brightest."""
    if image.mode in ("1", "F") or image.mode.startswith("I"):
        levels, is_grey = np.asarray(image).astype(np.float64), True
    else:
        pixels = np.asarray(image.convert("RGBA"))
        levels = np.where(pixels[..., 3] >= 128, pixels[..., :3].max(axis=-1), 0)
        is_grey = image.mode != "P" and bool((pixels[..., :3] == pixels[..., :1]).all())
    brightest = levels.max(initial=0)
    is_soft = image.format in LOSSY or (is_grey and brightest >= 128)
    return levels >= brightest / 2 if is_soft and brightest else levels > 0


def read_mask(path: Path, photo_path: Path, photo: Photo) -> Bool[np.ndarray, "h w"]:
    """Reads a mask and resizes it to its photo in the capture.

    Args:
        path: the mask; what is black or transparent is ignored. Soft masks and lossy files are cut at half grey.
        photo_path: the original photo, whose EXIF orientation applies to masks that are not upright.

    Raises:
        CaptureError: the mask cannot be read or has another size than its photo.
    """
    try:
        with Image.open(path) as image:
            mask = Image.fromarray(np.where(_kept_pixels(image), 255, 0).astype(np.uint8))
        with Image.open(photo_path) as original:
            orientation = original.getexif().get(Base.Orientation, 1)
    except UNREADABLE as error:
        raise CaptureError(f"The mask {path} cannot be read ({reason_of(error)}): write it again.") from error
    stored = photo.stored_size
    upright = stored[::-1] if photo.turned and orientation >= 5 else stored
    if mask.size == stored and photo.turned and (stored != upright or orientation < 5):
        mask = mask.transpose(TURNS[orientation])
    elif mask.size != upright:
        raise CaptureError(
            f"The mask {path} has {mask.width} × {mask.height} pixels, but its photo has {upright[0]} × {upright[1]}: "
            "make masks of the photos' size."
        )
    if mask.size != (photo.width, photo.height):
        mask = mask.resize((photo.width, photo.height), Image.Resampling.NEAREST)
    return np.asarray(mask) >= 128
