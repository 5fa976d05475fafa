"""Extraction of a mesh from a trained scene: one interface for all methods."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import trimesh

from f3rm_ext.data.stereo.agreement import agreeing_depth
from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh import cleaning
from f3rm_ext.mesh.fusion import NO_DEPTH, fuse_depth
from f3rm_ext.mesh.level_set import SurfaceCloud, center_points, level_points
from f3rm_ext.mesh.missed import hole_parts, thin_parts
from f3rm_ext.mesh.poisson import FEWEST_POINTS, poisson_mesh
from f3rm_ext.mesh.scenes import SurfaceScene, require_gaussians
from f3rm_ext.mesh.shells import contraction_of, fuse_shells, simplified_evenly
from f3rm_ext.mesh.stereo_depth import take_stereo
from f3rm_ext.mesh.views import StoredViews, pixel_size, stored_views
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.console import StageProgress

Method = Literal["tsdf", "level-set", "poisson-centres"]
HOLE_VOXELS = 2.0
"""Voxels in holes, where few views tell the depth, are wider by this factor."""
BACKGROUND = 4.0
"""Half the side of the box of the background, in extents of the cameras; that of the foreground has 1."""


@dataclass(frozen=True)
class ExtractionOptions:
    """How to extract a mesh. Lengths are in scene units."""

    method: Method = "tsdf"
    """tsdf fuses rendered depth, level-set and poisson-centres reconstruct points by Poisson."""
    voxel: float = 0.0
    """Side of the voxels (tsdf); 0 takes the median width of a pixel on the surface."""
    unbounded: bool = False
    """Wider voxels, farther from the cameras (tsdf)."""
    thin_parts: bool = True
    """Fuse leaves and other thin things from each side by itself (tsdf)."""
    fill_holes: bool = False
    """Fuse depth that too few views agree on where photos look through holes (tsdf)."""
    min_views: int = 2
    """Views that must agree on a pixel (tsdf, level-set)."""
    tolerance: float = 0.02
    """Largest difference of depths that agree, as a share of the depth (tsdf, level-set)."""
    level: float = 0.3
    """Density of the surface (level-set)."""
    points: int = 2_000_000
    """Rays on which points are searched (level-set)."""
    poisson_depth: int = 10
    """Depth of Poisson's octree."""
    trim: float = 0.1
    """Share of Poisson's vertices to remove, those with the fewest points around them."""
    min_part: float = 0.001
    """Connected parts with a smaller share of the area are dropped."""
    close_holes: float = 0.0
    """Radius up to which holes are closed; 0 closes none."""
    vertices: int = 0
    """Most vertices; 0 sets no limit."""


@dataclass(frozen=True)
class Extraction:
    """A mesh and what is worth knowing of it."""

    mesh: trimesh.Trimesh
    """Scene frame."""
    facts: dict[str, object]
    """What was chosen automatically, as JSON."""


def extract_mesh(
    scene: SurfaceScene, options: ExtractionOptions, on_progress: StageProgress = lambda stage, done, total: None
) -> Extraction:
    """Extracts a mesh.

    Args:
        scene: the trained scene.
        options: how.
        on_progress: called with stages and their progress.

    Raises:
        MeshError: no surface was found.
        ConfigError: the method needs Gaussians and the scene is a field.
        CaptureError: a photo for stereo cannot be read.
    """
    facts: dict[str, object] = {}
    if options.method == "poisson-centres":
        gaussians = require_gaussians(scene, options.method)
        on_progress("Poisson", 0, 1)
        cloud = center_points(gaussians, scene.views.cameras.positions)
        mesh = poisson_mesh(*cloud, options.poisson_depth, options.trim)
        found = Extraction(_finished(mesh, options), {"points": len(cloud.positions)})
        on_progress("Poisson", 1, 1)
    else:
        gaussians = require_gaussians(scene, options.method) if options.method == "level-set" else None
        total = len(scene.views)
        with stored_views(scene.views, lambda done: on_progress("Rendering", done, total)) as stored:
            if scene.stereo is not None and gaussians is None:
                share = take_stereo(stored, scene.stereo, lambda done: on_progress("Stereo", done, total))
                facts["stereo_share"] = round(share, 3)
            _keep_agreeing(stored, options, on_progress)
            if gaussians is not None:
                found = _level(stored, gaussians, options, on_progress)
            else:
                found = _fused(stored, options, on_progress)
    return Extraction(found.mesh, found.facts | facts)


def _keep_agreeing(stored: StoredViews, options: ExtractionOptions, on_progress: StageProgress) -> None:
    """Removes depth on which too few views agree."""
    if options.min_views > len(stored):
        raise ConfigError(
            f"--min-views is {options.min_views}, but the capture has {len(stored)} training views: lower it."
        )
    kept = []
    for index in range(len(stored)):
        kept.append(agreeing_depth(stored, index, options.min_views, options.tolerance) > 0)
        on_progress("Agreement", index + 1, len(stored))
    for index, mask in enumerate(kept):
        stored.set_depth(index, np.where(mask, stored.depth(index), np.float32(0)))


def _fused(stored: StoredViews, options: ExtractionOptions, on_progress: StageProgress) -> Extraction:
    """Fuses what views agree on, then what the mesh of it misses."""
    voxel, weight = _voxel(stored, options), float(min(options.min_views, 3))
    facts: dict[str, object] = {"voxel_scene": voxel}
    space = contraction_of(stored) if options.unbounded else None

    def fused(views: StoredViews, voxel: float, weight: float, stage: str = "Fusion") -> list[trimesh.Trimesh]:
        def report(done: int, total: int) -> None:
            on_progress(stage, done, total)

        if space is None:
            return [fuse_depth(views, voxel, weight, report)]
        return fuse_shells(views, voxel, space, weight, report)

    # Each shell is cleaned by itself: the foreground is a small share of all the area.
    parts = [_cleaned(part, options) for part in fused(stored, voxel, weight)]
    if space is not None:
        facts |= {"shells": len(parts), "radius_scene": space.radius}
    patches: list[trimesh.Trimesh] = []
    if options.thin_parts:
        thin = thin_parts(
            stored,
            _joined(parts),
            lambda views: _joined(fused(views, voxel, weight, "Thin parts")),
            lambda done: on_progress("Thin parts", done, len(stored)),
        )
        patches += thin.parts
        facts["thin_share"] = round(thin.share, 3)
    if options.fill_holes:
        filled = hole_parts(
            stored,
            _joined(parts + patches),
            lambda views: _joined(fused(views, HOLE_VOXELS * voxel, 1.0, "Holes")),
            lambda done: on_progress("Holes", done, len(stored)),
        )
        patches += filled.parts
        facts["filled_share"] = round(filled.share, 3)
    # A patch is open all around, which is no hole.
    mesh = _joined([_closed(part, options) for part in parts] + patches)
    if options.vertices and space is not None:
        mesh = simplified_evenly(mesh, space, lambda part: cleaning.simplified(part, options.vertices))
    elif options.vertices:
        mesh = cleaning.simplified(mesh, options.vertices)
    return Extraction(mesh, facts)


def _voxel(stored: StoredViews, options: ExtractionOptions) -> float:
    """Returns the side of the voxels; raises MeshError where no view has depth, which leaves them without a size."""
    voxel = options.voxel or pixel_size(stored)
    if voxel == 0:
        raise MeshError(NO_DEPTH)
    return voxel


def _level(
    stored: StoredViews, gaussians: Gaussians, options: ExtractionOptions, on_progress: StageProgress
) -> Extraction:
    cloud = level_points(
        stored,
        gaussians,
        options.level,
        options.points,
        lambda done: on_progress("Points", done, len(stored)),
    )
    positions = stored.cameras.positions.double().numpy()
    away = np.abs(cloud.positions - positions.mean(axis=0)).max(axis=1, initial=0) / stored.cameras.extent()
    foreground = away <= 1
    boxes = [foreground, ~foreground & (away <= BACKGROUND)]
    parts: list[trimesh.Trimesh] = []
    facts: dict[str, object] = {"points": len(cloud.positions), "foreground_points": int(foreground.sum())}
    if not len(cloud.positions):
        raise MeshError(
            f"The density reaches the level {options.level:g} nowhere: lower --level, or train longer or with "
            "--pipeline.model.regularization."
        )
    for number, box in enumerate(boxes):
        on_progress("Poisson", number, len(boxes))
        # A few stray points are no background.
        if box.sum() >= FEWEST_POINTS or (number == 1 and not parts):
            part = SurfaceCloud(*(values[box] for values in cloud))
            parts.append(poisson_mesh(*part, options.poisson_depth, options.trim))
    on_progress("Poisson", len(boxes), len(boxes))
    return Extraction(_finished(_joined(parts), options), facts)


def _joined(parts: list[trimesh.Trimesh]) -> trimesh.Trimesh:
    """Returns one mesh of all parts; their vertices stay apart."""
    if len(parts) == 1:
        return parts[0]
    mesh = trimesh.util.concatenate(parts)
    assert isinstance(mesh, trimesh.Trimesh)
    return mesh


def _cleaned(mesh: trimesh.Trimesh, options: ExtractionOptions) -> trimesh.Trimesh:
    """Repairs, then drops small parts."""
    return cleaning.without_small_parts(cleaning.repaired(mesh), options.min_part)


def _closed(mesh: trimesh.Trimesh, options: ExtractionOptions) -> trimesh.Trimesh:
    """Closes holes, where that is asked for."""
    return cleaning.with_holes_closed(mesh, options.close_holes) if options.close_holes > 0 else mesh


def _finished(mesh: trimesh.Trimesh, options: ExtractionOptions) -> trimesh.Trimesh:
    """Cleans, closes holes and simplifies."""
    mesh = _closed(_cleaned(mesh, options), options)
    return cleaning.simplified(mesh, options.vertices) if options.vertices else mesh
