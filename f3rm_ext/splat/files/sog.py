"""Splats as SOG, PlayCanvas' format (version 2): lossless WebP textures and ``meta.json``, in a ZIP or in a folder.

Positions have 16 bits in a logarithmic space, rotations 26, opacities 8. Sizes and colours are bytes that point into a
codebook each. Spherical harmonics are 16 bits that point into a palette of up to 65,536 sets of coefficients, which are
bytes that point into a third codebook. Coordinates are those of PLY files, as splat-transform writes them, although the
specification speaks of y up. Specification: "The SOG format" in PlayCanvas' user manual.
"""

import io
import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.checks import is_plausible
from f3rm_ext.splat.files.clustering import ENTRIES, cluster_vectors, fit_codebook, nearest_entries
from f3rm_ext.splat.files.info import RenderMode, SplatInfo, read_tags, tag_comments
from f3rm_ext.splat.gaussians import Gaussians, sh_rest_count
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.json_shape import convert_json, parse_json
from f3rm_ext.utils.pictures import UNREADABLE

ZIP = b"PK\x03\x04"
META = "meta.json"
_ANTIALIASED = "antialiased"
_ROW = 64
"""Sets of coefficients in a row of the palette's texture."""
_LARGEST_PALETTE = 1 << 16
_FIRST_TAG = 252
"""Alpha of a rotation whose largest component is w."""
_BYTES = 20
"""Bytes of a Gaussian in the textures."""
_LONGEST_META = 1 << 20
_SLOW = 20_000
"""From so many Gaussians on, clustering shows its progress."""


_Codebook = Annotated[list[float | None], msgspec.Meta(min_length=ENTRIES, max_length=ENTRIES)]


@dataclass
class _Means:
    mins: tuple[float, float, float]
    maxs: tuple[float, float, float]
    files: tuple[str, str]


@dataclass
class _Rotations:
    files: tuple[str]


@dataclass
class _Coded:
    codebook: _Codebook
    files: tuple[str]


@dataclass
class _Palette:
    count: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_PALETTE)]
    bands: Annotated[int, msgspec.Meta(ge=1, le=3)]
    codebook: _Codebook
    files: tuple[str, str]


@dataclass
class _Meta:
    count: Annotated[int, msgspec.Meta(ge=0)]
    means: _Means
    scales: _Coded
    quats: _Rotations
    sh0: _Coded
    shN: _Palette | None = None
    antialias: bool | None = None
    model: str | None = None


def read_sog(path: Path) -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked.

    Args:
        path: a ``.sog`` file, or the ``meta.json`` beside the textures.

    Raises:
        SplatFileError: the file is of another kind or version, damaged, or cut short.
    """
    tree, meta = _read_meta(path)
    parts = [meta.means, meta.scales, meta.quats, meta.sh0, *([meta.shN] if meta.shN else [])]
    data = {name: _read_entry(path, name) for part in parts for name in part.files}
    held = sum(map(len, data.values()))
    if not is_plausible(meta.count * _BYTES, held):
        raise _damage_error(path, f"its {META} claims {meta.count} Gaussians, but its textures have {held} bytes")

    def rows(name: str) -> UInt8[np.ndarray, "count 4"]:
        def fits(width: int, height: int) -> bool:
            return meta.count <= width * height <= 4 * meta.count + _LARGEST_PALETTE

        return _decode(path, name, data[name], fits, f"{meta.count} Gaussians")[: meta.count]

    low, high = (rows(name)[:, :3].astype(np.uint32) for name in meta.means.files)
    mins, maxs = np.array(meta.means.mins), np.array(meta.means.maxs)
    with np.errstate(over="ignore", invalid="ignore"):  # a later check finds values that are not finite
        logs = mins + (maxs - mins) * ((high << 8 | low) / 65535)
        means = (np.sign(logs) * np.expm1(np.abs(logs))).astype(np.float32)
    scales = _codebook(path, meta.scales.codebook)[rows(meta.scales.files[0])[:, :3]]
    colors = rows(meta.sh0.files[0])
    dc = _codebook(path, meta.sh0.codebook)[colors[:, :3]]
    opacities = packing.alphas_to_logits(colors[:, 3] / 255.0)
    quats = _unpack_rotations(rows(meta.quats.files[0]))
    rest = np.zeros((meta.count, 0, 3), np.float32)
    if meta.shN:
        rest = _unpack_harmonics(path, meta.shN, data[meta.shN.files[0]], rows(meta.shN.files[1]))
    mode, fused, comments = read_tags(_comments(tree))
    if meta.antialias is not None or meta.model is not None:
        mode = "mip" if meta.antialias or meta.model == _ANTIALIASED else "default"
    notices = [f"{path.name} holds 2D Gaussians, which are read as 3D ones."] if meta.model == "2dgs" else []
    gaussians = Gaussians.from_arrays(means, scales, quats, opacities, dc, rest)
    return gaussians, SplatInfo("sog", mode, fused, gaussians.sh_degree, meta.count, comments, tuple(notices))


def write_sog(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats as a ZIP. Neighbours in the file should be neighbours in space; see :func:`packing.morton_order`.

    Args:
        info: its render mode, tags and comments go into ``meta.json``.
    """
    arrays = gaussians.arrays()
    alphas = packing.pack_unorm(packing.logits_to_alphas(arrays["opacities"]), 8).astype(np.uint8)[:, None]
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        meta = {
            "version": 2,
            "asset": {"generator": "f3rm_ext", "extras": {"comments": tag_comments(info)}},
            "count": len(gaussians),
            **_MODES.get(info.render_mode, {}),
            "means": _write_means(archive, arrays["means"]),
            "scales": _write_coded(archive, "scales.webp", arrays["scales"]),
            "quats": _write_rotations(archive, arrays["quats"]),
            "sh0": _write_coded(archive, "sh0.webp", arrays["features_dc"], alphas),
        }
        if gaussians.sh_degree:
            meta["shN"] = _write_harmonics(archive, gaussians)
        archive.writestr(zipfile.ZipInfo(META), json.dumps(meta, separators=(",", ":")))


def read_sog_comments(path: Path) -> list[str]:
    """Returns the comments that :func:`write_sog` wrote; raises SplatFileError or ValueError if it is no SOG."""
    return _comments(parse_json(_read_entry(path, META), dict[str, Any]))


def palette_size(count: int) -> int:
    """Returns the number of sets of coefficients for a number of Gaussians, which is that of splat-transform.

    >>> [palette_size(count) for count in (1, 300, 50_000, 10_000_000)]
    [1, 256, 32768, 65536]
    """
    return min(_LARGEST_PALETTE, 1 << (count.bit_length() - 1))


_MODES: dict[RenderMode | None, dict[str, object]] = {
    "mip": {"antialias": True, "model": _ANTIALIASED},
    "default": {"antialias": False},
}
"""Entries for a render mode: ``antialias`` of the specification, and ``model`` of splat-transform 3.2 and later."""


def _write_means(archive: zipfile.ZipFile, means: Float[np.ndarray, "n 3"]) -> dict[str, Any]:
    wide = means.astype(np.float64)
    logs = np.sign(wide) * np.log1p(np.abs(wide))
    mins, maxs = logs.min(axis=0), logs.max(axis=0)
    extent = maxs - mins
    fixed = packing.pack_unorm((logs - mins) / np.where(extent > 0, extent, 1), 16)
    low, high = (fixed & 255).astype(np.uint8), (fixed >> 8).astype(np.uint8)
    files = [_write_texture(archive, "means_l.webp", low), _write_texture(archive, "means_u.webp", high)]
    return {"mins": mins.tolist(), "maxs": maxs.tolist(), "files": files}


def _write_coded(
    archive: zipfile.ZipFile,
    name: str,
    values: Float[np.ndarray, "n 3"],
    alphas: UInt8[np.ndarray, "n 1"] | None = None,
) -> dict[str, Any]:
    codebook = fit_codebook(values.ravel())
    entries = nearest_entries(values, codebook)
    pixels = entries if alphas is None else np.concatenate([entries, alphas], axis=1)
    return {"codebook": codebook.tolist(), "files": [_write_texture(archive, name, pixels)]}


def _write_rotations(archive: zipfile.ZipFile, quats: Float[np.ndarray, "n 4"]) -> dict[str, Any]:
    largest, others = packing.drop_largest(packing.unit_quats(quats))
    packed = packing.pack_unorm(others * packing.HALF_DIAGONAL + 0.5, 8)
    pixels = np.concatenate([packed, _FIRST_TAG + largest[:, None]], axis=1).astype(np.uint8)
    return {"files": [_write_texture(archive, "quats.webp", pixels)]}


def _write_harmonics(archive: zipfile.ZipFile, gaussians: Gaussians) -> dict[str, Any]:
    """Writes a palette of coefficients, and the entry of each Gaussian.

    An error matters as much as the picture shows of it: Gaussians count by their opacity and their area.
    """
    rest = gaussians.features_rest.detach().float()
    area = gaussians.scales.detach().double().sort(dim=1)[0][:, 1:].sum(dim=1).exp()
    weights = (area * gaussians.alphas().detach().double()).clamp_min(1e-30).float()
    with image_progress("cells", disable=len(rest) < _SLOW) as progress:
        task = progress.add_task("Palette of harmonics", total=None)
        palette, labels = cluster_vectors(
            rest.flatten(1),
            palette_size(len(rest)),
            weights,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    codebook = fit_codebook(palette.numpy().ravel())
    coefficients = nearest_entries(palette.numpy(), codebook).reshape(-1, 3)
    halves = labels.numpy().astype("<u2")[:, None].view(np.uint8)
    files = [
        _write_texture(archive, "shN_centroids.webp", coefficients, _ROW * rest.shape[1]),
        _write_texture(archive, "shN_labels.webp", halves),
    ]
    return {"count": len(palette), "bands": gaussians.sh_degree, "codebook": codebook.tolist(), "files": files}


def _write_texture(
    archive: zipfile.ZipFile, name: str, values: UInt8[np.ndarray, "n channels"], width: int | None = None
) -> str:
    """Writes a texture with a pixel for each row of values, and returns its name.

    Args:
        values: in the first channels; other colours are 0, and other alphas 255.
        width: pixels in a row; None for that of splat-transform.
    """
    count = len(values)
    step = 4 if width is None else 1
    width = width or 4 * math.ceil(math.sqrt(count) / 4)
    height = step * math.ceil(count / width / step)
    pixels = np.zeros((height * width, 4), np.uint8)
    pixels[:, 3] = 255
    pixels[:count, : values.shape[1]] = values
    picture = io.BytesIO()
    Image.fromarray(pixels.reshape(height, width, 4)).save(picture, "WEBP", lossless=True, exact=True)
    archive.writestr(zipfile.ZipInfo(name), picture.getvalue())  # with the time 1980, the same at any time
    return name


def _unpack_rotations(pixels: UInt8[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
    """Returns quaternions w x y z; zeros, which a later check finds, where there is none."""
    largest = pixels[:, 3].astype(np.int64) - _FIRST_TAG
    others = (pixels[:, :3] / 255.0 - 0.5) / packing.HALF_DIAGONAL
    quats = packing.insert_largest(np.maximum(largest, 0), others)
    return np.where(largest[:, None] < 0, 0, quats).astype(np.float32)


def _unpack_harmonics(
    path: Path, palette: _Palette, data: bytes, labels: UInt8[np.ndarray, "n 4"]
) -> Float[np.ndarray, "n coeffs 3"]:
    per_channel = sh_rest_count(palette.bands)

    def fits(width: int, height: int) -> bool:
        return width == _ROW * per_channel and height * _ROW >= palette.count

    pixels = _decode(path, palette.files[0], data, fits, f"{palette.count} sets of harmonics")
    chosen = labels[:, 0].astype(np.int64) | labels[:, 1].astype(np.int64) << 8
    if len(chosen) and chosen.max() >= palette.count:
        raise _damage_error(path, f"it points to harmonics {chosen.max()} of {palette.count}")
    values = _codebook(path, palette.codebook)[pixels[:, :3]].reshape(-1, per_channel, 3)
    return values[chosen]


def _codebook(path: Path, values: list[float | None]) -> Float[np.ndarray, " 256"]:
    """Returns a codebook. The first entry of some early files is null; PlayCanvas' engine extrapolates it."""
    first, *rest = values
    known = [value for value in rest if value is not None]
    if len(known) < len(rest):
        raise _damage_error(path, "a codebook lacks entries")
    if first is None:
        first = known[0] + (known[0] - known[-1]) / (ENTRIES - 1)
    with np.errstate(over="ignore"):
        return np.array([first, *known]).astype(np.float32)


def _read_meta(path: Path) -> tuple[dict[str, Any], _Meta]:
    try:
        tree = parse_json(_read_entry(path, META), dict[str, Any])
        if "means" not in tree:
            raise ValueError("it describes no Gaussians")
        version = tree.get("version", 1)
        if version != 2:
            raise SplatFileError(
                f"{path} has version {version!s:.20} of SOG, but only version 2 is supported: export it again, or "
                "convert it with splat-transform."
            )
        return tree, convert_json(tree, _Meta)
    except ValueError as error:
        raise SplatFileError(f"{path} is damaged or no SOG: {META}: {error}. Copy or export it again.") from error


def _comments(tree: dict[str, Any]) -> list[str]:
    """Returns the comments in a tree whose other entries may have any shape."""
    try:
        return convert_json(tree["asset"]["extras"]["comments"], list[str])
    except (KeyError, TypeError, ValueError):
        return []


def _read_entry(path: Path, name: str) -> bytes:
    """Reads a file of a SOG.

    Args:
        path: the ZIP, or ``meta.json`` in a folder.
        name: name in the same ZIP or folder.

    Raises:
        SplatFileError: there is no such file, it is damaged, or it claims to be longer than such files are.
    """
    if Path(name).name != name or "\\" in name or not name.isprintable():
        raise _damage_error(path, f"it names the texture {name!r}, which is no plain file name")
    if path.suffix.lower() == ".json":
        file = path if name == META else path.parent / name
        if not file.is_file():
            raise SplatFileError(f"{path} names {name}, which is not beside it: copy the whole folder.")
        if name == META and file.stat().st_size > _LONGEST_META:
            raise _damage_error(path, f"{name} has {file.stat().st_size} bytes")
        return file.read_bytes()
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(name)
            stored = entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and not entry.flag_bits & 1
            # Textures are compressed already, so that a ZIP makes them hardly smaller.
            longest = _LONGEST_META if name == META else 2 * path.stat().st_size + _LONGEST_META
            if not stored or entry.file_size > longest:
                raise _damage_error(
                    path, f"{name} claims {entry.file_size} bytes, or is encrypted or compressed in a rare way"
                )
            return archive.read(entry)
    except KeyError:
        raise _damage_error(path, f"there is no {name} in it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise _damage_error(path, str(error)) from error


def _decode(
    path: Path, name: str, data: bytes, fits: Callable[[int, int], bool], what: str
) -> UInt8[np.ndarray, "pixels 4"]:
    """Returns the pixels of a texture, row by row, if it has the right size.

    Args:
        fits: whether a width and a height are right, px.
        what: what the texture should hold, for messages.
    """
    if b"VP8L" not in data:
        raise _damage_error(path, f"{name} is no lossless WebP picture")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures: the size is checked below
            with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:
                if not fits(*image.size):
                    raise _damage_error(
                        path, f"{name} has {image.width} × {image.height} pixels, which do not fit {what}"
                    )
                return np.asarray(image.convert("RGBA")).reshape(-1, 4)
    except UNREADABLE as error:
        raise _damage_error(path, f"{name} cannot be decoded: {error}") from error


def _damage_error(path: Path, reason: str) -> SplatFileError:
    return SplatFileError(f"{path} is damaged ({reason}): copy or export it again.")
