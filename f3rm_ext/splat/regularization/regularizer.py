"""The surface regularisation of a run, on SuGaR's schedule: what to render, which losses, when to prune."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.field import neighbour_field
from f3rm_ext.splat.regularization.frames import to_camera
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.neighbours import NONE, NeighbourIndex
from f3rm_ext.splat.regularization.normals import dn_consistency
from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.regularization.sdf import density_loss, look_up, near_depth, normal_loss, sample_points, sdf_loss
from f3rm_ext.splat.regularization.table import gaussian_table

MOST_LOST = 0.1
"""If more than this share of the Gaussians is removed at once, neighbours are searched again."""
FEWEST_LEFT = 0.01
"""Pruning by opacity is skipped if it would leave less than this share of the Gaussians."""


class Needs(NamedTuple):
    """Images that the model must render at a step, differentiably, besides colours, depth and accumulation."""

    normals: bool = False
    """Composited normals: :func:`~f3rm_ext.splat.regularization.normals.facing_normals` as three channels over 0."""
    planes: bool = False
    """Normals as above, and depth of planes (:mod:`~f3rm_ext.splat.regularization.normals`)."""
    neighbour: bool = False
    """Depth of planes of a nearby training view; without gradient."""


@dataclass(frozen=True)
class TrainingView:
    """Gaussians, a training view rendered from them, and what it is compared with. :class:`Needs` says which images."""

    gaussians: Gaussians
    """All Gaussians, with gradients."""
    visible: Bool[Tensor, " gaussians"]
    """True for Gaussians with a positive radius in this view."""
    viewmat: Float[Tensor, "4 4"]
    """Scene to camera, OpenCV axes."""
    K: Float[Tensor, "3 3"]
    """Intrinsics in pixels, at the rendered resolution."""
    extent: float
    """Extent of the scene, scene units."""
    depth: Float[Tensor, "h w"] | None = None
    """Σ w z over 0, not divided."""
    alpha: Float[Tensor, "h w"] | None = None
    """Σ w."""
    normals: Float[Tensor, "h w 3"] | None = None
    """Σ w n in the camera's frame."""
    plane_depth: Float[Tensor, "h w"] | None = None
    """Depth of planes, 0 where there is none."""
    photo: Float[Tensor, "h w 3"] | None = None
    """The photo that the view is compared with."""
    other: DepthView | None = None
    """Depth of planes of a nearby view; None if there is none."""
    picture: Float[Tensor, "h2 w2 3"] | None = None
    """Photo of that view, or colours rendered there, without gradient; of the size of its depth or another."""
    filter_3d: Float[Tensor, " gaussians"] | None = None
    """Standard deviations of the 3D filter, scene units; None for no filter."""
    mask: Bool[Tensor, "h w"] | None = None
    """True for pixels of the scene. Other pixels do not count."""
    generator: torch.Generator | None = None
    """Random number generator of the points and patches."""


def opacity_entropy(alphas: Float[Tensor, " gaussians"], visible: Bool[Tensor, " gaussians"]) -> Float[Tensor, ""]:
    """Computes the mean of −α log(α + ε) − (1 − α) log(1 − α + ε) over visible Gaussians, ε = 1e-10; 0 for none."""
    alphas = alphas[visible & torch.isfinite(alphas.detach())]
    entropy = -alphas * (alphas + 1e-10).log() - (1 - alphas) * (1 - alphas + 1e-10).log()
    return entropy.sum() / max(1, len(alphas))


class Regularizer:
    """Computes the losses of a step and keeps the neighbours that they need.

    The neighbours take 4 bytes each. A step with N Gaussians and P points takes (float32, measured on the CPU) at most
    180 N bytes for the table of Gaussians, its gradient and those of the parameters; 224 P bytes for points, field and
    their gradients; and in torch 280 MiB for a chunk of 32,768 points. Without chunks, the neighbours of 1 M points
    alone would take 5 GiB. The kernels of numba and Triton need no chunks.
    """

    def __init__(self, options: RegularizationOptions) -> None:
        self.options = options
        self.neighbours = NeighbourIndex(options.neighbours, options.neighbours_start, options.neighbours_every)

    def active(self, step: int) -> bool:
        """Returns whether the surface losses (not only the entropy) are active at a step."""
        return self.options.mode != "none" and step > self.options.first_surface_loss

    def needs(self, step: int) -> Needs:
        """Returns what must be rendered for :meth:`losses`."""
        options = self.options
        return Needs(normals=self.active(step) and options.mode == "dn-consistency" and options.dn_factor > 0)

    def losses(self, step: int, view: TrainingView) -> dict[str, Tensor]:
        """Computes the weighted losses of a step, by name, for the caller to sum.

        A loss without data (no visible Gaussian, empty depth) is 0 with gradient 0. Gaussians that are not finite are
        ignored.
        """
        losses = self._opacity_losses(step, view)
        return losses | self._surface_losses(step, view) if self.active(step) else losses

    def _opacity_losses(self, step: int, view: TrainingView) -> dict[str, Tensor]:
        options = self.options
        active = options.mode != "none" and options.entropy_start < step < options.entropy_end
        if not active or not options.entropy_factor:
            return {}
        return {"opacity_entropy": options.entropy_factor * opacity_entropy(view.gaussians.alphas(), view.visible)}

    def _surface_losses(self, step: int, view: TrainingView) -> dict[str, Tensor]:
        """Returns the losses of a step at which they are active; the images that they need are there."""
        options, visible, surface = self.options, view.visible, None
        means = view.gaussians.means.detach()
        if view.mask is not None:
            share, usable = look_up(view.mask.to(means.dtype), to_camera(means, view.viewmat), view.K)
            visible = visible & usable & (share > 0.5)
        if options.mode == "sdf":
            assert view.depth is not None and view.alpha is not None
            z = to_camera(means[visible], view.viewmat)[:, 2]
            z = z[torch.isfinite(z)]
            farthest = z.max() if len(z) else z.new_zeros(())
            surface = DepthView(view.depth + (1 - view.alpha) * farthest, view.viewmat, view.K)
        losses = self._point_losses(step, view, visible, surface)
        if self.needs(step).normals:
            assert view.depth is not None and view.alpha is not None and view.normals is not None
            losses["dn_consistency"] = options.dn_factor * dn_consistency(
                view.depth,
                view.alpha,
                view.normals,
                view.K,
                divide=options.dn_divide,
                rebuild_z=options.dn_rebuild_z,
                min_alpha=options.dn_min_alpha,
                mask=view.mask,
            )
        return losses

    def _point_losses(
        self, step: int, view: TrainingView, visible: Tensor, surface: DepthView | None
    ) -> dict[str, Tensor]:
        """Computes the losses at points near the visible Gaussians: density or, against a surface, sdf; and normals."""
        options, gaussians = self.options, view.gaussians
        neighbours = self.neighbours.at(step, gaussians.means)
        table = gaussian_table(gaussians)
        finite = torch.isfinite(table.detach().sum(dim=1))  # the sum avoids a mask of the whole table
        if not bool(finite.all()):
            visible = visible & finite
            known = (neighbours >= 0) & finite[neighbours.long().clamp_min(0)]
            neighbours = torch.where(known, neighbours, NONE)
        if surface is not None:
            visible = near_depth(gaussians, visible, surface, sigmas=options.sdf_sigmas)
        points, owners = sample_points(
            gaussians, visible, options.samples, spread=options.spread, generator=view.generator
        )
        field = neighbour_field(points, owners, table, neighbours, chunk=options.chunk_points)
        normal = {"surface_normal": options.normal_factor * normal_loss(field)}
        if surface is None:
            return {"surface_density": options.density_factor * density_loss(points, field), **normal}
        loss = sdf_loss(points, field, surface, view.extent, unit=options.sdf_unit, most=options.sdf_most)
        return {"surface_sdf": options.sdf_factor * loss, **normal}

    def prune_mask(self, step: int, gaussians: Gaussians) -> Bool[Tensor, " gaussians"] | None:
        """Returns a mask of Gaussians to remove after a step; None for none.

        Skips pruning, and logs this, if hardly any Gaussian would remain, as happens in short runs.
        """
        least = self.options.prune_below
        if self.options.mode == "none" or step != self.options.prune_step or least <= 0:
            return None
        remove = ~(gaussians.alphas().detach() >= least)
        opaque = len(remove) - int(remove.sum())
        if opaque == len(remove):
            return None
        if opaque < FEWEST_LEFT * len(remove):
            CONSOLE.log(
                f"Pruning by opacity is skipped: only {opaque} of {len(remove)} Gaussians have an opacity of "
                f"{least} or more, as happens in short runs; raise --max-num-iterations or lower "
                "--pipeline.model.surface.prune-opacity to have the others removed.",
                markup=False,
            )
            return None
        return remove

    def after_change(self, source: Int[Tensor, " gaussians"]) -> None:
        """Must be called whenever Gaussians were removed, reordered, split or added, see
        :meth:`~f3rm_ext.splat.regularization.neighbours.NeighbourIndex.after_change`."""
        index = self.neighbours.index
        if index is not None and len(source) < (1 - MOST_LOST) * len(index):
            self.neighbours.index = None  # the next use searches
        self.neighbours.after_change(source)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues as if it had not stopped."""
        return {"neighbours": self.neighbours.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.neighbours.load_state_dict(state["neighbours"])
