"""Export of splats to files, conversion between formats, and what conversions lose."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext import __version__
from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files.checks import BadValues
from f3rm_ext.splat.files.formats import (
    MAKERS,
    WRITE_ONLY,
    format_to_write,
    read_splats,
    require_replaceable,
    storage_order,
    write_splats,
)
from f3rm_ext.splat.files.info import SplatInfo, combine_provenance
from f3rm_ext.splat.files.pruning import Choice, export_size, prune_to_size
from f3rm_ext.splat.files.spz import Axes, SpzVersion
from f3rm_ext.splat.gaussians import SH_C0, Gaussians

_EXPORT, _CONVERT = MAKERS


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion."""

    source: SplatInfo
    result: SplatInfo
    lost: list[str]
    """One sentence for each kind of loss of the Gaussians that are kept; empty if nothing was lost."""
    choice: Choice | None = None
    """The Gaussians that are kept, where the size was limited."""


def export_splats(
    gaussians: Gaussians,
    path: Path,
    info: SplatInfo,
    provenance: Mapping[str, object] | None = None,
    bad_values: BadValues = "error",
    spz_axes: Axes = "rub",
    spz_version: SpzVersion = 3,
) -> SplatInfo:
    """Writes the splats of a model, in the format given by the file name, as ``f3rm-ext export splats`` does.

    Args:
        provenance: entries for the comments of the file, e.g. the checkpoint.

    Returns:
        Contents of the file; its notices are for the user.

    Raises:
        SplatFileError: see :func:`~f3rm_ext.splat.files.formats.write_splats`.
        ConfigError: the file cannot be written.
    """
    record = {"made_by": _EXPORT, "version": __version__, **(provenance or {})}
    info = replace(info, comments=combine_provenance(info, record))
    return write_splats(path, gaussians, info, bad_values, spz_axes, spz_version)


def convert_splats(
    source: Path,
    out: Path,
    sh_degree: int | None = None,
    bad_values: BadValues = "error",
    spz_axes: Axes = "rub",
    spz_version: SpzVersion = 3,
    max_mb: float | None = None,
) -> ConversionResult:
    """Converts a file of splats to another format, and reads the result back to report what was lost.

    Args:
        sh_degree: new, lower SH degree; None keeps it if the format supports it.
        max_mb: largest size of the file, MB; see :func:`~f3rm_ext.splat.files.pruning.prune_to_size`.

    Raises:
        SplatFileError: the splats cannot be read or converted.
        ConfigError: the file cannot be written, or not even one Gaussian fits.
    """
    kind = format_to_write(out, spz_version)
    if out.exists() and source.exists() and out.samefile(source):
        raise SplatFileError(f"{out} is also the file to read, which would be lost: choose another name.")
    require_replaceable(out)
    gaussians, origin = read_splats(source, bad_values, spz_axes)
    if sh_degree is not None and sh_degree > gaussians.sh_degree:
        raise SplatFileError(
            f"{source} has spherical harmonics of degree {gaussians.sh_degree}, which cannot become {sh_degree}: give "
            "a lower --sh-degree, or none."
        )
    record = {"made_by": _CONVERT, "version": __version__, "converted_from": f"{source.name} ({origin.format_name})"}
    info = replace(origin, comments=combine_provenance(origin, record))
    highest = 0 if kind == "splat" else gaussians.sh_degree
    wanted = gaussians.to_sh_degree(highest if sh_degree is None else min(highest, sh_degree))

    def write(splats: Gaussians, path: Path, info: SplatInfo) -> SplatInfo:
        return write_splats(path, splats, info, spz_axes=spz_axes, spz_version=spz_version)

    choice = None
    if max_mb is not None:

        def size(rows: Int[Tensor, " kept"], degree: int) -> int:
            part = info.take_scores(rows)
            return export_size(wanted[rows].to_sh_degree(degree), out, lambda splats, path: write(splats, path, part))

        choice = prune_to_size(wanted, size, max_mb)
        gaussians, wanted, info = gaussians[choice.rows], choice.apply(wanted), info.take_scores(choice.rows)
    written = write(wanted, out, info)
    if kind in WRITE_ONLY:
        lost = [f"What {out.suffix} loses was not measured: it is a format that is written only."]
        result = written
    else:
        stored, result = read_splats(out, spz_axes=spz_axes)
        # Losses are compared row by row, and the format has its own order.
        lost = conversion_losses(gaussians[storage_order(wanted, kind)], stored)
    if origin.render_mode == "mip" and result.render_mode != "mip":
        lost.append("The format cannot record that the splats need anti-aliasing (SplatRenderMode: mip).")
    return ConversionResult(origin, replace(result, notices=written.notices), lost, choice)


def rotation_differences(
    ours: Float[Tensor, "gaussians 4"], theirs: Float[Tensor, "gaussians 4"]
) -> Float[Tensor, " gaussians"]:
    """Returns the angles between rotations, degrees, float64; small angles are exact too."""
    a, b = functional.normalize(ours.double(), dim=1), functional.normalize(theirs.double(), dim=1)
    b = torch.where((a * b).sum(dim=1, keepdim=True) < 0, -b, b)
    # |a − b| = 2 sin(angle / 4), which is exact for small angles, where the arccosine of a · b is not.
    return torch.rad2deg(4 * torch.asin(((a - b).norm(dim=1) / 2).clamp(max=1)))


def conversion_losses(before: Gaussians, after: Gaussians) -> list[str]:
    """Describes what a conversion lost, one sentence for each kind of value that changed.

    Args:
        after: the same Gaussians in the same order; the SH degree may be lower.
    """
    losses = []
    if after.sh_degree < before.sh_degree:
        flat = " (colours are now the same from everywhere)" if after.sh_degree == 0 else ""
        losses.append(f"SH degree {before.sh_degree} became {after.sh_degree}{flat}.")
    span = float((before.means.amax(dim=0) - before.means.amin(dim=0)).max())
    share = f"; the scene is {span:.3g} wide"
    kept = before.to_sh_degree(after.sh_degree)
    differences = {
        "Positions": ((after.means.double() - before.means).norm(dim=1), "", share),
        "Sizes": (100 * ((after.scales.double() - before.scales).abs().amax(dim=1).exp() - 1), " %", ""),
        "Rotations": (rotation_differences(before.quats, after.quats), "°", ""),
        "Opacities": ((after.opacities.double().sigmoid() - before.opacities.double().sigmoid()).abs(), "", ""),
        "Colours": (255 * SH_C0 * (after.features_dc.double() - before.features_dc).abs().amax(dim=1), " of 255", ""),
    }
    if after.features_rest.numel():
        change = (after.features_rest.float() - kept.features_rest.float()).abs().amax(dim=(1, 2))
        differences["SH coefficients"] = (change, "", "")
    for name, (values, unit, more) in differences.items():
        if bool((values > 0).any()):
            middle, most = float(values.median()), float(values.max())
            losses.append(f"{name} changed by {middle:.2g}{unit} at the median, {most:.2g}{unit} at most{more}.")
    return losses
