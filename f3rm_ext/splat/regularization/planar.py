"""The regularisation ``planar``: flat Gaussians whose planes are the surface that all views see.

It is that of PGSR (Chen et al. 2024) but for its comparison of image patches. Unlike SuGaR's, it drives no opacities to
0 or 1 and needs no neighbours in space, so it keeps the Gaussians that renderings need.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.multiview import DepthView, multiview_consistency, trusted_errors
from f3rm_ext.splat.regularization.normals import dn_consistency
from f3rm_ext.splat.regularization.patches import grey, patch_disagreement
from f3rm_ext.splat.regularization.regularizer import Needs, Regularizer


def thickness(
    gaussians: Gaussians,
    visible: Bool[Tensor, " gaussians"],
    extent: float,
    filter_3d: Float[Tensor, " gaussians"] | None = None,
) -> Float[Tensor, ""]:
    """Computes the mean thickness of visible Gaussians beyond that of the 3D filter, in units of the extent.

    The filter widens what is thinner to its own size and lowers the opacity by as much. Flattening a Gaussian further
    would not make it thinner but transparent.

    Args:
        gaussians: all Gaussians.
        visible: True for those that count; the result is 0 for none.
        extent: radius of the cameras' positions, scene units.
        filter_3d: standard deviations of the filter, scene units; None for no filter.
    """
    excess = gaussians.scales.amin(dim=1).exp()
    if filter_3d is not None:
        excess = (excess - filter_3d).clamp_min(0)
    with torch.no_grad():
        counted = visible & torch.isfinite(excess)
    return torch.where(counted, excess, 0).sum() / (extent * counted.sum().clamp_min(1))


def edge_weights(photo: Float[Tensor, "h w 3"]) -> Float[Tensor, "h w"]:
    """Returns (1 − g / max g)², where g is the length of the photo's gradient: surfaces may bend where colours do."""
    down = torch.zeros_like(photo)
    across = torch.zeros_like(photo)
    down[1:-1], across[:, 1:-1] = photo[2:] - photo[:-2], photo[:, 2:] - photo[:, :-2]
    steep = (down.square() + across.square()).sum(-1).sqrt()
    return (1 - steep / steep.amax().clamp_min(1e-6)).square()


class PlanarRegularizer(Regularizer):
    """Computes the losses of a step: thickness, agreement of normals with the depth of planes, and of that depth with
    a nearby view's.

    A step takes 200 bytes per pixel for the backward pass (measured on the CPU).
    """

    def active(self, step: int) -> bool:
        """Returns whether the losses are active at a step."""
        return step > self.options.planar_start

    def needs(self, step: int) -> Needs:
        """Returns what must be rendered for :meth:`losses`."""
        options, active = self.options, self.active(step)
        consistent = options.multiview_factor > 0 or options.patch_factor > 0
        return Needs(
            depth=False,
            normals=False,
            planes=active and (consistent or options.plane_factor > 0),
            neighbour=active and consistent,
        )

    def losses(
        self,
        step: int,
        gaussians: Gaussians,
        visible: Bool[Tensor, " gaussians"],
        viewmat: Float[Tensor, "4 4"],
        K: Float[Tensor, "3 3"],
        *,
        extent: float,
        alpha: Float[Tensor, "h w"] | None = None,
        normals: Float[Tensor, "h w 3"] | None = None,
        plane_depth: Float[Tensor, "h w"] | None = None,
        photo: Float[Tensor, "h w 3"] | None = None,
        other: DepthView | None = None,
        picture: Float[Tensor, "h2 w2 3"] | None = None,
        filter_3d: Float[Tensor, " gaussians"] | None = None,
        mask: Bool[Tensor, "h w"] | None = None,
        generator: torch.Generator | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Computes the weighted losses of a step, by name; see :meth:`Regularizer.losses`.

        Args:
            step: position in the schedule.
            gaussians: all Gaussians, with gradients.
            visible: True for Gaussians with a positive radius in this view.
            viewmat: scene to camera, OpenCV axes.
            K: intrinsics in pixels, at the rendered resolution.
            extent: radius of the cameras' positions, scene units.
            alpha: Σ w.
            normals: Σ w n in the camera's frame.
            plane_depth: depth of planes, 0 where there is none.
            photo: the photo that the view is compared with.
            other: depth of planes of a nearby view; None if there is none.
            picture: photo of that view, or colours rendered there, without gradient.
            filter_3d: standard deviations of the 3D filter, scene units; None for no filter.
            mask: True for pixels of the scene, at the resolution of K.
            generator: random number generator of the patches.
            _: what only the other regularisations need.
        """
        options, losses = self.options, {}
        if not self.active(step):
            return losses
        if options.flat_factor > 0:
            losses["thickness"] = options.flat_factor * thickness(gaussians, visible, extent, filter_3d)
        needs = self.needs(step)
        if not needs.planes:
            return losses
        if alpha is None or normals is None or plane_depth is None or photo is None:
            raise ValueError(f"step {step} of mode planar needs {needs}")
        with torch.no_grad():
            weights = edge_weights(photo)
            counted = alpha > options.dn_min_alpha
            counted = counted if mask is None else counted & mask
        if options.plane_factor > 0:
            losses["plane_normals"] = options.plane_factor * dn_consistency(
                plane_depth,
                alpha,
                normals,
                K,
                divide=False,
                min_alpha=options.dn_min_alpha,
                mask=mask,
                weights=weights,
            )
        if other is not None and needs.neighbour:
            seen = DepthView(torch.where(counted, plane_depth, 0), viewmat, K)
            errors, trust = trusted_errors(seen, other)
            if options.multiview_factor > 0:
                losses["multiview"] = options.multiview_factor * multiview_consistency(errors, trust)
            if options.patch_factor > 0 and picture is not None:
                pixels = torch.rand(options.patches, device=errors.device, generator=generator)
                losses["patches"] = options.patch_factor * patch_disagreement(
                    seen, normals, grey(photo), other, grey(picture), trust, pixels
                )
        return losses

    def pruning(self) -> tuple[int, float]:
        """Returns the step at which Gaussians are removed by opacity, and the opacity below which."""
        return self.options.prune_step, self.options.planar_prune_opacity
