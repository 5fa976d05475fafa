"""Splats from one file to another, and from a model to a file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from f3rm_ext import __version__
from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files.checks import BadValues
from f3rm_ext.splat.files.formats import (
    MAKERS,
    format_to_write,
    read_splats,
    require_replaceable,
    stored_order,
    write_splats,
)
from f3rm_ext.splat.files.info import SplatInfo, provenance_of
from f3rm_ext.splat.files.losses import losses
from f3rm_ext.splat.files.spz import Axes
from f3rm_ext.splat.gaussians import Gaussians

_EXPORT, _CONVERT = MAKERS


@dataclass(frozen=True)
class Converted:
    """What came of a conversion."""

    source: SplatInfo
    result: SplatInfo
    lost: list[str]
    """A sentence for each thing; empty where nothing was lost."""


def export_splats(
    gaussians: Gaussians,
    path: Path,
    info: SplatInfo,
    provenance: Mapping[str, object] | None = None,
    bad_values: BadValues = "error",
    spz_axes: Axes = "rub",
) -> SplatInfo:
    """Writes the splats of a model, in the format of the name, as ``f3rm-ext export splats``.

    Args:
        gaussians: on any device; with the 3D filter in them if ``info`` says so.
        path: ends in one of :data:`~f3rm_ext.splat.files.formats.SUFFIXES`.
        info: render mode, whether filters are fused, comments.
        provenance: entries for the comments of the file, the checkpoint say.
        bad_values: what to do with values that are NaN or infinite.
        spz_axes: axes of the coordinates where it is ``.spz``.

    Returns:
        What the file says; its notices are for the user.

    Raises:
        SplatFileError: see :func:`~f3rm_ext.splat.files.formats.write_splats`.
        ConfigError: the file cannot be written.
    """
    record = {"made_by": _EXPORT, "version": __version__, **(provenance or {})}
    return write_splats(path, gaussians, replace(info, comments=provenance_of(info, record)), bad_values, spz_axes)


def convert_splats(
    source: Path, out: Path, sh_degree: int | None = None, bad_values: BadValues = "error", spz_axes: Axes = "rub"
) -> Converted:
    """Writes the splats of a file in another format, and reads them back to say what was lost.

    Args:
        source: file of splats.
        out: the other file.
        sh_degree: to lower the degree to; None keeps it, as far as the format can.
        bad_values: what to do with values that are NaN or infinite.
        spz_axes: axes of the coordinates in ``.spz`` files.

    Raises:
        SplatFileError: the splats cannot be read or written as asked.
        ConfigError: the file cannot be written.
    """
    kind = format_to_write(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise SplatFileError(f"{out} is the file to read as well, and it would be lost: choose another name.")
    require_replaceable(out)
    gaussians, found = read_splats(source, bad_values, spz_axes)
    if sh_degree is not None and sh_degree > gaussians.sh_degree:
        raise SplatFileError(
            f"{source} has spherical harmonics of degree {gaussians.sh_degree}, which cannot become {sh_degree}: give "
            "a lower --sh-degree, or none."
        )
    record = {"made_by": _CONVERT, "version": __version__, "converted_from": f"{source.name} ({found.format})"}
    info = replace(found, comments=provenance_of(found, record))
    wanted = gaussians if sh_degree is None else gaussians.with_sh_degree(sh_degree)
    written = write_splats(out, wanted, info, spz_axes=spz_axes)
    again, result = read_splats(out, spz_axes=spz_axes)
    lost = losses(gaussians[stored_order(wanted, kind)], again)
    if found.render_mode == "mip" and result.render_mode != "mip":
        lost.append("The file cannot say that it is to be drawn with anti-aliasing (SplatRenderMode: mip).")
    return Converted(found, replace(result, notices=written.notices), lost)
