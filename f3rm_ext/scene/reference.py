"""The ray caster in plain numpy, every ray against every triangle: what the kernels are tested against."""

import numpy as np
from jaxtyping import Float, Int


def cast_brute_force(
    vertices: Float[np.ndarray, "verts 3"],
    faces: Int[np.ndarray, "faces 3"],
    origins: Float[np.ndarray, "rays 3"],
    directions: Float[np.ndarray, "rays 3"],
) -> tuple[Float[np.ndarray, "rays"], Int[np.ndarray, "rays"]]:
    """Nearest hit of each ray: distance in units of the direction's length (∞ for a miss) and face index (-1)."""
    corners = vertices.astype(np.float64)[faces]
    distances = np.full((len(origins), len(faces)), np.inf)
    for r, (origin, direction) in enumerate(zip(origins, directions, strict=True)):
        # origin + t·direction = corner0 + u·edge1 + v·edge2, one 3x3 system per triangle.
        edge1, edge2 = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
        systems = np.stack([np.broadcast_to(-direction, edge1.shape), edge1, edge2], axis=-1)
        solvable = np.abs(np.linalg.det(systems)) > 1e-18
        right = (origin - corners[solvable, 0])[..., None]
        t, u, v = np.moveaxis(np.linalg.solve(systems[solvable], right)[..., 0], -1, 0)
        inside = (u >= 0) & (v >= 0) & (u + v <= 1) & (t > 0)
        distances[r, solvable] = np.where(inside, t, np.inf)
    nearest = distances.argmin(axis=1)
    t = distances[np.arange(len(origins)), nearest]
    return t, np.where(np.isfinite(t), nearest, -1)
