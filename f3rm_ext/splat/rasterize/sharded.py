"""Rasterisation of Gaussians of which each process (rank) holds a part, with the kernels of gsplat on CUDA.

Every rank projects its own Gaussians for the cameras of all ranks, and sends each rank what that rank's camera sees
(Zhao et al. 2024, arXiv 2406.18533). Gradients take the way back, so those of a Gaussian arrive, added up over all
images, at the rank that holds it.

``gsplat.rasterization(..., distributed=True)`` does the same. Its steps are called here one by one: in gsplat 1.5.3 it
looks up tiles by the images that Gaussians had before they were sent, and in both versions it fails where a rank has
nothing in view.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from jaxtyping import Float
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import Rasterization
from f3rm_ext.splat.rasterize.camera import Camera, Projection, scalar_radii
from f3rm_ext.splat.rasterize.gsplat_backend import composite


def rasterize_sharded(
    shapes: Ellipsoids,
    features_dc: Float[Tensor, "gaussians 3"],
    features_rest: Float[Tensor, "gaussians rest 3"],
    sh_degree: int,
    camera: Camera,
    background: Float[Tensor, "3"] | None,
) -> Rasterization:
    """Renders one camera on every rank, from the Gaussians of all ranks. All must call it, with images of one size.

    Returns:
        The image of this rank. Centres and radii are those of this rank's Gaussians in the images of all ranks, one
        entry for each Gaussian and image that shows it; ``rows`` names the Gaussian.

    Raises:
        ConfigError: gsplat has no kernels on this machine.
    """
    compat.check_gsplat_kernels()
    from gsplat import fully_fused_projection, spherical_harmonics

    means, quats, sizes, alphas = shapes.map(Tensor.float)
    viewmats, Ks = _gather_ranks(camera.viewmat), _gather_ranks(camera.K)
    projected: Any = fully_fused_projection(
        means, None, quats, sizes, viewmats, Ks, *camera.size,
        eps2d=camera.eps2d, near_plane=camera.near_plane, packed=True, calc_compensations=camera.antialiased,
    )  # fmt: skip
    # Version 1.5 has numbers of batches before them. Entries come camera by camera.
    images, rows, reaches, means2d, depths, conics, compensations = projected[-7:]
    images, rows = images.long(), rows.long()
    # What index_select takes is given back by additions; for an index in brackets torch would sort it.
    opacities = alphas.index_select(0, rows)
    if compensations is not None:
        opacities = opacities * compensations
    positions = -(viewmats[:, :3, :3].transpose(1, 2) @ viewmats[:, :3, 3:])[..., 0]
    directions = means.detach()[rows] - positions[images]
    coefficients = torch.cat([value.index_select(0, rows) for value in (features_dc[:, None], features_rest)], dim=1)
    colors = (spherical_harmonics(sh_degree, directions, coefficients) + 0.5).clamp_min(0.0)

    to_each = torch.bincount(images, minlength=len(viewmats))
    from_each = torch.empty_like(to_each)
    dist.all_to_all_single(from_each, to_each)
    sent, received = torch.stack([to_each, from_each]).tolist()
    table = torch.cat([means2d, depths[:, None], conics, opacities[:, None], colors], dim=1)
    there = collectives.all_to_all(_room(table, received), list(table.split(sent)))
    centres, z, inverses, shown, payload = torch.cat(there).split([2, 1, 3, 1, 3], dim=1)
    room = _room(reaches, received)
    dist.all_to_all(room, list(reaches.split(sent)))
    arrived = Projection(centres, inverses, z[:, 0], shown[:, 0], torch.cat(room))
    picture, depth, alpha = composite(arrived, payload, camera.size, background)
    return Rasterization(picture, depth, alpha, means2d, scalar_radii(reaches), rows)


def _gather_ranks(own: Tensor) -> Tensor:
    """Returns a tensor of all ranks, which have one of the same shape, stacked by rank."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    return torch.stack(everyone)


def _room(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Returns tensors for so many rows of other ranks."""
    return [rows.new_empty(count, *rows.shape[1:]) for count in counts]
