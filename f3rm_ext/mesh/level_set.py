"""Meshes through points on a level of the Gaussians' density, or through Gaussians' centres.

The level set follows SuGaR (Guédon and Lepetit 2024, §4.2): along rays from the training cameras, the density is
evaluated around the rendered depth, within three standard deviations of the Gaussian there; where it first rises above
the level, there is a point, with the negative gradient of the density as its normal. The deviation is that of the
Gaussian's profile along the ray: its extent in that direction, SuGaR's choice, is many times as long where a flat
Gaussian is seen at an angle.

Points become a mesh by screened Poisson reconstruction (Kazhdan and Hoppe 2013), by Open3D.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import trimesh
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.cleaning import join
from f3rm_ext.mesh.open3d_conversion import from_open3d, point_cloud
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.views import StoredViews
from f3rm_ext.splat.gaussians import Gaussians, sh_to_rgb
from f3rm_ext.splat.knn import NearestGaussians
from f3rm_ext.splat.mip import sampling_intervals
from f3rm_ext.splat.regularization.field import neighbour_field
from f3rm_ext.splat.regularization.frames import rotate
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.table import ALPHA, MEAN, WHITEN, gaussian_table
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.open3d_library import open3d

SAMPLES = 21
"""Places along each ray at which the density is evaluated."""
REACH = 3.0
"""Standard deviations on either side of the rendered depth."""
FIELD_NEIGHBOURS = 16
"""Gaussians whose densities are added."""
CANDIDATES = 8
"""Nearest Gaussians among which the densest one at a point is its own."""
THINNEST = 0.3
"""Thinnest side of a Gaussian in pixels."""
SOLID = 0.5
"""Lowest opacity of a Gaussian whose centre is taken as a point."""
OUTLIER_NEIGHBOURS, OUTLIER_RATIO = 20, 20.0
"""Points whose mean distance to this many neighbours exceeds the mean by this many standard deviations are left out."""
FEWEST_POINTS = 100
"""Fewer points make no surface."""
BACKGROUND = 4.0
"""Half the side of the box of the background, in extents of the scene; that of the foreground has 1."""
_CHUNK = 1 << 14
"""Rays at a time: 344,000 places."""


class SurfaceCloud(NamedTuple):
    """Points on a surface, with all that a mesh needs."""

    positions: Float[np.ndarray, "points 3"]
    """Scene frame."""
    normals: Float[np.ndarray, "points 3"]
    """Outwards, unit vectors."""
    colors: Float[np.ndarray, "points 3"]
    """0 to 1."""


class DensityField:
    """The density of Gaussians, d(p) = Σ α G(p) over the neighbours of the Gaussian that a point belongs to; float32,
    on the CPU."""

    def __init__(self, gaussians: Gaussians) -> None:
        with torch.no_grad():
            self._table = gaussian_table(gaussians)
            self._neighbours = nearest_neighbours(gaussians.means, FIELD_NEIGHBOURS)
        self._nearest = NearestGaussians(gaussians.means)

    def owners(self, points: Float[Tensor, "points 3"]) -> Int[Tensor, " points"]:
        """Returns each point's own Gaussian: the densest one there among those with the nearest centres."""
        near = self._nearest(points, CANDIDATES)
        rows = self._table[near]
        away = points[:, None] - rows[..., MEAN:WHITEN]
        squared = rotate(away, rows[..., WHITEN:ALPHA].unflatten(-1, (3, 3))).square().sum(-1)
        best = (rows[..., ALPHA].clamp_min(1e-12).log() - 0.5 * squared).argmax(dim=1)
        return near.gather(1, best[:, None]).squeeze(1)

    def widths(self, owners: Int[Tensor, " points"], directions: Float[Tensor, "points 3"]) -> Float[Tensor, " points"]:
        """Returns standard deviations of the profiles of Gaussians along rays with unit directions, 1 / ‖S⁻¹ Rᵀ v‖."""
        whiten = self._table[owners, WHITEN:ALPHA].unflatten(-1, (3, 3))
        return 1 / rotate(directions, whiten).norm(dim=1)

    def density(self, points: Float[Tensor, "points 3"], owners: Int[Tensor, " points"]) -> Float[Tensor, " points"]:
        """Returns the density; differentiable in the points."""
        return neighbour_field(points, owners, self._table, self._neighbours).density


def level_points(
    stored: StoredViews,
    gaussians: Gaussians,
    level: float,
    count: int,
    on_progress: Callable[[int], None] = lambda views: None,
) -> SurfaceCloud:
    """Finds points where the density rises to a level on the way from the training cameras.

    Args:
        stored: rendered views; where on which rays to search, and the colours.
        gaussians: float32, on the CPU, without the 3D filter.
        level: of the density, above 0.
        count: number of rays, spread evenly over the views. Rays without a crossing give no point.
    """
    field = DensityField(thick_enough(gaussians, stored.cameras))
    generator = torch.Generator().manual_seed(0)
    parts: list[SurfaceCloud] = []
    share = -(-count // len(stored))
    for index in range(len(stored)):
        points, pixels = stored.points(index)
        chosen = torch.randperm(len(points), generator=generator)[:share].sort().values
        center, focal = stored.cameras.positions[index], float(stored.cameras.Ks[index, 0, 0])
        colors = stored.color(index).reshape(-1, 3)
        for part in chosen.split(_CHUNK):
            positions, normals, rays = crossings(field, points[part].float(), center, level, 1 / focal)
            color = colors[pixels[part][rays].numpy()].astype(np.float64) / 255.0
            parts.append(SurfaceCloud(positions.double().numpy(), normals.double().numpy(), color))
        on_progress(index + 1)
    return SurfaceCloud(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def thick_enough(gaussians: Gaussians, cameras: PinholeCameras) -> Gaussians:
    """Returns Gaussians (without the 3D filter) with no side thinner than samples are apart, so that none is missed.

    A side is at least :data:`THINNEST` pixels of the nearest training camera.
    """
    interval, visible = sampling_intervals(gaussians.means, cameras)
    least = torch.where(visible, THINNEST * interval, 0).clamp_min(1e-12).log()
    return replace(gaussians, scales=torch.maximum(gaussians.scales, least[:, None]))


def crossings(
    field: DensityField,
    points: Float[Tensor, "points 3"],
    center: Float[Tensor, "3"],
    level: float,
    pixel: float = 0.0,
) -> tuple[Float[Tensor, "found 3"], Float[Tensor, "found 3"], Int[Tensor, " found"]]:
    """Finds where the density first rises to a level along rays.

    A ray whose density is above the level from the start, as it is within geometry, has no crossing.

    Args:
        points: where the rays are thought to meet the surface.
        pixel: width of a pixel per unit of distance; the search reaches at least three pixels to either side.

    Returns:
        The crossings, linearly interpolated between samples; unit normals; and the indices of their rays.
    """
    away = points - center
    distance = away.norm(dim=1)
    directions = away / distance.clamp_min(1e-12)[:, None]
    owners = field.owners(points)
    with torch.no_grad():
        reach = REACH * torch.maximum(field.widths(owners, directions), pixel * distance)
        steps = torch.linspace(-1, 1, SAMPLES)
        along = (distance[:, None] + reach[:, None] * steps).clamp_min(0)
        places = center + along[..., None] * directions[:, None]
        density = field.density(places.flatten(0, 1), owners.repeat_interleave(SAMPLES)).view(-1, SAMPLES)
        rises = (density[:, :-1] < level) & (density[:, 1:] >= level)
        first = rises.int().argmax(dim=1)
        rays = (rises.any(dim=1) & (density[:, 0] < level)).nonzero().squeeze(1)
        first = first[rays, None]
        low, high = density[rays].gather(1, first), density[rays].gather(1, first + 1)
        near, far = along[rays].gather(1, first), along[rays].gather(1, first + 1)
        along_ray = near + (level - low) / (high - low).clamp_min(1e-12) * (far - near)
        positions = center + along_ray * directions[rays]
    positions.requires_grad_()
    (gradient,) = torch.autograd.grad(field.density(positions, owners[rays]).sum(), positions)
    length = gradient.norm(dim=1)
    usable = length > 0
    normals = -gradient[usable] / length[usable, None]
    return positions.detach()[usable], normals, rays[usable]


def center_points(gaussians: Gaussians, cameras: Float[Tensor, "cams 3"]) -> SurfaceCloud:
    """Returns the centres of opaque Gaussians; their normals are the thinnest axes, towards the nearest camera.

    The cameras are the positions of the training cameras, scene frame.
    """
    solid = gaussians[gaussians.alphas() >= SOLID]
    normals = solid.normals()
    for part in torch.arange(len(solid)).split(_CHUNK):
        towards = cameras[torch.cdist(solid.means[part], cameras).argmin(dim=1)] - solid.means[part]
        normals[part] *= torch.where((normals[part] * towards).sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
    colors = sh_to_rgb(solid.features_dc).clamp(0, 1)
    return SurfaceCloud(*(value.double().numpy() for value in (solid.means, normals, colors)))


def level_set_mesh(
    stored: StoredViews, gaussians: Gaussians, options: ExtractionOptions, on_progress: StageProgress
) -> tuple[trimesh.Trimesh, dict[str, object]]:
    """Returns the surface on which the density of Gaussians reaches a level (SuGaR), and facts about it.

    Foreground and background are reconstructed apart. Raises MeshError where the density reaches the level nowhere, or
    at too few points.
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
    extent = stored.cameras.extent(stored.cameras.median_depth(torch.from_numpy(cloud.positions)))
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
