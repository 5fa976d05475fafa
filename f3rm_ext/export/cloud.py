"""Points on the surfaces of a trained scene, seen from its cameras. Any model that can be asked can be exported."""

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

DEPTHS = {"median": "depth", "expected": "expected_depth"}
"""Outputs of a model that say how far its surfaces are."""
_ROUNDS = 8
_MOST_RAYS = 40
"""Rays cast for each point wanted, at most."""
_STALLED = 0.25
"""A round that brings less of what was missing shows that there is no more, as with voxels."""


@runtime_checkable
class HasDensity(Protocol):
    """A model that knows its density everywhere, as fields do and splats do not."""

    def density_at(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points"]:
        """Density per scene unit at points of the scene frame."""
        ...


@dataclass(frozen=True)
class CloudOptions:
    """Which points are taken. All lengths are of the scene frame."""

    points: int = 200_000
    """How many, at most."""
    accumulation: float = 0.8
    """Least opacity along the ray, 0 to 1."""
    density: float = 0.0
    """Least density at the point, per scene unit; 0 takes all."""
    inside: Callable[[Float[np.ndarray, "points 3"]], Bool[np.ndarray, "points"]] | None = None
    """Says which points are in the crop box."""
    voxel: float = 0.0
    """Side of the cubes of which each keeps one point; 0 takes all."""
    depth: Literal["median", "expected"] = "median"
    """Where along the ray the surface is."""
    select: float | None = None
    """Take only points where some query has at least this score."""


@dataclass(frozen=True)
class Cloud:
    """Points with what was seen there."""

    positions: Float32[np.ndarray, "points 3"]
    """Scene frame."""
    colors: UInt8[np.ndarray, "points 3"]
    """As rendered."""
    accumulation: Float32[np.ndarray, "points"]
    """Opacity of the ray."""
    density: Float32[np.ndarray, "points"]
    """Per scene unit; NaN where the model has none."""
    seen_from: Float32[np.ndarray, "points 3"]
    """Centre of the camera that saw it, scene frame."""
    scores: Float32[np.ndarray, "points queries"]
    """Of each query."""

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, which: np.ndarray) -> "Cloud":
        """Some of the points, by index or mask."""
        return Cloud(**{name: values[which] for name, values in vars(self).items()})

    @classmethod
    def join(cls, parts: Sequence["Cloud"]) -> "Cloud":
        """All points of several; at least one."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


@dataclass
class Tally:
    """How many points passed each test, for who asks why there are so few."""

    rays: int = 0
    opaque: int = 0
    dense: int = 0
    inside: int = 0
    selected: int = 0

    def __str__(self) -> str:
        return (
            f"of {self.rays} rays {self.opaque} met a surface, {self.dense} of those were dense enough, "
            f"{self.inside} in the crop box and {self.selected} selected"
        )


def gather(
    model: Queryable,
    cameras: Cameras,
    options: CloudOptions,
    queries: Sequence[Query] = (),
    on_progress: Callable[[int], None] = lambda points: None,
) -> Cloud:
    """Points seen by cameras, spread evenly over their pictures; the same every time.

    Cameras are rendered small, again and again between the pixels of before, until there are enough points: memory is
    that of the points, whatever the size of the photos.

    Args:
        model: renders ``rgb``, ``accumulation`` and depth.
        cameras: of the training photos, scene frame.
        options: which points to take.
        queries: asked at every point.
        on_progress: called with the number of points so far.

    Raises:
        ConfigError: no point is left, or the density is asked for and the model has none.
    """
    if options.density > 0 and not isinstance(model, HasDensity):
        raise ConfigError("This model has no density to threshold: leave --density out and use --accumulation.")
    cameras = cameras.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tally, cloud, wanted = Tally(), None, float(options.points)
    for _ in range(_ROUNDS):
        before = 0 if cloud is None else len(cloud)
        parts = [] if cloud is None else [cloud]
        for index in torch.randperm(len(cameras), generator=generator).tolist():
            camera = _small_camera(cameras[index : index + 1], wanted / len(cameras), generator)
            parts.append(_seen(model, camera, options, queries, tally))
            on_progress(min(options.points, sum(map(len, parts))))
        cloud = thinned(Cloud.join(parts), options.voxel)
        on_progress(min(options.points, len(cloud)))
        missing = options.points - len(cloud)
        stalled = before and len(cloud) - before < _STALLED * (options.points - before)
        if missing <= 0 or stalled or tally.rays >= _MOST_RAYS * options.points:
            break
        share = max(len(cloud) / tally.rays, 1.0 / _MOST_RAYS)
        wanted = min(max(1.1 * missing / share, 0.1 * options.points), _MOST_RAYS * options.points - tally.rays)
    assert cloud is not None
    if not len(cloud):
        raise ConfigError(
            f"No point is left to export: {tally}; lower --accumulation, --density or --threshold, or mend the box."
        )
    if len(cloud) > options.points:
        chosen = np.random.default_rng(0).permutation(len(cloud))[: options.points]
        cloud = cloud.take(np.sort(chosen))
    return cloud


def thinned(cloud: Cloud, side: float) -> Cloud:
    """One point for each cube of a grid that has any: that which is nearest to their mean.

    Args:
        cloud: the points.
        side: of the cubes, scene units; 0 leaves all.
    """
    if side <= 0 or not len(cloud):
        return cloud
    places = np.floor(cloud.positions.astype(np.float64) / side).astype(np.int64)
    _, cube, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    cube = cube.reshape(-1)
    mean = np.stack([np.bincount(cube, cloud.positions[:, axis]) for axis in range(3)], axis=1) / counts[:, None]
    away = np.linalg.norm(cloud.positions - mean[cube], axis=1)
    order = np.lexsort((away, cube))
    first = order[np.concatenate([[0], np.cumsum(counts)[:-1]])]
    return cloud.take(np.sort(first))


def _small_camera(camera: Cameras, rays: float, generator: torch.Generator) -> Cameras:
    """The camera at about so many pixels, at most its own, moved by a part of a pixel at random."""
    pixels = int(camera.width.item()) * int(camera.height.item())
    if rays < pixels:
        camera.rescale_output_resolution(max((rays / pixels) ** 0.5, 1.0 / min(camera.width, camera.height).item()))
    shift = torch.rand(2, generator=generator) - 0.5
    camera.cx, camera.cy = camera.cx + shift[0], camera.cy + shift[1]
    return camera


@torch.inference_mode()
def _seen(model: Queryable, camera: Cameras, options: CloudOptions, queries: Sequence[Query], tally: Tally) -> Cloud:
    """The points that one camera sees and the options let pass."""
    outputs = {name: value.cpu() for name, value in model.render_camera(camera, {}).items()}
    rays = camera.generate_rays(camera_indices=0, keep_shape=True)
    accumulation = outputs["accumulation"][..., 0].flatten()
    at = (rays.origins + rays.directions * outputs[DEPTHS[options.depth]]).view(-1, 3)
    tally.rays += len(at)
    keep = (accumulation >= options.accumulation) & at.isfinite().all(dim=-1)
    origins, colors = rays.origins.reshape(-1, 3)[keep], outputs["rgb"][..., :3].reshape(-1, 3)[keep]
    found = Cloud(
        positions=at[keep].float().numpy(),
        colors=to_bytes(colors.float()[None].numpy())[0],
        accumulation=accumulation[keep].float().numpy(),
        density=np.full(int(keep.sum()), np.nan, dtype=np.float32),
        seen_from=origins.float().numpy(),
        scores=np.zeros((int(keep.sum()), len(queries)), dtype=np.float32),
    )
    tally.opaque += len(found)
    if isinstance(model, HasDensity) and len(found):
        density = model.density_at(torch.from_numpy(found.positions).to(model.device)).float().cpu().numpy()
        found = replace(found, density=density)
        found = found.take(density >= options.density)
    tally.dense += len(found)
    if options.inside is not None:
        found = found.take(options.inside(found.positions))
    tally.inside += len(found)
    if queries and len(found):
        found = replace(found, scores=score_points(model, torch.from_numpy(found.positions), queries).float().numpy())
        if options.select is not None:
            found = found.take(found.scores.max(axis=1) >= options.select)
    tally.selected += len(found)
    return found
