"""Points on the surfaces of a trained scene, as its cameras see them, and their normals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, score_points
from f3rm_ext.utils.pictures import to_bytes

DEPTH_OUTPUTS = {"median": "depth", "expected": "expected_depth"}
"""The output of a model for each kind of depth."""
NEIGHBOURS = 16
"""How many points a normal is fitted to, the point itself included."""
_MAX_ROUNDS = 8
_MAX_RAYS_PER_POINT = 40
"""Rays cast for each requested point, at most."""
_STALLED = 0.25
"""A round that finds less than this share of the missing points is the last: there are no more, as with voxels."""
_NORMALS_CHUNK = 1 << 15


@runtime_checkable
class HasDensity(Protocol):
    """A model with a density everywhere: fields have one, splats do not."""

    def density_at(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points"]:
        """Returns the density per scene unit at points of the scene frame."""
        ...


@dataclass(frozen=True)
class CloudOptions:
    """Which points to take. Lengths are in scene units."""

    points: int = 200_000
    """Number of points, at most."""
    accumulation: float = 0.8
    """Lowest opacity along the ray, 0 to 1."""
    density: float = 0.0
    """Lowest density at the point, per scene unit; 0 takes all."""
    inside: Callable[[Float[np.ndarray, "points 3"]], Bool[np.ndarray, "points"]] | None = None
    """Says which points of the scene frame are in the crop box; None takes all."""
    voxel: float = 0.0
    """Side of the cubes that keep one point each; 0 takes all."""
    depth: Literal["median", "expected"] = "median"
    """The depth that places a point on its ray."""
    select: float | None = None
    """Lowest score: at least one query must reach it; None takes all."""


@dataclass(frozen=True)
class Cloud:
    """Points with their colours and scores."""

    positions: Float32[np.ndarray, "points 3"]
    """Scene frame."""
    colors: UInt8[np.ndarray, "points 3"]
    accumulation: Float32[np.ndarray, "points"]
    density: Float32[np.ndarray, "points"]
    """Density per scene unit; NaN where the model has none."""
    seen_from: Float32[np.ndarray, "points 3"]
    """Centre of the camera that saw the point, scene frame."""
    scores: Float32[np.ndarray, "points queries"]

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, which: np.ndarray) -> "Cloud":
        """Returns some of the points, by index or mask."""
        return Cloud(**{name: values[which] for name, values in vars(self).items()})

    @classmethod
    def join(cls, parts: Sequence["Cloud"]) -> "Cloud":
        """Returns all points of one or more clouds."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


@dataclass
class Tally:
    """How many points passed each test, to explain why so few are left."""

    rays: int = 0
    opaque: int = 0
    dense: int = 0
    inside: int = 0
    selected: int = 0

    def __str__(self) -> str:
        return (
            f"of {self.rays} rays {self.opaque} met a surface, {self.dense} of these were dense enough, "
            f"{self.inside} in the crop box and {self.selected} selected"
        )


def gather_points(
    model: Queryable,
    cameras: Cameras,
    options: CloudOptions,
    queries: Sequence[Query] = (),
    on_progress: Callable[[int], None] = lambda points: None,
) -> Cloud:
    """Gathers points that cameras see, spread evenly over their pictures. Repeatable: random numbers are seeded.

    Renders small pictures, again and again at places between the earlier pixels, until there are enough points. Memory
    holds the points only, whatever the size of the photos.

    Args:
        model: renders ``rgb``, ``accumulation`` and depth.
        cameras: the training cameras, scene frame.
        on_progress: called with the number of points so far.

    Raises:
        ConfigError: no point is left, or the options need a density and the model has none.
    """
    if options.density > 0 and not isinstance(model, HasDensity):
        raise ConfigError("This model has no density: leave --density out and use --accumulation.")
    cameras = cameras.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tally, parts, wanted = Tally(), list[Cloud](), float(options.points)
    for _ in range(_MAX_ROUNDS):
        before = sum(map(len, parts))
        for index in torch.randperm(len(cameras), generator=generator).tolist():
            camera = _small_camera(cameras[index : index + 1], wanted / len(cameras), generator)
            parts.append(_visible_points(model, camera, options, queries, tally))
            on_progress(min(options.points, sum(map(len, parts))))
        cloud = voxel_downsample(Cloud.join(parts), options.voxel)
        parts = [cloud]
        on_progress(min(options.points, len(cloud)))
        missing = options.points - len(cloud)
        stalled = before and len(cloud) - before < _STALLED * (options.points - before)
        if missing <= 0 or stalled or tally.rays >= _MAX_RAYS_PER_POINT * options.points:
            break
        share = max(len(cloud) / tally.rays, 1.0 / _MAX_RAYS_PER_POINT)
        wanted = min(
            max(1.1 * missing / share, 0.1 * options.points), _MAX_RAYS_PER_POINT * options.points - tally.rays
        )
    (cloud,) = parts
    if not len(cloud):
        raise ConfigError(
            f"No point is left to export: {tally}; lower --accumulation, --density or --threshold, or enlarge the box."
        )
    if len(cloud) > options.points:
        chosen = np.random.default_rng(0).permutation(len(cloud))[: options.points]
        cloud = cloud.take(np.sort(chosen))
    return cloud


def voxel_downsample(cloud: Cloud, side: float) -> Cloud:
    """Keeps one point in each cube of a side: that nearest to the mean of the cube's points; all if the side is 0."""
    if side <= 0 or not len(cloud):
        return cloud
    places = np.floor(cloud.positions.astype(np.float64) / side).astype(np.int64)
    _, cube, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    cube = cube.reshape(-1)  # NumPy 2.0 returns a column
    mean = np.stack([np.bincount(cube, cloud.positions[:, axis]) for axis in range(3)], axis=1) / counts[:, None]
    away = np.linalg.norm(cloud.positions - mean[cube], axis=1)
    order = np.lexsort((away, cube))
    first = order[np.concatenate([[0], np.cumsum(counts)[:-1]])]
    return cloud.take(np.sort(first))


def _small_camera(camera: Cameras, rays: float, generator: torch.Generator) -> Cameras:
    """The camera at about this number of pixels, at most its own, shifted at random by less than a pixel."""
    pixels = int(camera.width.item()) * int(camera.height.item())
    if rays < pixels:
        camera.rescale_output_resolution(max((rays / pixels) ** 0.5, 1.0 / min(camera.width, camera.height).item()))
    shift = torch.rand(2, generator=generator) - 0.5
    camera.cx, camera.cy = camera.cx + shift[0], camera.cy + shift[1]
    return camera


@torch.inference_mode()
def _visible_points(
    model: Queryable, camera: Cameras, options: CloudOptions, queries: Sequence[Query], tally: Tally
) -> Cloud:
    """The points that one camera sees and that pass the options."""
    outputs = {name: value.cpu() for name, value in model.render_camera(camera, {}).items()}
    rays = camera.generate_rays(camera_indices=0, keep_shape=True)
    accumulation = outputs["accumulation"][..., 0].flatten()
    points = (rays.origins + rays.directions * outputs[DEPTH_OUTPUTS[options.depth]]).view(-1, 3)
    tally.rays += len(points)
    keep = (accumulation >= options.accumulation) & points.isfinite().all(dim=-1)
    origins, colors = rays.origins.reshape(-1, 3)[keep], outputs["rgb"][..., :3].reshape(-1, 3)[keep]
    cloud = Cloud(
        positions=points[keep].float().numpy(),
        colors=to_bytes(colors.float()[None].numpy())[0],
        accumulation=accumulation[keep].float().numpy(),
        density=np.full(int(keep.sum()), np.nan, dtype=np.float32),
        seen_from=origins.float().numpy(),
        scores=np.zeros((int(keep.sum()), len(queries)), dtype=np.float32),
    )
    tally.opaque += len(cloud)
    if isinstance(model, HasDensity) and len(cloud):
        density = model.density_at(torch.from_numpy(cloud.positions).to(model.device)).float().cpu().numpy()
        cloud = replace(cloud, density=density)
        cloud = cloud.take(density >= options.density)
    tally.dense += len(cloud)
    if options.inside is not None:
        cloud = cloud.take(options.inside(cloud.positions))
    tally.inside += len(cloud)
    if queries and len(cloud):
        cloud = replace(cloud, scores=score_points(model, torch.from_numpy(cloud.positions), queries).float().numpy())
        if options.select is not None:
            cloud = cloud.take(cloud.scores.max(axis=1) >= options.select)
    tally.selected += len(cloud)
    return cloud


def estimate_normals(
    points: Float[np.ndarray, "points 3"], seen_from: Float[np.ndarray, "points 3"]
) -> Float32[np.ndarray, "points 3"]:
    """Estimates unit normals: across the plane that fits a point's neighbours best, towards the side it was seen from.

    Args:
        seen_from: a place outside the surface for each point, such as the centre of the camera that saw it.

    Returns:
        One normal for each point. With fewer than three points, the direction to where each was seen from.
    """
    from scipy.spatial import KDTree

    towards = seen_from - points
    towards = towards / np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-12)
    if len(points) < 3:
        return towards.astype(np.float32)
    tree = KDTree(points)
    count = min(NEIGHBOURS, len(points))
    normals = np.empty((len(points), 3), dtype=np.float32)
    for start in range(0, len(points), _NORMALS_CHUNK):
        part = slice(start, start + _NORMALS_CHUNK)
        _, indices = tree.query(points[part], k=count)
        near = points[indices].astype(np.float64)
        near -= near.mean(axis=1, keepdims=True)
        _, axes = np.linalg.eigh(np.einsum("nki,nkj->nij", near, near))
        normal = axes[:, :, 0]
        facing = np.where((normal * towards[part]).sum(axis=1, keepdims=True) < 0, -1.0, 1.0)
        normals[part] = normal * facing
    return normals
