"""Screened Poisson reconstruction (Kazhdan and Hoppe 2013) of points with normals, by Open3D."""

import numpy as np
import trimesh
from jaxtyping import Float

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.open3d_library import from_open3d, open3d, point_cloud

OUTLIER_NEIGHBOURS, OUTLIER_RATIO = 20, 20.0
"""Points whose mean distance to this many neighbours exceeds the mean by this many standard deviations are left out."""
FEWEST_POINTS = 100
"""Fewer points make no surface."""


def poisson_mesh(
    positions: Float[np.ndarray, "points 3"],
    normals: Float[np.ndarray, "points 3"],
    colors: Float[np.ndarray, "points 3"],
    depth: int,
    trim: float,
) -> trimesh.Trimesh:
    """Returns the surface through points, with their colours.

    Outliers are left out first. The surface is closed where there are no points; its vertices with the lowest density
    of points are then removed.

    Args:
        positions: scene frame.
        normals: outwards, unit vectors.
        colors: 0 to 1.
        depth: of the octree; the finest cells are 1 / 2^depth of the points' box.
        trim: share of the vertices to remove, 0 to 1.

    Raises:
        MeshError: there are too few points.
    """
    o3d = open3d()
    cloud = point_cloud(positions, normals, colors)
    if len(positions) >= FEWEST_POINTS:
        cloud, _ = cloud.remove_statistical_outlier(OUTLIER_NEIGHBOURS, OUTLIER_RATIO)
    if len(cloud.points) < FEWEST_POINTS:
        raise MeshError(
            f"Only {len(cloud.points)} points were found on the surface, too few for a mesh: lower --level if the "
            "method is level-set, train longer, or use --method tsdf."
        )
    mesh, density = o3d.geometry.TriangleMesh.create_from_point_cloud_poisson(cloud, depth=depth)
    density = np.asarray(density)
    if trim > 0 and len(density):
        mesh.remove_vertices_by_mask(density < np.quantile(density, trim))
    return from_open3d(mesh)
