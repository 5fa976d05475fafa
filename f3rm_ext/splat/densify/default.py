"""3DGS's densification as gsplat implements it, on any device and with a limit on the number of Gaussians."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.engine.ranks import is_first, largest_over_ranks, sum_over_ranks, world_size
from f3rm_ext.splat.densify.base import Densifier
from f3rm_ext.splat.densify.ops import Change, Parameters, RunOptimizers, apply, optimizers_by_name, zero_moments
from f3rm_ext.splat.densify.options import DensifyOptions
from f3rm_ext.splat.rasterize import Rasterization

GEOMETRY = ("means", "scales", "quats", "opacities")
SUMS = ("grad2d", "count")
STATISTICS = (*SUMS, "radii")
KEPT = "kept"
_SCALE = "scene_scale"
"""Name of gsplat's for the size of which thresholds are fractions. It is saved, as it follows from the first points."""
LEAST_RESET, MOST_RESET = 0.01, 0.99
"""Range of the opacity to which all are lowered: no rasteriser draws less than 1/255, so that nothing would recover."""
_NEVER = 1 << 62


class _CappedStrategy(DefaultStrategy):
    """gsplat's strategy with a cap: if there is no room for all candidates, those with the largest gradients grow."""

    cap: int | None = None
    sharded: bool = False
    least_opacity: float = 0.005
    """Gaussians with less are pruned. To twice :attr:`prune_opa`, opacities are reset."""

    @torch.no_grad()
    def _update_state(self, params: Any, state: dict[str, Any], info: dict[str, Any], packed: bool = False) -> None:
        """Adds the statistics of one image to those of all Gaussians, or those of all images to a rank's Gaussians.

        gsplat chooses the visible ones first, for which the host waits for a GPU, and its versions take radii of
        different shapes.
        """
        centres = info[self.key_for_gradient]
        gradient = (centres.absgrad if self.absgrad else centres.grad)[0].clone()
        rows = info["gaussian_ids"]
        gradient[:, 0] *= info["width"] / 2.0 * info["n_cameras"]
        gradient[:, 1] *= info["height"] / 2.0 * info["n_cameras"]
        radii = info["radii"][0]
        seen = radii > 0
        names = STATISTICS if self.refine_scale2d_stop_iter > 0 else SUMS
        for name in names:
            if state[name] is None:
                state[name] = torch.zeros(len(params["means"]), device=radii.device)
        norms = torch.where(seen, gradient.norm(dim=-1), 0)
        if rows is None:
            state["grad2d"] += norms
            state["count"] += seen
        else:
            state["grad2d"].index_add_(0, rows, norms)
            state["count"].index_add_(0, rows, seen.float())
        if "radii" in names:
            # As a share of the longer side of the image.
            shares = torch.where(seen, radii / float(max(info["width"], info["height"])), 0)
            if rows is None:
                state["radii"] = torch.maximum(state["radii"], shares)
            else:
                state["radii"].scatter_reduce_(0, rows, shares, "amax")

    @torch.no_grad()
    def _grow_gs(self, params: Any, optimizers: Any, state: dict[str, Any], step: int) -> tuple[int, int]:
        if not self.sharded:
            _add_up(state)
        self._leave_room(state, step)
        grown = super()._grow_gs(params, optimizers, state, step)
        if "all_radii" in state:
            state["radii"] = state.pop("all_radii")
        return grown

    @torch.no_grad()
    def _prune_gs(self, params: Any, optimizers: Any, state: dict[str, Any], step: int) -> int:
        half_reset, self.prune_opa = self.prune_opa, self.least_opacity
        pruned = super()._prune_gs(params, optimizers, state, step)
        self.prune_opa = half_reset
        return pruned

    def _leave_room(self, state: dict[str, Any], step: int) -> None:
        """Clears the statistics of candidates for which there is no room; a copy or a split adds one Gaussian each."""
        if self.cap is None:
            return
        gradients = state["grad2d"] / state["count"].clamp_min(1)
        grows = gradients > self.grow_grad2d
        by_radius = step < self.refine_scale2d_stop_iter
        if by_radius:
            grows |= state["radii"] > self.grow_scale2d
        room = max(self.cap - len(gradients), 0)
        if int(grows.sum()) <= room:
            return
        chosen = torch.zeros_like(grows)
        # There are more candidates than places, so none of the −1 is chosen.
        chosen[torch.where(grows, gradients, -1.0).topk(room).indices] = True
        state["grad2d"] = torch.where(chosen, state["grad2d"], 0)
        if by_radius:
            # Pruning comes next and needs the true radii; gsplat carries over every tensor of the state.
            state["all_radii"] = state["radii"]
            state["radii"] = torch.where(chosen, state["radii"], 0)


class DefaultDensifier(Densifier):
    """Copies small and splits large Gaussians where image-space gradients are high, and prunes transparent ones.

    Follows Kerbl et al. 2023 as implemented in gsplat, or AbsGS with `absgrad`. gsplat works on a sketch of the
    Gaussians: their geometry and the source of each row. The other parameters and the moments follow by row, in their
    own dtype. There are two deviations: opacities are not reset at step 0, and there may be a cap.
    """

    def __init__(
        self, options: DensifyOptions, scene_scale: float, last_step: int | None = None, sharded: bool = False
    ) -> None:
        """Starts without statistics; thresholds of size are fractions of ``scene_scale``, scene units."""
        super().__init__(options, last_step, sharded)
        self.absgrad = options.absgrad
        self.strategy = _CappedStrategy(
            prune_opa=min(max(2 * options.prune_opacity, LEAST_RESET), MOST_RESET) / 2,
            grow_grad2d=options.grow_grad2d,
            grow_scale3d=options.grow_scale3d,
            grow_scale2d=options.grow_scale2d,
            prune_scale3d=options.prune_scale3d,
            prune_scale2d=options.prune_scale2d,
            refine_scale2d_stop_iter=options.stop_scale2d,
            refine_start_iter=options.start,
            refine_stop_iter=self._stop(options.stop),
            reset_every=options.reset_every or _NEVER,
            refine_every=options.every,
            pause_refine_after_reset=options.pause_after_reset,
            absgrad=options.absgrad,
            revised_opacity=options.revised_opacity,
        )
        self.strategy.cap, self.strategy.sharded = self.options.cap, sharded
        self.strategy.least_opacity = options.prune_opacity
        self.statistics: dict[str, Any] = self.strategy.initialize_state(scene_scale=scene_scale)

    def step_pre_backward(self, step: int, rasterization: Rasterization) -> None:
        if step < self.strategy.refine_stop_iter and rasterization.means2d.requires_grad:
            rasterization.means2d.retain_grad()

    def step_post_backward(
        self, step: int, rasterization: Rasterization, params: Parameters, optimizers: RunOptimizers
    ) -> Change | None:
        if step >= self.strategy.refine_stop_iter:
            self._replace_statistics(lambda value: None)  # no longer needed
            return None
        device = params["means"].device
        self._replace_statistics(lambda value: value.to(device))  # a checkpoint is loaded to the CPU
        info = _info(rasterization, self.absgrad)
        resets = step > 0 and step % self.strategy.reset_every == 0
        if step == 0 or (step % self.strategy.refine_every and not resets):
            self.strategy._update_state({"means": params["means"]}, self.statistics, info)  # type: ignore[arg-type]
            return None
        change = self._round(step, info, resets, params, optimizers)
        if resets:
            zero_moments(params["opacities"], optimizers_by_name(optimizers).get("opacities"))
        return change

    def _round(
        self, step: int, info: dict[str, Any], resets: bool, params: Parameters, optimizers: RunOptimizers
    ) -> Change | None:
        """Runs gsplat on a sketch, then applies the change to everything else."""
        count, device = len(params["means"]), params["means"].device
        sketch, counter = _sketch(params)
        self.statistics["source"] = torch.arange(count, device=device)
        with self.random_numbers(device):
            self.strategy.step_post_backward(sketch, counter, self.statistics, step, info)  # type: ignore[arg-type]
        if resets:
            # Not every version of gsplat does it, though every version means to.
            highest = torch.logit(torch.tensor(self.strategy.prune_opa * 2.0)).item()
            sketch["opacities"].data.clamp_(max=highest)
        source = self.statistics.pop("source")
        fresh = counter["means"].state[sketch["means"]][KEPT] == 0
        if len(source) == count and not bool(fresh.any()):  # none was added, so none was removed
            params["opacities"].data.copy_(sketch["opacities"])
            return None
        change = Change(count, source, fresh)
        apply(change, params, optimizers, {name: value.detach() for name, value in sketch.items()})
        return change

    def gather_statistics(self) -> None:
        if self.sharded:
            return
        _add_up(self.statistics)
        if not is_first():
            self._replace_statistics(Tensor.zero_, SUMS)

    def _replace_statistics(self, change: Callable[[Tensor], Tensor | None], names: Iterable[str] = STATISTICS) -> None:
        for name in names:
            if self.statistics.get(name) is not None:
                self.statistics[name] = change(self.statistics[name])

    def follow(self, change: Change) -> None:
        self._replace_statistics(change.carry)

    def state_dict(self) -> dict[str, Any]:
        kept = {name: value for name in STATISTICS if (value := self.statistics.get(name)) is not None}
        return {**super().state_dict(), **kept, _SCALE: self.statistics[_SCALE]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.statistics[_SCALE] = state.get(_SCALE, self.statistics[_SCALE])
        for name in STATISTICS:
            if name in self.statistics:
                self.statistics[name] = state.get(name)
        if not self.sharded and not is_first():  # what the checkpoint holds was added up over all ranks
            self._replace_statistics(Tensor.zero_, SUMS)


def _info(rasterization: Rasterization, absgrad: bool) -> dict[str, Any]:
    """Returns what gsplat's rasteriser would pass to its strategy."""
    points = rasterization.means2d
    gradient = getattr(points, "absgrad", None) if absgrad else points.grad
    if gradient is None:  # the loss depends on no Gaussian
        gradient = torch.zeros_like(points)
    height, width = rasterization.colors.shape[:2]
    return {
        "width": width,
        "height": height,
        # The loss is the mean over the images of all ranks; gsplat multiplies gradients by their number.
        "n_cameras": world_size(),
        "radii": rasterization.radii[None],
        "gaussian_ids": rasterization.rows,
        "means2d": SimpleNamespace(grad=gradient.detach()[None], absgrad=gradient.detach()[None]),
    }


def _add_up(statistics: dict[str, Any]) -> None:
    """Adds up the statistics of all ranks; they agree on whether there are any."""
    if statistics.get("grad2d") is not None:
        sum_over_ranks(*(statistics[name] for name in SUMS))
        if statistics.get("radii") is not None:
            largest_over_ranks(statistics["radii"])


def _sketch(params: Parameters) -> tuple[dict[str, Parameter], dict[str, Any]]:
    """Returns geometry for gsplat to rearrange, and optimisers whose only state marks rows that are unchanged."""
    sketch = {name: Parameter(params[name].detach()) for name in GEOMETRY}
    counter = {
        name: SimpleNamespace(param_groups=[{"params": [value]}], state={value: {}}) for name, value in sketch.items()
    }
    means = sketch["means"]
    counter["means"].state[means][KEPT] = torch.ones(len(means), device=means.device)
    return sketch, counter
