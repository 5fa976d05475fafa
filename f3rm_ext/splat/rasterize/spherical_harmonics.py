"""View-dependent colours: real spherical harmonics up to degree 3."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, SH_C0, sh_rest_count

C1 = 0.4886025119029199
"""√(3 / 4π)"""
C2_XY, C2_ZZ, C2_XX = 1.0925484305920792, 0.31539156525252005, 0.5462742152960396
"""√(15 / 4π), √(5 / 16π), √(15 / 16π)"""
C3_3, C3_2, C3_1, C3_0 = 0.5900435899266435, 2.890611442640554, 0.4570457994644658, 0.37317633259011546
"""√(35 / 32π), √(105 / 4π), √(21 / 32π), √(7 / 16π)"""


def sh_bases(degree: int, directions: Float[Tensor, "gaussians 3"]) -> Float[Tensor, "gaussians coeffs"]:
    """Evaluates the harmonics of degrees 1 to ``degree`` in directions of length 1.

    Within each degree l the order is m = −l … l. Signs include the Condon–Shortley phase, as in all splat files.

    >>> up = torch.tensor([[0.0, 0.0, 1.0]])
    >>> round(float(sh_bases(1, up)[0, 1]), 4)
    0.4886
    """
    x, y, z = directions.unbind(-1)
    values: list[Tensor] = []
    if degree >= 1:
        values += [-C1 * y, C1 * z, -C1 * x]
    if degree >= 2:
        xx, yy, zz = x * x, y * y, z * z
        values += [C2_XY * x * y, -C2_XY * y * z, C2_ZZ * (3 * zz - 1), -C2_XY * x * z, C2_XX * (xx - yy)]
        if degree >= 3:
            values += [
                -C3_3 * y * (3 * xx - yy),
                C3_2 * x * y * z,
                -C3_1 * y * (5 * zz - 1),
                C3_0 * z * (5 * zz - 3),
                -C3_1 * x * (5 * zz - 1),
                C3_2 / 2 * z * (xx - yy),
                -C3_3 * x * (xx - 3 * yy),
            ]
    return torch.stack(values, dim=-1) if values else directions.new_zeros(len(directions), 0)


def require_degree(degree: int, features_rest: Float[Tensor, "gaussians coeffs 3"]) -> None:
    """Raises ConfigError unless there are enough coefficients of degrees 1 and up for a degree."""
    count = sh_rest_count(degree)
    if not 0 <= degree <= MAX_SH_DEGREE or count > features_rest.shape[1]:
        raise ConfigError(
            f"Colours of SH degree {degree} need {count} coefficients beyond the first and there are "
            f"{features_rest.shape[1]}: use a lower degree."
        )


def sh_colors(
    degree: int,
    directions: Float[Tensor, "gaussians 3"],
    features_dc: Float[Tensor, "gaussians 3"],
    features_rest: Float[Tensor, "gaussians coeffs 3"],
) -> Float[Tensor, "gaussians 3"]:
    """Evaluates colours of Gaussians: ½ + harmonics, clamped at 0 from below; the readable reference, in plain torch.

    Training and rendering use :func:`f3rm_ext.splat.memory.packed.packed_sh_colors`.

    Args:
        degree: SH degree to evaluate, 0 to 3; coefficients of higher degrees are not read.
        directions: from the camera to the Gaussians, scene frame, any length.
        features_dc: coefficients of degree 0; their dtype is that of the arithmetic.
        features_rest: coefficients of degrees 1 and up, float32 or float16.
    """
    require_degree(degree, features_rest)
    if degree == 0:  # no zeros as gradient of the others, which would count as a step of Adam
        return (SH_C0 * features_dc + 0.5).clamp(min=0.0)
    bases = sh_bases(degree, functional.normalize(directions, dim=-1))
    rest = features_rest[:, : bases.shape[1]].to(features_dc.dtype)
    return (SH_C0 * features_dc + 0.5 + torch.einsum("nk,nkc->nc", bases, rest)).clamp(min=0.0)
