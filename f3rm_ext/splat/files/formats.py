"""Reading and writing splats in any supported format."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing, spz, spz4
from f3rm_ext.splat.files.checks import BadValues, check_values
from f3rm_ext.splat.files.compressed_ply import is_compressed, read_compressed_ply, write_compressed_ply
from f3rm_ext.splat.files.gltf import write_gltf_splats
from f3rm_ext.splat.files.info import Format, SplatInfo, find_maker
from f3rm_ext.splat.files.ksplat import read_ksplat
from f3rm_ext.splat.files.ply import read_ply, write_ply_splats
from f3rm_ext.splat.files.scores import read_sidecar, sidecar_path, write_sidecar
from f3rm_ext.splat.files.sog import ZIP, read_sog, read_sog_comments, write_sog
from f3rm_ext.splat.files.splat import read_splat, write_splat
from f3rm_ext.splat.files.spz import Axes, SpzVersion
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
SCORED: tuple[Format, ...] = ("ply", "gltf", "usd")
"""Formats that have a place for scores of queries."""
KSPLAT = ".ksplat"
"""End of the file name of the format that is only read."""
READABLE = (*(suffix for suffix, kind in SUFFIXES.items() if kind not in WRITE_ONLY), KSPLAT)
"""Ends of the names of files that can be read."""
_WRITERS: dict[Format, Callable[[BufferedIOBase, Gaussians, SplatInfo], None]] = {
    "ply": write_ply_splats,
    "compressed-ply": write_compressed_ply,
    "sog": write_sog,
    "splat": write_splat,
    "gltf": write_gltf_splats,
    "usd": write_usd_splats,
}
"""They take one or more Gaussians, on the CPU."""
MAKERS = ("f3rm-ext export splats", "f3rm-ext export convert")
"""Commands that may overwrite each other's files."""


def format_to_write(path: Path, spz_version: SpzVersion = 3) -> Format:
    """Returns the format to write for a file name.

    Raises:
        SplatFileError: the name belongs to no format, or a version of another format is asked for.

    >>> format_to_write(Path("room.compressed.ply"))
    'compressed-ply'
    """
    for suffix, name in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            if spz_version != 3 and name != "spz":
                raise SplatFileError(f"--spz-version {spz_version} only works for .spz, not for {path}: leave it out.")
            return name
    raise SplatFileError(f"{path} has no format for splats: give a name that ends in {', '.join(SUFFIXES)}.")


def read_splats(path: Path, bad_values: BadValues = "error", spz_axes: Axes = "rub") -> tuple[Gaussians, SplatInfo]:
    """Reads splats of any format. Detects the format from the contents, or from the name for ``.splat`` and
    ``.ksplat``, which have no mark.

    Returns:
        The Gaussians, float32, on the CPU, all values finite; and the file's information about them.

    Raises:
        SplatFileError: the file cannot be read, has an unknown format, is damaged, or has invalid values.
    """
    try:
        gaussians, info = _read(path, spz_axes)
    except OSError as error:
        raise SplatFileError(f"{path} cannot be read ({error.strerror or error}): give a file of splats.") from error
    scores, sidecar_notices = (info.scores, []) if info.scores is not None else read_sidecar(path, len(gaussians))
    gaussians, valid, notices = check_values(gaussians, path, bad_values)
    notices = (*info.notices, *sidecar_notices, *notices)
    return gaussians, replace(info, count=len(gaussians), notices=notices, scores=scores).take_scores(valid)


def _read(path: Path, spz_axes: Axes) -> tuple[Gaussians, SplatInfo]:
    with path.open("rb") as stream:
        head = stream.read(8)
    if head.startswith(spz.MAGIC):
        return spz4.read_spz4(path, spz_axes)
    if head.startswith(spz.GZIP):
        return spz.read_spz(path, spz_axes)
    if head.startswith(ZIP) or path.suffix.lower() == ".json":
        return read_sog(path)
    if head[:4].rstrip() == b"ply":
        tables = PlyTables.open(path)
        return read_compressed_ply(path, tables) if is_compressed(tables) else read_ply(path, tables)
    if path.suffix.lower() == ".splat":
        return read_splat(path)
    if path.suffix.lower() == KSPLAT:
        return read_ksplat(path)
    raise SplatFileError(f"{path} is no file of splats that can be read: give one of {', '.join(READABLE)}.")


def write_splats(
    path: Path,
    gaussians: Gaussians,
    info: SplatInfo,
    bad_values: BadValues = "error",
    spz_axes: Axes = "rub",
    spz_version: SpzVersion = 3,
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
    kind = format_to_write(path, spz_version)
    if kind == "spz" and spz_version == 3:
        spz.require_readable(path, len(gaussians))
    require_replaceable(path, info.scores is not None)
    kept, valid, notices = check_values(gaussians, path, bad_values, action="would get")
    order = storage_order(kept, kind)
    scores = info.take_scores(valid).take_scores(order).scores
    info = replace(info, scores=scores if kind in SCORED else None)
    kept = kept[order].to("cpu")
    kept = kept if kind != "splat" else kept.to_sh_degree(0)
    with replace_file(path, "name for the splats") as stream:
        if kind == "spz":
            (spz4.write_spz4 if spz_version == spz4.VERSION else spz.write_spz)(stream, kept, info, spz_axes)
        else:
            _WRITERS[kind](stream, kept, info)
    if scores is not None and kind not in SCORED:
        beside = write_sidecar(path, scores, find_maker(info.comments))
        notices.append(f"{path.name} has no place for the scores of queries, so they are in {beside}.")
    return replace(
        info,
        format=kind,
        version=spz_version if kind == "spz" else None,
        sh_degree=kept.sh_degree,
        count=len(kept),
        notices=tuple(notices),
        scores=scores,
    )


def storage_order(gaussians: Gaussians, kind: Format) -> Int[Tensor, " gaussians"]:
    """Returns indices in the order in which a format stores Gaussians: unchanged (PLY, SPZ), neighbours together
    (compressed PLY, SOG), or large ones first (``.splat``). Sorting twice changes nothing."""
    if kind in ("compressed-ply", "sog"):
        return packing.morton_order(gaussians)
    if kind == "splat":
        return packing.importance_order(gaussians)
    return torch.arange(len(gaussians), device=gaussians.means.device)


def require_replaceable(path: Path, has_scores: bool = False) -> None:
    """Raises ConfigError if the path, or the file of its scores, exists and no command of :data:`MAKERS` wrote it."""
    if has_scores and format_to_write(path) not in SCORED:
        require_ours(sidecar_path(path), MAKERS, "name")
    require_ours(path, MAKERS, "name", _provenance)


def _provenance(path: Path) -> Mapping[str, object]:
    comments: list[str] = []
    for read in (spz.read_comments, spz4.read_comments, read_sog_comments):
        with suppress(EOFError, OSError, ValueError, SplatFileError):  # a file of another kind
            comments += read(path)
    return {MADE_BY: find_maker(comments)} | read_provenance(path)
