"""Depth for the holes of a mesh: what the photos see there, but too few views agree on."""

from collections.abc import Callable

import numpy as np
import trimesh

from f3rm_ext.surface.open3d_library import open3d, raycasting_scene
from f3rm_ext.surface.views import StoredViews


def fill_holes(
    stored: StoredViews, mesh: trimesh.Trimesh, on_progress: Callable[[int], None] = lambda done: None
) -> float:
    """Gives pixels without depth that look through holes of a mesh the depth back that was rendered for them.

    Through a hole a camera sees nothing of the mesh, or its inside.

    Args:
        stored: the views that the mesh was made of, with the depth that was fused.
        mesh: scene frame, triangles counter-clockwise from outside.
        on_progress: called with the number of views done.

    Returns:
        The share of all pixels that got depth.
    """
    tensor, scene = open3d().core.Tensor, raycasting_scene(mesh.vertices, mesh.faces)
    filled = pixels = 0
    for index in range(len(stored)):
        rendered, fused = stored.rendered_depth(index), stored.depth(index)
        height, width = rendered.shape
        K, viewmat = (part[index].double().numpy().copy() for part in (stored.cameras.Ks, stored.cameras.viewmats))
        rays = scene.create_rays_pinhole(tensor(K), tensor(viewmat), width, height)
        hit = scene.cast_rays(rays)
        inside = (hit["primitive_normals"].numpy() * rays.numpy()[..., 3:]).sum(axis=-1) > 0
        through = (np.isinf(hit["t_hit"].numpy()) | inside) & (fused == 0) & (rendered > 0)
        stored.set_depth(index, np.where(through, rendered, fused))
        filled, pixels = filled + int(through.sum()), pixels + through.size
        on_progress(index + 1)
    return filled / max(pixels, 1)
