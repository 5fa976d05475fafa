"""First colours of Gaussians on a mesh: those of the photos that see them."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.mesh.bound.gaussians import BoundGaussians
from f3rm_ext.mesh.bound.layout import barycentric_weights
from f3rm_ext.mesh.texture.photos import Photos


def photo_colors(bound: BoundGaussians, photos: Photos) -> Float[Tensor, "bound 3"]:
    """Returns the colours of the Gaussians on triangles, 0 to 1, blended from photos as those of texels are.

    A short run could not find them: a step of Adam changes a colour by no more than its learning rate.

    Args:
        bound: Gaussians on a mesh, CPU.
        photos: in its frame; at least one sees it.
    """
    import trimesh  # slow to import

    from f3rm_ext.mesh.texture.atlas import Texels
    from f3rm_ext.mesh.texture.blending import blend_photos

    count, faces = bound.per_triangle, bound.faces.numpy()
    mesh = trimesh.Trimesh(bound.vertices.double().numpy(), faces, process=False)
    weights = np.tile(barycentric_weights(count)[:, 1:].numpy(), (len(faces), 1))
    centers = Texels(np.repeat(np.arange(len(faces)), count), weights, np.arange(len(weights)))
    blend = blend_photos(mesh, centers, np.asarray(mesh.area_faces / count, np.float32), photos, balance=False)
    return torch.from_numpy(blend.colors / 255).float()
