"""Detection of invalid values of Gaussians, when reading files and before writing them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files.ply import COLUMNS
from f3rm_ext.splat.gaussians import Gaussians

BadValues = Literal["error", "drop"]
"""Treatment of values that are NaN or infinite, and of rotations of length 0: stop with an error, or drop those
Gaussians. When dropping, infinite opacities become finite ones that look the same instead."""
ALPHA_MARGIN = 1 / 1020
"""Distance of opacities from 0 and 1 that keeps their logits finite: a quarter of the step of a byte. Images stay the
same, since rasterisers skip opacities below 1/255 and clamp them at 0.999."""
_HIGHEST_RATIO, _ALWAYS_READ = 20, 1 << 26
"""Largest ratio of compression that is believed of files that hold more than so many bytes. Splats reach about 2; gzip
and zstd themselves reach 1000, with which a file of 15 MB would fill the memory."""


def is_plausible(size: int, stored: int) -> bool:
    """Returns whether so many bytes of Gaussians can come from a compressed file; a bomb claims far more.

    Args:
        size: that the header claims, bytes.
        stored: size of the compressed data, bytes.
    """
    return size <= max(stored * _HIGHEST_RATIO, _ALWAYS_READ)


def check_values(
    gaussians: Gaussians, path: Path, bad_values: BadValues = "error", action: str = "has"
) -> tuple[Gaussians, Bool[Tensor, " gaussians"], list[str]]:
    """Checks that all values are finite and that no rotation has length 0.

    Args:
        action: verb for messages: the file "has" or "would get" the values.

    Returns:
        The valid Gaussians, which of those given they are, and sentences on what was changed.

    Raises:
        SplatFileError: there are no Gaussians, or there are invalid values (``error``), or none is valid (``drop``).
    """
    if len(gaussians) == 0:
        raise SplatFileError(f"{path} {action} no Gaussians at all: train or export the splats again.")
    notices = []
    if bad_values == "drop":
        gaussians, limited = _finite_opacities(gaussians)
        if limited:
            notices.append(f"{limited} infinite opacities are now finite ones that look the same.")
    bad = torch.zeros(len(gaussians), dtype=torch.bool, device=gaussians.means.device)
    values, fields = 0, []
    for name, mask in _masks(gaussians):
        count = int(mask.sum())
        if count:
            values += count
            fields.append(f"{count} in {name}")
            bad |= mask.reshape(len(bad), -1).any(dim=1)
    rows = int(bad.sum())
    if not rows:
        return gaussians, ~bad, notices
    fault = (
        f"{values} values that are NaN, infinite or no rotation ({', '.join(fields)}) in {rows} of {len(bad)} Gaussians"
    )
    if bad_values == "error":
        raise SplatFileError(
            f"{path} {action} {fault}: leave those Gaussians out with --bad-values drop, or train or export them again."
        )
    if rows == len(bad):
        raise SplatFileError(f"{path} {action} {fault}, so none is left: train or export the splats again.")
    return gaussians[~bad], ~bad, [*notices, f"{rows} Gaussians are left out for {fault}."]


def _masks(gaussians: Gaussians) -> Iterator[tuple[str, Bool[Tensor, "..."]]]:
    """Yields masks of invalid values with the names of their properties in PLY files."""
    tensors = gaussians.tensors()
    for tensor, names in COLUMNS.items():
        for index, name in enumerate(names):
            yield name, ~tensors[tensor][:, index].isfinite()
    yield "f_rest", ~gaussians.features_rest.isfinite()
    yield "rot (length 0)", (gaussians.quats == 0).all(dim=1)


def _finite_opacities(gaussians: Gaussians) -> tuple[Gaussians, int]:
    """Replaces infinite logits, which mean opaque or invisible, by finite ones; returns their number too."""
    infinite = gaussians.opacities.isinf()
    count = int(infinite.sum())
    if not count:
        return gaussians, 0
    limit = float(torch.logit(torch.tensor(1 - ALPHA_MARGIN)))
    limited = torch.where(infinite, gaussians.opacities.clamp(-limit, limit), gaussians.opacities)
    return Gaussians.from_tensors({**gaussians.tensors(), "opacities": limited}), count
