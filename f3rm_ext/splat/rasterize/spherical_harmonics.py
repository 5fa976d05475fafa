"""View-dependent colours: real spherical harmonics up to degree 3."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, SH_C0, sh_rest_count
from f3rm_ext.splat.rasterize.sh_bases import sh_bases


def require_degree(degree: int, features_rest: Float[Tensor, "gaussians coeffs 3"]) -> None:
    """Checks that there are enough coefficients of degrees 1 and up for a degree.

    Raises:
        ConfigError: the degree needs more coefficients than there are.
    """
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
