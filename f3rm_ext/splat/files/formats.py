"""Splats of any of the formats: which one a file has, and reading and writing it."""

from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.checks import BadValues, checked
from f3rm_ext.splat.files.compressed_ply import is_compressed, read_compressed_ply, write_compressed_ply
from f3rm_ext.splat.files.info import Format, SplatInfo, maker_of
from f3rm_ext.splat.files.ply import read_ply, write_ply_splats
from f3rm_ext.splat.files.splat import read_splat, write_splat
from f3rm_ext.splat.files.spz import GZIP, Axes, comments_in, read_spz, require_known_version, write_spz
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.output_file import replacing
from f3rm_ext.utils.ply import PlyTables, read_comments

SUFFIXES: dict[str, Format] = {
    ".compressed.ply": "compressed-ply",
    ".ply": "ply",
    ".spz": "spz",
    ".splat": "splat",
}
"""The format that is written, by the end of the name; the first that fits."""
MAKERS = ("f3rm-ext export splats", "f3rm-ext export convert")
"""Commands whose files may be replaced by each other's."""


def format_to_write(path: Path) -> Format:
    """The format that a file of this name gets.

    Raises:
        SplatFileError: none is called so.
    """
    for suffix, name in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise SplatFileError(f"{path} has no format for splats: give a name that ends in {', '.join(SUFFIXES)}.")


def read_splats(path: Path, bad_values: BadValues = "error", spz_axes: Axes = "rub") -> tuple[Gaussians, SplatInfo]:
    """Reads splats of any of the formats, which is found from what the file has in it; ``.splat`` from its name.

    Args:
        path: the file.
        bad_values: what to do with values that are NaN or infinite.
        spz_axes: axes of the coordinates where it is ``.spz``.

    Returns:
        The Gaussians, float32, on the CPU, all values finite, and what the file says of them.

    Raises:
        SplatFileError: it cannot be read, is of no known format, damaged, or has values that cannot be.
    """
    try:
        gaussians, info = _read(path, spz_axes)
    except OSError as error:
        raise SplatFileError(f"{path} cannot be read ({error.strerror or error}): give a file of splats.") from error
    gaussians, notices = checked(gaussians, path, bad_values)
    return gaussians, replace(info, count=len(gaussians), notices=(*info.notices, *notices))


def _read(path: Path, spz_axes: Axes) -> tuple[Gaussians, SplatInfo]:
    with path.open("rb") as stream:
        head = stream.read(8)
    require_known_version(path, head)
    if head.startswith(GZIP):
        return read_spz(path, spz_axes)
    if head[:4].rstrip() == b"ply":
        tables = PlyTables.open(path)
        return read_compressed_ply(path, tables) if is_compressed(tables) else read_ply(path, tables)
    if path.suffix.lower() == ".splat":
        return read_splat(path)
    raise SplatFileError(f"{path} is no file of splats: give one of {', '.join(SUFFIXES)}.")


def write_splats(
    path: Path, gaussians: Gaussians, info: SplatInfo, bad_values: BadValues = "error", spz_axes: Axes = "rub"
) -> SplatInfo:
    """Writes splats in the format of the name, whole or not at all.

    A file that is there is replaced only if a command of :data:`MAKERS` wrote it, as its comments tell.

    Args:
        path: the file; its folder is made where it is not there.
        gaussians: on any device.
        info: whose tags and comments are written; put who makes the file among these (``made_by: ...``).
        bad_values: what to do with values that are NaN or infinite.
        spz_axes: axes of the coordinates where it is ``.spz``.

    Returns:
        What the file says, and what was left out.

    Raises:
        SplatFileError: the name has no format, there is somebody else's file, there are no Gaussians or values that
            cannot be.
        ConfigError: the file cannot be written.
    """
    kind = format_to_write(path)
    require_replaceable(path)
    kept, notices = checked(gaussians, path, bad_values, action="would get")
    kept = kept[stored_order(kept, kind)].to("cpu")
    kept = kept if kind != "splat" else kept.with_sh_degree(0)
    with replacing(path, "name for the splats") as stream:
        if kind == "ply":
            write_ply_splats(stream, kept, info)
        elif kind == "compressed-ply":
            write_compressed_ply(stream, kept, info)
        elif kind == "spz":
            write_spz(stream, kept, info, spz_axes)
        else:
            write_splat(stream, kept, info)
    return replace(info, format=kind, sh_degree=kept.sh_degree, count=len(kept), notices=tuple(notices))


def stored_order(gaussians: Gaussians, kind: Format) -> Int[Tensor, " gaussians"]:
    """Indices in the order in which a format stores Gaussians: as they are (PLY, SPZ), neighbours together (compressed
    PLY), or large ones first (``.splat``). Gaussians in that order stay in it."""
    if kind == "compressed-ply":
        return packing.morton_order(gaussians)
    if kind == "splat":
        return packing.importance_order(gaussians)
    return torch.arange(len(gaussians), device=gaussians.means.device)


def require_replaceable(path: Path) -> None:
    """Raises SplatFileError where something is there that was not made by a command of :data:`MAKERS`."""
    if not path.exists():
        return
    maker = None
    if path.is_file():
        comments = comments_in(path)
        if not comments:
            try:
                with path.open("rb") as stream:
                    comments = read_comments(stream)
            except OSError:
                comments = []
        maker = maker_of(comments)
    if maker not in MAKERS:
        raise SplatFileError(
            f"{path} is there already and does not say that `{'` or `'.join(MAKERS)}` wrote it: move it away, or "
            "choose another name."
        )
