"""The refined mesh, with colours from the Gaussians on it."""

import numpy as np
import torch
import trimesh

from f3rm_ext.mesh.bound.gaussians import BoundGaussians
from f3rm_ext.mesh.bound.layout import barycentric_weights
from f3rm_ext.splat.gaussians import sh_to_rgb


@torch.no_grad()
def refined_mesh(bound: BoundGaussians) -> trimesh.Trimesh:
    """Returns the mesh that Gaussians are bound to, scene frame.

    A vertex has the mean colour of the Gaussians on its triangles, those near it counting more: their weight is their
    opacity times the barycentric weight of the vertex.
    """
    count = len(bound.scales)
    colors = sh_to_rgb(bound.features_dc[:count]).clamp(0, 1).reshape(len(bound.faces), -1, 3)
    alphas = bound.opacities[:count].sigmoid().reshape(len(bound.faces), -1)
    weights = alphas[:, :, None] * barycentric_weights(bound.per_triangle, alphas.device, alphas.dtype)
    corners = bound.faces.flatten()
    total = bound.vertices.new_zeros(len(bound.vertices), 4)
    total.index_add_(
        0,
        corners,
        torch.cat([torch.einsum("fnk,fnc->fkc", weights, colors), weights.sum(dim=1)[:, :, None]], dim=2).reshape(
            -1, 4
        ),
    )
    shades = (total[:, :3] / total[:, 3:].clamp_min(1e-12) * 255).round().to(torch.uint8)
    return trimesh.Trimesh(
        bound.vertices.cpu().numpy().astype(np.float64),
        bound.faces.cpu().numpy(),
        vertex_colors=shades.cpu().numpy(),
        process=False,
    )
