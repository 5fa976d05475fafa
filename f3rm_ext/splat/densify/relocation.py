"""The maths of 3DGS-MCMC in torch: relocation that preserves the rendered image, and noise on centres.

Kheradmand et al., 3D Gaussian Splatting as Markov Chain Monte Carlo, NeurIPS 2024 (arXiv 2404.09591). gsplat has only
CUDA kernels for these; here they run on any device.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.gaussians import quats_to_rotations

MAX_COPIES = 51
"""Upper limit of the number of copies, as in gsplat."""
NOISE_STEEPNESS, NOISE_CENTRE = 100.0, 0.995
"""Noise is multiplied by sigmoid(100 ((1 − α) − 0.995)), so it moves only nearly transparent Gaussians."""
_CHUNK = 1 << 20


@lru_cache(maxsize=1)
def relocation_table() -> Float[Tensor, "copies terms"]:
    """Returns coefficients c[N−1, j−1] = C(N, j) (−1)^(j+1) / √j of the denominator Σ_j c[N−1, j−1] α'^j for N copies.

    The published form is Σ_{i=1..N} Σ_{k=0..i−1} C(i−1, k) (−1)^k α'^(k+1) / √(k+1) (eq. 9). Summing over i first gives
    Σ_i C(i−1, k) = C(N, k+1). The table is float64, since terms of alternating sign nearly cancel.
    """
    table = torch.zeros(MAX_COPIES, MAX_COPIES, dtype=torch.float64)
    for count in range(1, MAX_COPIES + 1):
        for term in range(1, count + 1):
            table[count - 1, term - 1] = (-1) ** (term + 1) * math.comb(count, term) / math.sqrt(term)
    return table


@torch.no_grad()
def compute_relocation(
    opacities: Float[Tensor, " gaussians"], sizes: Float[Tensor, "gaussians 3"], copies: Int[Tensor, " gaussians"]
) -> tuple[Float[Tensor, " gaussians"], Float[Tensor, "gaussians 3"]]:
    """Computes opacity and size of N coincident Gaussians that together look like the one they replace.

    α' = 1 − (1 − α)^(1/N), and σ' = σ · α / Σ_j C(N, j) (−1)^(j+1) α'^j / √j (eq. 9 of the paper).

    Args:
        opacities: α, (0, 1).
        sizes: standard deviations σ, scene units.
        copies: N, including the original; limited to 51.
    """
    count = copies.clamp(1, MAX_COPIES)
    alpha = opacities.double()
    new_alpha = -torch.expm1(torch.log1p(-alpha) / count)
    coefficients = relocation_table().to(opacities.device)[count - 1]
    powers = new_alpha[:, None].expand(-1, MAX_COPIES).cumprod(dim=-1)
    shrink = alpha / (coefficients * powers).sum(dim=-1)
    return new_alpha.to(opacities.dtype), (sizes.double() * shrink[:, None]).to(sizes.dtype)


def sample_rows(weights: Float[Tensor, " gaussians"], count: int) -> Int[Tensor, " samples"]:
    """Samples rows with replacement, with probabilities proportional to their weights.

    Inverts the cumulative sum, which works for any number of rows (torch.multinomial is limited to 2^24).

    Args:
        weights: ≥ 0, not all 0.
    """
    cumulative = weights.double().cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, device=weights.device) * cumulative[-1]
    rows = torch.searchsorted(cumulative, drawn, right=True)
    return rows.clamp_(max=len(weights) - 1)


@torch.no_grad()
def add_noise(
    means: Float[Tensor, "gaussians 3"],
    scales: Float[Tensor, "gaussians 3"],
    quats: Float[Tensor, "gaussians 4"],
    opacities: Float[Tensor, "gaussians 1"],
    scale: float,
) -> None:
    """Adds Σ η · sigmoid(100 ((1 − α) − 0.995)) · scale to the centres, η ~ N(0, I) (eq. 8 of the paper).

    Args:
        means: centres, changed in place.
        scale: learning rate of the centres times the strength of the noise.
    """
    for start in range(0, len(means), _CHUNK):
        rows = slice(start, start + _CHUNK)
        gate = torch.sigmoid(NOISE_STEEPNESS * (1 - opacities[rows].sigmoid() - NOISE_CENTRE))
        noise = torch.randn_like(means[rows]) * gate * scale
        rotations = quats_to_rotations(functional.normalize(quats[rows], dim=-1))
        own = torch.einsum("nji,nj->ni", rotations, noise) * (2 * scales[rows]).exp()
        means[rows] += torch.einsum("nij,nj->ni", rotations, own)
