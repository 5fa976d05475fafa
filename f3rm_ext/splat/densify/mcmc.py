"""3DGS-MCMC: densification by relocation and noise, in torch on any device."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.densify.base import Densifier
from f3rm_ext.splat.densify.ops import Change, Parameters, RunOptimizers, apply, optimizers_by_name
from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.rasterize import Rasterization


class MCMCDensifier(Densifier):
    """Moves dead Gaussians onto live ones, adds some in each round, and adds noise to transparent ones.

    Follows Kheradmand et al. 2024, with its regularisers of opacities and sizes, and the schedule of gsplat's
    MCMCStrategy. There is one deviation: a relocated Gaussian starts with zero moments, like the one it joins. In
    gsplat it keeps the moments of its old position.
    """

    def losses(self, gaussians: Gaussians) -> dict[str, Tensor]:
        losses = {}
        if self.options.mcmc_opacity_reg:
            losses["opacity_loss"] = self.options.mcmc_opacity_reg * gaussians.alphas().mean()
        if self.options.mcmc_scale_reg:
            losses["scale_loss"] = self.options.mcmc_scale_reg * gaussians.sizes().mean()
        return losses

    def step_post_backward(
        self, step: int, rasterization: Rasterization, params: Parameters, optimizers: RunOptimizers
    ) -> Change | None:
        options, change = self.options, None
        with self.random_numbers(params["means"].device):
            if options.start < step < self._stop(options.mcmc_stop) and step % options.every == 0:
                change = self._round(params, optimizers)
            rate = optimizers_by_name(optimizers)["means"].param_groups[0]["lr"]
            if options.mcmc_noise > 0:
                add_noise(params, rate * options.mcmc_noise)
        return change

    @torch.no_grad()
    def _round(self, params: Parameters, optimizers: RunOptimizers) -> Change | None:
        count = len(params["means"])
        alphas = params["opacities"].detach().sigmoid().flatten()
        sizes = params["scales"].detach().exp()
        source = torch.arange(count, device=alphas.device)
        fresh = torch.zeros(count, dtype=torch.bool, device=alphas.device)
        dead = alphas <= self.options.mcmc_min_opacity
        moved = int(dead.sum())
        if moved == count:
            self.prune(dead, params, optimizers)  # raises the right error, as there is no live one to move to
        if moved:
            chosen = sample_rows(torch.where(dead, 0, alphas), moved)
            source[dead] = chosen
            alphas, sizes = self._share(alphas, sizes, chosen, fresh)
            alphas, sizes = alphas[source], sizes[source]
            fresh |= dead
        cap = self.options.cap
        wanted = int((1 + self.options.mcmc_growth) * count)
        added = max((wanted if cap is None else min(cap, wanted)) - count, 0)
        if added:
            chosen = sample_rows(alphas, added)
            alphas, sizes = self._share(alphas, sizes, chosen, fresh)
            rows = torch.cat((torch.arange(count, device=alphas.device), chosen))
            alphas, sizes, source, fresh = alphas[rows], sizes[rows], source[rows], fresh[rows]
        if not moved and not added:
            return None
        change = Change(count, source, fresh)
        # Untouched rows keep their exact values.
        opacities = torch.where(fresh, alphas.logit(), change.carry(params["opacities"].detach()).flatten())
        scales = torch.where(fresh[:, None], sizes.log(), change.carry(params["scales"].detach()))
        apply(change, params, optimizers, {"opacities": opacities.view(-1, 1), "scales": scales})
        return change

    def _share(
        self,
        alphas: Float[Tensor, " gaussians"],
        sizes: Float[Tensor, "gaussians 3"],
        chosen: Int[Tensor, " samples"],
        fresh: Bool[Tensor, " gaussians"],
    ) -> tuple[Float[Tensor, " gaussians"], Float[Tensor, "gaussians 3"]]:
        """Splits the opacities and sizes of the chosen Gaussians among their copies; marks them as fresh."""
        copies = torch.bincount(chosen, minlength=len(alphas)) + 1
        rows = (copies > 1).nonzero().squeeze(-1)
        new_alphas, new_sizes = compute_relocation(alphas[rows], sizes[rows], copies[rows])
        # As in gsplat; the logit of 1 would be infinite.
        epsilon = torch.finfo(torch.float32).eps
        alphas, sizes = alphas.clone(), sizes.clone()
        alphas[rows] = new_alphas.clamp(self.options.mcmc_min_opacity, 1 - epsilon)
        sizes[rows] = new_sizes
        fresh[rows] = True
        return alphas, sizes


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
    # Where the sum does not grow lies a row of weight 0: the search from the right passes it over.
    rows = torch.searchsorted(cumulative, drawn, right=True)
    return rows.clamp_(max=len(weights) - 1)


@torch.no_grad()
def add_noise(params: Mapping[str, Tensor] | torch.nn.ParameterDict, scale: float) -> None:
    """Adds Σ η · sigmoid(100 ((1 − α) − 0.995)) · scale to the centres, in place, η ~ N(0, I) (eq. 8 of the paper).

    Args:
        scale: learning rate of the centres times the strength of the noise.
    """
    means, scales, quats, opacities = (params[name].detach() for name in ("means", "scales", "quats", "opacities"))
    for start in range(0, len(means), _CHUNK):
        rows = slice(start, start + _CHUNK)
        gate = torch.sigmoid(NOISE_STEEPNESS * (1 - opacities[rows].sigmoid() - NOISE_CENTRE))
        noise = torch.randn_like(means[rows]) * gate * scale
        rotations = quats_to_rotations(functional.normalize(quats[rows], dim=-1))
        own = torch.einsum("nji,nj->ni", rotations, noise) * (2 * scales[rows]).exp()
        means[rows] += torch.einsum("nij,nj->ni", rotations, own)
