"""3DGS-MCMC: densification by relocation and noise, in torch on any device."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.densify.base import Densifier
from f3rm_ext.splat.densify.ops import Change, Parameters, RunOptimizers, apply, optimizers_by_name
from f3rm_ext.splat.densify.relocation import add_noise, compute_relocation, sample_rows
from f3rm_ext.splat.rasterize import Rasterization


class MCMCDensifier(Densifier):
    """Moves dead Gaussians onto live ones, adds some in each round, and adds noise to transparent ones.

    Follows Kheradmand et al. 2024 with the schedule of gsplat's MCMCStrategy. There is one deviation: a relocated
    Gaussian starts with zero moments, like the one it joins. In gsplat it keeps the moments of its old position.
    """

    def step_post_backward(
        self, step: int, rasterization: Rasterization, params: Parameters, optimizers: RunOptimizers
    ) -> Change:
        options = self.options
        device = params["means"].device
        change = Change(len(params["means"]))
        with self.random_numbers(device):
            if options.start < step < self._stop(options.mcmc_stop) and step % options.every == 0:
                change = self._round(params, optimizers)
            rate = optimizers_by_name(optimizers)["means"].param_groups[0]["lr"]
            if options.mcmc_noise > 0:
                geometry = (params[name].detach() for name in ("means", "scales", "quats", "opacities"))
                add_noise(*geometry, scale=rate * options.mcmc_noise)
        return change

    @torch.no_grad()
    def _round(self, params: Parameters, optimizers: RunOptimizers) -> Change:
        count = len(params["means"])
        alphas = params["opacities"].detach().sigmoid().flatten()
        sizes = params["scales"].detach().exp()
        source = torch.arange(count, device=alphas.device)
        fresh = torch.zeros(count, dtype=torch.bool, device=alphas.device)
        dead = alphas <= self.options.mcmc_min_opacity
        moved = int(dead.sum())
        if moved == count:
            # No live Gaussian to move to: pruning all raises the right error.
            apply(Change.removal(~dead), params, optimizers)
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
            return Change(count)
        change = Change(count, source, fresh, relocated=moved, added=added)
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
        epsilon = torch.finfo(torch.float32).eps
        alphas, sizes = alphas.clone(), sizes.clone()
        alphas[rows] = new_alphas.clamp(self.options.mcmc_min_opacity, 1 - epsilon)
        sizes[rows] = new_sizes
        fresh[rows] = True
        return alphas, sizes
