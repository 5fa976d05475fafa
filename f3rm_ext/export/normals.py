"""Normals of a point cloud, from each point's neighbours: they need nothing of the model that made the points."""

import numpy as np
from jaxtyping import Float, Float32

NEIGHBOURS = 16
_CHUNK = 1 << 15


def estimate_normals(
    points: Float[np.ndarray, "points 3"], seen_from: Float[np.ndarray, "points 3"], neighbours: int = NEIGHBOURS
) -> Float32[np.ndarray, "points 3"]:
    """Unit normals: across the plane that fits a point's neighbours best, on the side it was seen from.

    Args:
        points: any units.
        seen_from: a place on the outside for each, such as the camera that saw it.
        neighbours: how many, the point itself included; fewer where there are not so many.

    Returns:
        One per point; of fewer than three points the direction to where each was seen from.
    """
    from scipy.spatial import KDTree

    towards = seen_from - points
    towards = towards / np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-12)
    if len(points) < 3:
        return towards.astype(np.float32)
    tree = KDTree(points)
    count = min(neighbours, len(points))
    normals = np.empty((len(points), 3), dtype=np.float32)
    for start in range(0, len(points), _CHUNK):
        part = slice(start, start + _CHUNK)
        _, found = tree.query(points[part], k=count)
        near = points[found].astype(np.float64)
        near -= near.mean(axis=1, keepdims=True)
        _, axes = np.linalg.eigh(np.einsum("nki,nkj->nij", near, near))
        normal = axes[:, :, 0]
        facing = np.where((normal * towards[part]).sum(axis=1, keepdims=True) < 0, -1.0, 1.0)
        normals[part] = normal * facing
    return normals
