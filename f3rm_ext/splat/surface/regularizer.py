"""The regularisation of a run: what to render, which losses, when to prune; after SuGaR's schedule."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.surface.density import density_loss, normal_loss
from f3rm_ext.splat.surface.field import gaussian_table, neighbour_field
from f3rm_ext.splat.surface.frames import to_camera
from f3rm_ext.splat.surface.neighbours import NONE, NeighbourIndex
from f3rm_ext.splat.surface.normals import dn_consistency
from f3rm_ext.splat.surface.options import RegularizationOptions
from f3rm_ext.splat.surface.sampling import sample_points
from f3rm_ext.splat.surface.sdf import background_depth, look_up, near_depth, sdf_loss

MOST_LOST = 0.1
"""Share of the Gaussians that may go at once before neighbours are searched again rather than crossed out."""
FEWEST_LEFT = 0.01
"""Share of the Gaussians that pruning by opacity has to leave; else nothing is pruned."""


class Needs(NamedTuple):
    """What the model must render at a step, differentiably."""

    depth: bool
    """Composited depth and accumulation."""
    normals: bool
    """Composited normals: :func:`~f3rm_ext.splat.surface.normals.facing_normals` as three channels over 0."""


def opacity_entropy(alphas: Float[Tensor, " gaussians"], visible: Bool[Tensor, " gaussians"]) -> Float[Tensor, ""]:
    """mean over visible Gaussians of −α log(α + ε) − (1 − α) log(1 − α + ε), ε = 1e-10; 0 where none is visible."""
    alphas = alphas[visible & torch.isfinite(alphas.detach())]
    entropy = -alphas * (alphas + 1e-10).log() - (1 - alphas) * (1 - alphas + 1e-10).log()
    return entropy.sum() / max(1, len(alphas))


class Regularizer:
    """Computes the losses of a step and keeps the neighbours they need.

    Memory. Persistent: the neighbours, 4 bytes each. At a step (float32, measured on the CPU), for N Gaussians and P
    points: at most 180 N bytes for the table of Gaussians, its gradient and those of the parameters, 224 P bytes for
    points, field and their gradients, and 280 MiB for one chunk of ``options.chunk_points`` where torch works. Without
    chunks the neighbours of 1 M points alone take 5 GiB. On the CPU the kernels need no chunk.

    Args:
        options: what and when.
        workers: threads of the search for neighbours on the CPU, -1 for all cores.
    """

    def __init__(self, options: RegularizationOptions, workers: int = -1) -> None:
        self.options = options
        self.neighbours = NeighbourIndex(
            options.neighbours, options.neighbours_start, options.neighbours_every, workers=workers
        )

    def active(self, step: int) -> bool:
        """Whether the regularisers (not only the entropy) work at a step."""
        return self.options.mode != "none" and step > self.options.start

    def needs(self, step: int) -> Needs:
        """What must be rendered for :meth:`losses`."""
        active, options = self.active(step), self.options
        consistency = active and options.mode == "dn-consistency" and options.dn_factor > 0
        return Needs(depth=consistency or (active and options.mode == "sdf"), normals=consistency)

    def losses(
        self,
        step: int,
        gaussians: Gaussians,
        visible: Bool[Tensor, " gaussians"],
        viewmat: Float[Tensor, "4 4"],
        K: Float[Tensor, "3 3"],
        *,
        extent: float,
        depth: Float[Tensor, "h w"] | None = None,
        alpha: Float[Tensor, "h w"] | None = None,
        normals: Float[Tensor, "h w 3"] | None = None,
        mask: Bool[Tensor, "h w"] | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """The losses of a step by name, weighted; to be added up.

        A loss that has nothing to work on (no visible Gaussian, empty depth) is 0 with gradient 0. Gaussians that are
        not finite take no part.

        Args:
            step: counted from the first step of the run.
            gaussians: all of them, with gradients.
            visible: those with a positive radius in this view.
            viewmat: scene to camera, OpenCV axes.
            K: intrinsics in pixels of the rendered size.
            extent: radius of the cameras' positions, scene units (sdf only).
            depth: Σ w z over 0, not divided; needed where ``needs(step).depth``.
            alpha: Σ w; needed with depth.
            normals: Σ w n in the camera's frame; needed where ``needs(step).normals``.
            mask: pixels that belong to the scene; needs no depth, but ``h w`` are those of K. Gaussians whose centre
                projects elsewhere are not drawn from, pixels elsewhere do not count.
            generator: of points.
        """
        options, losses = self.options, {}
        if options.mode == "none":
            return losses
        if options.entropy_factor > 0 and options.entropy_start < step < options.entropy_end:
            losses["opacity_entropy"] = options.entropy_factor * opacity_entropy(gaussians.alphas(), visible)
        if not self.active(step):
            return losses
        needs = self.needs(step)
        if (needs.depth and (depth is None or alpha is None)) or (needs.normals and normals is None):
            raise ValueError(f"step {step} of mode {options.mode} needs {needs}")
        if mask is not None:
            visible = visible & self._in_mask(gaussians.means.detach(), viewmat, K, mask)
        background = None
        if options.mode == "sdf" and depth is not None and alpha is not None:
            z = to_camera(gaussians.means.detach()[visible], viewmat)[:, 2]
            z = z[torch.isfinite(z)]
            background = background_depth(depth, alpha, z.max() if len(z) else z.new_zeros(()))
        losses |= self._at_points(step, gaussians, visible, viewmat, K, extent, background, generator)
        if needs.normals and depth is not None and alpha is not None and normals is not None:
            losses["dn_consistency"] = options.dn_factor * dn_consistency(
                depth,
                alpha,
                normals,
                K,
                divide=options.dn_divide,
                rebuild_z=options.dn_rebuild_z,
                min_alpha=options.dn_min_alpha,
                mask=mask,
            )
        return losses

    def _at_points(
        self,
        step: int,
        gaussians: Gaussians,
        visible: Tensor,
        viewmat: Tensor,
        K: Tensor,
        extent: float,
        background: Tensor | None,
        generator: torch.Generator | None,
    ) -> dict[str, Tensor]:
        """The losses at points near the visible Gaussians: density or sdf, and normals."""
        options = self.options
        neighbours = self.neighbours.at(step, gaussians.means)
        table = gaussian_table(gaussians)
        finite = torch.isfinite(table.detach().sum(dim=1))  # a sum: one number per Gaussian, not several of its rows
        if not bool(finite.all()):
            visible = visible & finite
            known = (neighbours >= 0) & finite[neighbours.long().clamp_min(0)]
            neighbours = torch.where(known, neighbours, NONE)
        if background is not None:
            seen = visible.nonzero().squeeze(1)
            means, quats, scales = (
                value.detach()[seen] for value in (gaussians.means, gaussians.quats, gaussians.scales)
            )
            near = near_depth(
                means,
                quats_to_rotations(quats),
                scales.exp(),
                background.detach(),
                viewmat,
                K,
                sigmas=options.sdf_sigmas,
            )
            visible = torch.zeros_like(visible).index_fill(0, seen[near], True)
        points, owners = sample_points(gaussians, visible, options.samples, spread=options.spread, generator=generator)
        field = neighbour_field(points, owners, table, neighbours, chunk=options.chunk_points)
        losses = {}
        if background is not None:
            losses["surface_sdf"] = options.sdf_factor * sdf_loss(
                points, field, background, viewmat, K, extent, unit=options.sdf_unit, most=options.sdf_most
            )
        else:
            losses["surface_density"] = options.density_factor * density_loss(points, field)
        losses["surface_normal"] = options.normal_factor * normal_loss(field)
        return losses

    @staticmethod
    def _in_mask(means: Tensor, viewmat: Tensor, K: Tensor, mask: Tensor) -> Tensor:
        share, usable = look_up(mask.to(means.dtype), to_camera(means, viewmat), K)
        return usable & (share > 0.5)

    def prune_mask(self, step: int, gaussians: Gaussians) -> Bool[Tensor, " gaussians"] | None:
        """Gaussians to remove after a step, True where; None where nothing is to be done.

        Nothing is where next to none would stay, as in short runs; that is said.
        """
        options = self.options
        if options.mode == "none" or step != options.prune_step or options.prune_opacity <= 0:
            return None
        remove = ~(gaussians.alphas().detach() >= options.prune_opacity)
        opaque = len(remove) - int(remove.sum())
        if opaque == len(remove):
            return None
        if opaque < FEWEST_LEFT * len(remove):
            CONSOLE.log(
                f"Pruning by opacity is left out: only {opaque} of {len(remove)} Gaussians have an opacity of "
                f"{options.prune_opacity} or more, as happens in short runs; raise --max-num-iterations or lower "
                "--pipeline.model.surface.prune-opacity to have the others removed.",
                markup=False,
            )
            return None
        return remove

    def after_change(self, keep: Bool[Tensor, " gaussians"] | Int[Tensor, " kept"]) -> None:
        """To be called when Gaussians were removed, reordered, split or added.

        Args:
            keep: mask of those that stay, or for each new Gaussian the place of the old one (-1: none).
        """
        index = self.neighbours.index
        kept = int(keep.sum()) if keep.dtype == torch.bool else len(keep)
        if index is not None and kept < (1 - MOST_LOST) * len(index):
            self.neighbours.forget()
        self.neighbours.after_change(keep)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that a resumed run goes on as if it had not stopped."""
        return {"neighbours": self.neighbours.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place of what :meth:`state_dict` returned."""
        self.neighbours.load_state_dict(state["neighbours"])
