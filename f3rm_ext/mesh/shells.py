"""Meshes of scenes without bounds: boxes around the cameras, each with voxels twice as wide as those in the one before.

The innermost box reaches as far beyond the cameras as half of their pixels do. Farther away a pixel covers more of a
surface, and so may a voxel: time and memory grow with the logarithm of the distance.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.box_contraction import BoxContraction
from f3rm_ext.mesh.cleaning import select_faces, simplify
from f3rm_ext.mesh.fusion import BLOCK, fuse_depth
from f3rm_ext.mesh.views import StoredViews

MOST_SHELLS = 12
"""Boxes around the innermost one. What is outside the last, 4096 times as wide, is left out as sky."""
OVERLAP_VOXELS = 1.0
"""How far a shell reaches into the box inside it, in its voxels, so that no gap is seen between both."""
_PARTS = 100


def fit_contraction(stored: StoredViews) -> BoxContraction:
    """Returns the contraction of a capture, from the depth of its views."""
    depths = [depth[depth > 0] for depth in map(stored.depth, range(len(stored)))]
    return BoxContraction.from_cameras(stored.cameras.positions.double().numpy(), depths)


def fuse_shells(
    stored: StoredViews,
    voxel: float,
    space: BoxContraction,
    min_weight: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[trimesh.Trimesh]:
    """Fuses the depth and colours of all views into meshes of the innermost box and of the shells around it.

    Args:
        voxel: side of a voxel in the innermost box, scene units.
        min_weight: number of views that must have filled a voxel.
        on_progress: called with the work done and to do.

    Raises:
        MeshError: no surface was found.
    """
    parts, error = [], MeshError("No depth is left to fuse: no view shows a surface.")
    shells = _shells_with_depth(stored, space)
    for number, shell in enumerate(shells):
        wide = voxel * 2**shell
        inner, outer = (2.0 ** (shell - 1) - OVERLAP_VOXELS * wide / space.radius if shell else 0.0), 2.0**shell
        try:
            part = fuse_depth(
                stored,
                wide,
                min_weight,
                lambda done, total, n=number: on_progress(
                    n * _PARTS + _PARTS * done // max(total, 1), len(shells) * _PARTS
                ),
                wanted=partial(space.in_shell, inner=inner, outer=outer, margin=BLOCK * wide / space.radius),
            )
        except MeshError as reason:  # a few pixels alone make no surface
            error = reason
            continue
        part = select_faces(part, space.in_shell(part.triangles_center, inner, outer))
        if len(part.faces):
            parts.append(part)
    if not parts:
        raise error
    return parts


def simplify_evenly(mesh: trimesh.Trimesh, space: BoxContraction, vertices: int) -> trimesh.Trimesh:
    """Simplifies a mesh in contracted space, where errors count less the farther away they are."""
    mesh = mesh.copy()
    mesh.vertices = space.contract(np.asarray(mesh.vertices))
    farthest = np.abs(mesh.vertices).max()
    mesh = simplify(mesh, vertices)
    # A vertex that joins others may lie outside of them all, and what lies beyond 2 has no place in the scene.
    distances = np.abs(mesh.vertices).max(axis=1, keepdims=True)
    mesh.vertices = space.expand(mesh.vertices * (farthest / np.maximum(distances, farthest)))
    return mesh


def _shells_with_depth(stored: StoredViews, space: BoxContraction) -> list[int]:
    """The shells in which some pixel has depth; 0 is the innermost box."""
    shells: set[int] = set()
    for index in range(len(stored)):
        away = space.distances(stored.points(index)[0].numpy())
        shells |= set(np.unique(np.ceil(np.log2(np.maximum(away, 1.0)))).astype(int).tolist())
    return sorted(shell for shell in shells if shell <= MOST_SHELLS)
