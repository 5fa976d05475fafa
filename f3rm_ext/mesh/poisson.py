"""Screened Poisson reconstruction (Kazhdan and Hoppe 2013) of points with normals, by Open3D."""

import numpy as np
import torch
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.cleaning import join
from f3rm_ext.mesh.level_set import SurfaceCloud, level_points
from f3rm_ext.mesh.open3d_conversion import from_open3d, point_cloud
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.views import StoredViews
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.open3d_library import open3d

OUTLIER_NEIGHBOURS, OUTLIER_RATIO = 20, 20.0
"""Points whose mean distance to this many neighbours exceeds the mean by this many standard deviations are left out."""
FEWEST_POINTS = 100
"""Fewer points make no surface."""
BACKGROUND = 4.0
"""Half the side of the box of the background, in extents of the scene; that of the foreground has 1."""


def level_set_mesh(
    stored: StoredViews, gaussians: Gaussians, options: ExtractionOptions, on_progress: StageProgress
) -> tuple[trimesh.Trimesh, dict[str, object]]:
    """Returns the surface on which the density of Gaussians reaches a level (SuGaR), and facts about it.

    Foreground and background are reconstructed apart.

    Raises:
        MeshError: the density reaches the level nowhere, or at too few points.
    """
    total = len(stored)
    cloud = level_points(
        stored, gaussians, options.level, options.points, lambda done: on_progress("Points", done, total)
    )
    if not len(cloud.positions):
        raise MeshError(
            f"The density reaches the level {options.level:g} nowhere: lower --level, or train longer or with "
            "--pipeline.model.regularization."
        )
    cameras = stored.cameras.positions.double().numpy()
    extent = stored.cameras.extent(torch.from_numpy(cloud.positions))
    distances = np.abs(cloud.positions - cameras.mean(axis=0)).max(axis=1, initial=0) / extent
    foreground = distances <= 1
    boxes = [foreground, ~foreground & (distances <= BACKGROUND)]
    parts: list[trimesh.Trimesh] = []
    for number, box in enumerate(boxes):
        on_progress("Poisson", number, len(boxes))
        # A few stray points are no background.
        if box.sum() >= FEWEST_POINTS or (number == 1 and not parts):
            points = SurfaceCloud(*(values[box] for values in cloud))
            parts.append(poisson_mesh(points, options.poisson_depth, options.trim))
    on_progress("Poisson", len(boxes), len(boxes))
    return join(parts), {"points": len(cloud.positions), "foreground_points": int(foreground.sum())}


def poisson_mesh(cloud: SurfaceCloud, depth: int, trim: float) -> trimesh.Trimesh:
    """Returns the surface through points, with their colours.

    Outliers are left out first. The surface is closed where there are no points; its vertices with the lowest density
    of points are then removed.

    Args:
        cloud: points, scene frame.
        depth: of the octree; the finest cells are 1 / 2^depth of the points' box.
        trim: share of the vertices to remove, 0 to 1.

    Raises:
        MeshError: there are too few points.
    """
    points = point_cloud(*cloud)
    if len(cloud.positions) >= FEWEST_POINTS:
        points, _ = points.remove_statistical_outlier(OUTLIER_NEIGHBOURS, OUTLIER_RATIO)
    if len(points.points) < FEWEST_POINTS:
        raise MeshError(
            f"Only {len(points.points)} points were found on the surface, too few for a mesh: lower --level if the "
            "method is level-set, train longer, or use --method tsdf."
        )
    mesh, density = open3d().geometry.TriangleMesh.create_from_point_cloud_poisson(points, depth=depth)
    density = np.asarray(density)
    if trim > 0 and len(density):
        mesh.remove_vertices_by_mask(density < np.quantile(density, trim))
    return from_open3d(mesh)
