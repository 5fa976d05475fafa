"""Reading and writing splats in any supported format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.checks import BadValues, check_values
from f3rm_ext.splat.files.compressed_ply import is_compressed, read_compressed_ply, write_compressed_ply
from f3rm_ext.splat.files.gltf import write_gltf_splats
from f3rm_ext.splat.files.info import Format, SplatInfo, find_maker
from f3rm_ext.splat.files.ply import read_ply, write_ply_splats
from f3rm_ext.splat.files.sog import ZIP, read_sog, read_sog_comments, write_sog
from f3rm_ext.splat.files.splat import read_splat, write_splat
from f3rm_ext.splat.files.spz import (
    GZIP,
    Axes,
    read_comments,
    read_spz,
    require_known_version,
    require_readable,
    write_spz,
)
from f3rm_ext.splat.files.usd import write_usd_splats
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.ply import PlyTables
from f3rm_ext.utils.provenance import MADE_BY, read_provenance, require_ours

SUFFIXES: dict[str, Format] = {
    ".compressed.ply": "compressed-ply",
    ".ply": "ply",
    ".spz": "spz",
    ".sog": "sog",
    ".splat": "splat",
    ".glb": "gltf",
    ".usda": "usd",
}
"""Format to write, by the end of the file name; the first match counts."""
WRITE_ONLY: tuple[Format, ...] = ("gltf", "usd")
"""Formats that are not read."""
MAKERS = ("f3rm-ext export splats", "f3rm-ext export convert")
"""Commands that may overwrite each other's files."""


def format_to_write(path: Path) -> Format:
    """Returns the format to write for a file name.

    Raises:
        SplatFileError: the name belongs to no format.

    >>> format_to_write(Path("room.compressed.ply"))
    'compressed-ply'
    """
    for suffix, name in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise SplatFileError(f"{path} has no format for splats: give a name that ends in {', '.join(SUFFIXES)}.")


def read_splats(path: Path, bad_values: BadValues = "error", spz_axes: Axes = "rub") -> tuple[Gaussians, SplatInfo]:
    """Reads splats of any format. Detects the format from the contents, or from the name for ``.splat``.

    Returns:
        The Gaussians, float32, on the CPU, all values finite; and the file's information about them.

    Raises:
        SplatFileError: the file cannot be read, has an unknown format, is damaged, or has invalid values.
    """
    try:
        gaussians, info = _read(path, spz_axes)
    except OSError as error:
        raise SplatFileError(f"{path} cannot be read ({error.strerror or error}): give a file of splats.") from error
    gaussians, notices = check_values(gaussians, path, bad_values)
    return gaussians, replace(info, count=len(gaussians), notices=(*info.notices, *notices))


def _read(path: Path, spz_axes: Axes) -> tuple[Gaussians, SplatInfo]:
    with path.open("rb") as stream:
        head = stream.read(8)
    require_known_version(path, head)
    if head.startswith(GZIP):
        return read_spz(path, spz_axes)
    if head.startswith(ZIP) or path.suffix.lower() == ".json":
        return read_sog(path)
    if head[:4].rstrip() == b"ply":
        tables = PlyTables.open(path)
        return read_compressed_ply(path, tables) if is_compressed(tables) else read_ply(path, tables)
    if path.suffix.lower() == ".splat":
        return read_splat(path)
    readable = [suffix for suffix, kind in SUFFIXES.items() if kind not in WRITE_ONLY]
    raise SplatFileError(f"{path} is no file of splats that can be read: give one of {', '.join(readable)}.")


def write_splats(
    path: Path, gaussians: Gaussians, info: SplatInfo, bad_values: BadValues = "error", spz_axes: Axes = "rub"
) -> SplatInfo:
    """Writes splats in the format given by the file name, completely or not at all.

    Overwrites a file only if its comments say that a command of :data:`MAKERS` wrote it.

    Args:
        info: its tags and comments are written; the comments should name the maker (``made_by: ...``).

    Returns:
        Contents of the file, with notices of what was left out.

    Raises:
        SplatFileError: the name belongs to no format, there are no Gaussians or more than readers of the format accept,
            or values are invalid.
        ConfigError: the file exists and was made by others, or cannot be written.
    """
    kind = format_to_write(path)
    if kind == "spz":
        require_readable(path, len(gaussians))
    require_replaceable(path)
    kept, notices = check_values(gaussians, path, bad_values, action="would get")
    kept = kept[storage_order(kept, kind)].to("cpu")
    kept = kept if kind != "splat" else kept.to_sh_degree(0)
    with replace_file(path, "name for the splats") as stream:
        if kind == "ply":
            write_ply_splats(stream, kept, info)
        elif kind == "compressed-ply":
            write_compressed_ply(stream, kept, info)
        elif kind == "spz":
            write_spz(stream, kept, info, spz_axes)
        elif kind == "sog":
            write_sog(stream, kept, info)
        elif kind == "gltf":
            write_gltf_splats(stream, kept, info)
        elif kind == "usd":
            write_usd_splats(stream, kept, info)
        else:
            write_splat(stream, kept, info)
    return replace(info, format=kind, sh_degree=kept.sh_degree, count=len(kept), notices=tuple(notices))


def storage_order(gaussians: Gaussians, kind: Format) -> Int[Tensor, " gaussians"]:
    """Returns indices in the order in which a format stores Gaussians: unchanged (PLY, SPZ), neighbours together
    (compressed PLY, SOG), or large ones first (``.splat``). Sorting twice changes nothing."""
    if kind in ("compressed-ply", "sog"):
        return packing.morton_order(gaussians)
    if kind == "splat":
        return packing.importance_order(gaussians)
    return torch.arange(len(gaussians), device=gaussians.means.device)


def require_replaceable(path: Path) -> None:
    """Raises ConfigError if the path exists and no command of :data:`MAKERS` wrote it."""

    def read(path: Path) -> dict[str, Any]:
        return {MADE_BY: find_maker([*read_comments(path), *read_sog_comments(path)])} | read_provenance(path)

    require_ours(path, MAKERS, "name", read)
