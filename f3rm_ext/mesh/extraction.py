"""Extraction of a mesh from a trained scene: one interface for all methods."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import trimesh
from jaxtyping import Float, Float32
from torch.nn import functional

from f3rm_ext.data.confidence import agreement, confidence, ray_information
from f3rm_ext.data.stereo.agreement import agreeing_depth, project
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.cleaning import clean, close_holes, join, simplify
from f3rm_ext.mesh.completion import hole_parts, thin_parts
from f3rm_ext.mesh.fusion import choose_voxel, fuse_depth
from f3rm_ext.mesh.level_set import center_points, level_set_mesh, poisson_mesh
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.scenes import SurfaceScene
from f3rm_ext.mesh.shells import fit_contraction, fuse_shells, simplify_evenly
from f3rm_ext.mesh.stereo_depth import take_stereo
from f3rm_ext.mesh.views import StoredViews, pixel_size, stored_views
from f3rm_ext.utils.console import StageProgress

HOLE_VOXELS = 2.0
"""Voxels in holes, where few views tell the depth, are wider by this factor."""


class Extraction(NamedTuple):
    """A mesh and what is worth knowing of it."""

    mesh: trimesh.Trimesh
    """Scene frame. Where it was made of views, its vertices have the attribute ``confidence``."""
    facts: dict[str, object]
    """Values that were chosen automatically and shares that were measured, as JSON."""


def extract_mesh(
    scene: SurfaceScene, options: ExtractionOptions, on_progress: StageProgress = lambda stage, done, total: None
) -> Extraction:
    """Extracts a mesh; lengths of the options are in scene units.

    Raises:
        MeshError: no surface was found.
        ConfigError: the method needs Gaussians and the scene is a field, or more views must agree than there are.
        CaptureError: a photo for stereo cannot be read.
    """
    gaussians = scene.gaussians
    if options.method != "tsdf" and gaussians is None:
        raise ConfigError(f"--method {options.method} needs Gaussians, and this run is a field: use --method tsdf.")
    if options.method != "poisson-centres" and options.min_views > len(scene.views):
        raise ConfigError(
            f"--min-views is {options.min_views}, but the capture has {len(scene.views)} training views: lower it."
        )
    if options.method == "poisson-centres":
        assert gaussians is not None
        on_progress("Poisson", 0, 1)
        cloud = center_points(gaussians, scene.views.cameras.positions)
        mesh = poisson_mesh(cloud, options.poisson_depth, options.trim)
        facts: dict[str, object] = {"points": len(cloud.positions)}
        on_progress("Poisson", 1, 1)
    else:
        total, stereo = len(scene.views), dict[str, object]()
        with stored_views(scene.views, lambda done: on_progress("Rendering", done, total)) as stored:
            if scene.stereo is not None and options.method == "tsdf":
                share = take_stereo(stored, scene.stereo, lambda done: on_progress("Stereo", done, total))
                stereo["stereo_share"] = round(share, 3)
            _keep_agreeing(stored, options, on_progress)
            if options.method == "tsdf":
                mesh, facts = _fuse(stored, options, on_progress)
            else:
                assert gaussians is not None
                mesh, facts = level_set_mesh(stored, gaussians, options, on_progress)
                mesh = _finish(mesh, options)
            mesh.vertex_attributes["confidence"] = vertex_confidence(
                np.asarray(mesh.vertices), stored, lambda done: on_progress("Confidence", done, total)
            )
            return Extraction(mesh, facts | stereo)
    return Extraction(_finish(mesh, options), facts)


def _finish(mesh: trimesh.Trimesh, options: ExtractionOptions) -> trimesh.Trimesh:
    return simplify(close_holes(clean(mesh, options.min_part), options.close_holes), options.vertices)


def vertex_confidence(
    vertices: Float[np.ndarray, "verts 3"], maps: StoredViews, on_progress: Callable[[int], None] = lambda done: None
) -> Float32[np.ndarray, " verts"]:
    """Returns how well the views fix the vertices of a mesh, 0 to 1; see :mod:`f3rm_ext.data.confidence`.

    Args:
        vertices: scene frame.
        maps: depth as it was rendered; views that show another depth at a vertex say nothing of it.
    """
    points = torch.from_numpy(vertices)
    information = torch.zeros(len(points), 3, 3, dtype=points.dtype)
    for index in range(len(maps)):
        pixels, depths, inside = project(maps.cameras, index, points)
        shown = torch.from_numpy(np.array(maps.rendered_depth(index))).flatten()[pixels].double() * inside
        weights = agreement(depths, shown)
        (visible,) = weights.nonzero(as_tuple=True)
        directions = functional.normalize(points[visible] - maps.cameras.positions[index], dim=1)
        information[visible] += ray_information(directions, weights[visible])
        on_progress(index + 1)
    return confidence(information).float().numpy()


def _keep_agreeing(stored: StoredViews, options: ExtractionOptions, on_progress: StageProgress) -> None:
    """Removes depth on which too few views agree."""
    # All masks before any depth changes: a view is compared with others, which must not have lost theirs yet.
    masks = []
    for index in range(len(stored)):
        masks.append(agreeing_depth(stored, index, options.min_views, options.tolerance) > 0)
        on_progress("Agreement", index + 1, len(stored))
    for index, mask in enumerate(masks):
        stored.set_depth(index, np.where(mask, stored.depth(index), np.float32(0)))


def _fuse(stored: StoredViews, options: ExtractionOptions, on_progress: StageProgress) -> Extraction:
    """Fuses what views agree on, then what the mesh of it misses; cleans and simplifies."""
    space = fit_contraction(stored) if options.unbounded else None
    pixel, weight = pixel_size(stored), float(min(options.min_views, 3))
    foreground = None if space is None else partial(space.in_shell, inner=0.0, outer=1.0)
    voxel = options.voxel or choose_voxel(stored, pixel, foreground)
    facts: dict[str, object] = {"voxel_scene": voxel, "voxel_pixels": round(voxel / pixel, 3)}

    def fuse(views: StoredViews, stage: str, voxel: float = voxel, weight: float = weight) -> list[trimesh.Trimesh]:
        report = partial(on_progress, stage)
        if space is None:
            return [fuse_depth(views, voxel, weight, report)]
        return fuse_shells(views, voxel, space, weight, report)

    # Each shell is cleaned by itself: the foreground is a small share of all the area.
    parts = [clean(part, options.min_part) for part in fuse(stored, "Fusion")]
    if space is not None:
        facts |= {"shells": len(parts), "radius_scene": space.radius}
    shown_mesh, patches = join(parts), list[trimesh.Trimesh]()
    if options.thin_parts:
        thin, share = thin_parts(
            stored,
            shown_mesh,
            lambda views: join(fuse(views, "Thin parts")),
            lambda done: on_progress("Thin parts", done, len(stored)),
        )
        patches += thin
        facts["thin_share"] = round(share, 3)
    if options.fill_holes:
        filled, share = hole_parts(
            stored,
            join([shown_mesh, *patches]),
            lambda views: join(fuse(views, "Holes", HOLE_VOXELS * voxel, 1.0)),
            lambda done: on_progress("Holes", done, len(stored)),
        )
        patches += filled
        facts["filled_share"] = round(share, 3)
    # A patch is open all around, which is no hole.
    mesh = join([close_holes(part, options.close_holes) for part in parts] + patches)
    if space is not None and options.vertices is not None:
        return Extraction(simplify_evenly(mesh, space, options.vertices), facts)
    return Extraction(simplify(mesh, options.vertices), facts)
