"""Meshes of scenes without bounds: boxes around the cameras, each with voxels twice as wide as those in the one before.

The innermost box reaches as far beyond the cameras as half of their pixels do. Farther away a pixel covers more of a
surface, and so may a voxel: time and memory grow with the logarithm of the distance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trimesh
from jaxtyping import Bool, Float, Float64

from f3rm_ext.errors import MeshError
from f3rm_ext.surface.cleaning import with_faces
from f3rm_ext.surface.fusion import BLOCK, fuse_depth
from f3rm_ext.surface.views import StoredViews

MOST_SHELLS = 12
"""Boxes around the innermost one. What is outside the last, 4096 times as wide, is left out as sky."""
OVERLAP_VOXELS = 1.0
"""How far a shell reaches into the box inside it, in its voxels, so that no gap is seen between both."""
_PARTS = 100


@dataclass(frozen=True)
class Contraction:
    """Pulls unbounded space into a cube (mip-NeRF 360, Barron et al. 2022, with the largest coordinate as the norm).

    The innermost box becomes the cube from -1 to 1 and is only scaled; infinity becomes the surface of the cube from -2
    to 2.
    """

    center: Float64[np.ndarray, "3"]
    """Mean of the cameras' positions, scene frame."""
    radius: float
    """Half the side of the innermost box, scene units."""

    @classmethod
    def of_views(cls, stored: StoredViews) -> "Contraction":
        """Returns that of a capture: the radius is the extent of the cameras and the median depth together."""
        depths = (np.asarray(stored.depth(index)) for index in range(len(stored)))
        medians = [float(np.median(depth[depth > 0])) for depth in depths if (depth > 0).any()]
        reach = float(np.median(medians)) if medians else 0.0
        return cls(stored.cameras.positions.double().mean(dim=0).numpy(), stored.cameras.extent() + reach)

    def distances(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, " n"]:
        """Returns the largest coordinate of points, in radii."""
        return np.abs(points - self.center).max(axis=1, initial=0.0) / self.radius

    def contract(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Returns points in the cube from -2 to 2."""
        norm = np.maximum(self.distances(points), 1.0)[:, None]
        return (points - self.center) / self.radius * (2 - 1 / norm) / norm

    def expand(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Undoes :meth:`contract`."""
        norm = np.maximum(np.abs(points).max(axis=1, initial=0.0), 1.0)[:, None]
        return points / (norm * (2 - norm)) * self.radius + self.center


def fuse_shells(
    stored: StoredViews,
    voxel: float,
    space: Contraction,
    min_weight: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[trimesh.Trimesh]:
    """Fuses the depth and colours of all views into meshes of the innermost box and of the shells around it.

    Args:
        stored: the views.
        voxel: side of a voxel in the innermost box, scene units.
        space: the innermost box.
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
                wanted=_between(space, inner, outer, BLOCK * wide / space.radius),
            )
        except MeshError as reason:  # a few pixels alone make no surface
            error = reason
            continue
        part = with_faces(part, _between(space, inner, outer)(part.triangles_center))
        if len(part.faces):
            parts.append(part)
    if not parts:
        raise error
    return parts


def simplified_evenly(
    mesh: trimesh.Trimesh, space: Contraction, simplify: Callable[[trimesh.Trimesh], trimesh.Trimesh]
) -> trimesh.Trimesh:
    """Simplifies a mesh in contracted space, where errors count less the farther away they are."""
    mesh = mesh.copy()
    mesh.vertices = space.contract(np.asarray(mesh.vertices))
    mesh = simplify(mesh)
    mesh.vertices = space.expand(np.asarray(mesh.vertices))
    return mesh


def _shells_with_depth(stored: StoredViews, space: Contraction) -> list[int]:
    """The shells in which some pixel has depth; 0 is the innermost box."""
    found: set[int] = set()
    for index in range(len(stored)):
        away = space.distances(stored.points(index)[0].numpy())
        found |= set(np.unique(np.ceil(np.log2(np.maximum(away, 1.0)))).astype(int).tolist())
    return sorted(shell for shell in found if shell <= MOST_SHELLS)


def _between(
    space: Contraction, inner: float, outer: float, margin: float = 0.0
) -> Callable[[Float[np.ndarray, "n 3"]], Bool[np.ndarray, " n"]]:
    """Tells which points are in a shell or not farther from it than the margin; all lengths are in radii."""

    def inside(points: Float[np.ndarray, "n 3"]) -> Bool[np.ndarray, " n"]:
        away = space.distances(points)
        return (away >= inner - margin) & (away < outer + margin)

    return inside
