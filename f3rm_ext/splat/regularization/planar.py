"""The regularisation ``planar``: flat Gaussians whose planes are the surface that all views see.

It is that of PGSR (Chen et al. 2024). Unlike SuGaR's, it drives no opacities to 0 or 1 and needs no neighbours in
space, so it keeps the Gaussians that renderings need.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.kernel_functions import PLANES
from f3rm_ext.splat.regularization.multiview import DepthView, multiview_consistency
from f3rm_ext.splat.regularization.normals import dn_consistency
from f3rm_ext.splat.regularization.patches import patch_disagreement
from f3rm_ext.splat.regularization.regularizer import Needs, Regularizer, TrainingView
from f3rm_ext.splat.triton_kernels import choose_kernels


def thickness(
    gaussians: Gaussians,
    visible: Bool[Tensor, " gaussians"],
    extent: float,
    filter_3d: Float[Tensor, " gaussians"] | None = None,
) -> Float[Tensor, ""]:
    """Computes the mean thickness of visible Gaussians beyond that of the 3D filter, in units of the extent.

    The filter widens what is thinner to its own size and lowers the opacity by as much. Flattening a Gaussian further
    would not make it thinner but transparent. The result is 0 where no Gaussian is visible.
    """
    excess = gaussians.scales.amin(dim=1).exp()
    if filter_3d is not None:
        excess = (excess - filter_3d).clamp_min(0)
    with torch.no_grad():
        counted = visible & torch.isfinite(excess)
    return torch.where(counted, excess, 0).sum() / (extent * counted.sum().clamp_min(1))


def edge_weights(photo: Float[Tensor, "h w 3"]) -> Float[Tensor, "h w"]:
    """Returns (1 − g / max g)², where g is the length of the photo's gradient: surfaces may bend where colours do."""
    kernels = choose_kernels(PLANES, photo)
    if kernels is not None:
        return kernels.edge_weights(photo)
    down = torch.zeros_like(photo)
    across = torch.zeros_like(photo)
    down[1:-1], across[:, 1:-1] = photo[2:] - photo[:-2], photo[:, 2:] - photo[:, :-2]
    steep = (down.square() + across.square()).sum(-1).sqrt()
    return (1 - steep / steep.amax().clamp_min(1e-6)).square()


class PlanarRegularizer(Regularizer):
    """Computes the losses of a step: thickness, agreement of normals with the depth of planes, and of that depth with
    a nearby view's.

    A step keeps 21 bytes per pixel for the backward pass with the kernels of numba or Triton, and 200 in torch.
    """

    def needs(self, step: int) -> Needs:
        options, active = self.options, self.active(step)
        consistent = options.multiview_factor > 0 or options.patch_factor > 0
        return Needs(planes=active and (consistent or options.plane_factor > 0), neighbour=active and consistent)

    def _opacity_losses(self, step: int, view: TrainingView) -> dict[str, Tensor]:
        return {}

    def _surface_losses(self, step: int, view: TrainingView) -> dict[str, Tensor]:
        options, needs, losses = self.options, self.needs(step), {}
        if options.flat_factor > 0:
            thick = thickness(view.gaussians, view.visible, view.extent, view.filter_3d)
            losses["thickness"] = options.flat_factor * thick
        if not needs.planes:
            return losses
        assert view.alpha is not None and view.plane_depth is not None
        assert view.normals is not None and view.photo is not None
        with torch.no_grad():
            weights = edge_weights(view.photo)
            counted = view.alpha > options.dn_min_alpha
            counted = counted if view.mask is None else counted & view.mask
        if options.plane_factor > 0:
            given = view.plane_depth, view.alpha, view.normals, view.K
            losses["plane_normals"] = options.plane_factor * dn_consistency(
                *given, divide=False, min_alpha=options.dn_min_alpha, mask=view.mask, weights=weights
            )
        if view.other is not None and needs.neighbour:
            rendered = DepthView(torch.where(counted, view.plane_depth, 0), view.viewmat, view.K)
            loss, trust = multiview_consistency(rendered, view.other)
            if options.multiview_factor > 0:
                losses["multiview"] = options.multiview_factor * loss
            if options.patch_factor > 0 and view.picture is not None:
                pixels = torch.rand(options.patches, device=trust.device, generator=view.generator)
                beside = view.other.fit(view.picture)
                losses["patches"] = options.patch_factor * patch_disagreement(
                    rendered, view.normals, view.photo, beside, view.picture, trust, pixels
                )
        return losses
