"""Distances between a surface and the true one: accuracy, completeness, chamfer, F-score, normal consistency.

Distances are those of points to the nearest point of the other surface, in the units of the truth. Memory is bounded by
the points and one chunk of distances, whatever the number of triangles.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import trimesh
from jaxtyping import Float
from scipy.spatial import KDTree

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import SurfacePoints

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Score:
    """Shares of points within a distance."""

    threshold: float
    """The distance, units of the truth."""
    precision: float
    """Share of the surface's points that are nearer to the truth."""
    recall: float
    """Share of the truth's points that are nearer to the surface."""
    f_score: float
    """Harmonic mean of the two; 0 if both are."""


@dataclass(frozen=True)
class SurfaceMetrics:
    """Distances between a surface and the true one, and shares of each that are near the other."""

    accuracy: float
    """Mean distance from the surface to the truth."""
    completeness: float
    """Mean distance from the truth to the surface. Holes show here alone."""
    accuracy_median: float
    """Median distance from the surface to the truth."""
    completeness_median: float
    """Median distance from the truth to the surface."""
    scores: tuple[Score, ...]
    """Precision, recall and F-score at each threshold."""
    normal_accuracy: float | None
    """Mean |cos| between the normals of the surface's points and of their nearest true points; None without normals."""
    normal_completeness: float | None
    """The same for the truth's points."""
    points: int
    """Points of the surface that count."""
    true_points: int
    """Points of the truth that count."""

    @property
    def chamfer(self) -> float:
        """Mean of accuracy and completeness, as DTU has it."""
        return (self.accuracy + self.completeness) / 2

    @property
    def normal_consistency(self) -> float | None:
        """Mean of normal accuracy and normal completeness; None without normals."""
        if self.normal_accuracy is None or self.normal_completeness is None:
            return None
        return (self.normal_accuracy + self.normal_completeness) / 2

    def record(self) -> dict[str, object]:
        """Returns all metrics as JSON."""
        return {**asdict(self), "chamfer": self.chamfer, "normal_consistency": self.normal_consistency}


@dataclass(frozen=True)
class Comparison:
    """Points of a surface and of the truth, ready to compare."""

    surface: SurfacePoints
    """Points of the surface whose distances count (accuracy)."""
    truth: SurfacePoints
    """Points of the truth whose distances count (completeness)."""
    near_surface: SurfacePoints
    """Points of the surface to which the truth's distances are measured: also those that do not count."""
    near_truth: SurfacePoints
    """Points of the truth to which the surface's distances are measured."""
    max_distance: float = np.inf
    """Points farther away do not count (DTU's outliers)."""

    def restrict(self, surface: np.ndarray | None = None, truth: np.ndarray | None = None) -> "Comparison":
        """Lets only some of the points count, by masks. Distances are measured to all points as before."""
        return replace(
            self,
            surface=self.surface if surface is None else self.surface.take(surface),
            truth=self.truth if truth is None else self.truth.take(truth),
        )


def compare(
    comparison: Comparison, thresholds: Sequence[float], on_progress: Callable[[int], None] = lambda points: None
) -> SurfaceMetrics:
    """Computes all metrics, with the F-score at thresholds in units of the truth.

    Raises MeshError where there is nothing to compare.
    """
    surface, truth = comparison.surface, comparison.truth
    if not len(surface) or not len(truth):
        empty = "the mesh" if not len(surface) else "the truth"
        raise MeshError(
            f"No point of {empty} is left to compare: check that both are in the same frame and units, and the crop, "
            "masks and cameras."
        )
    to_truth, their_cosines = _nearest(surface, comparison.near_truth, on_progress)
    to_surface, our_cosines = _nearest(truth, comparison.near_surface, lambda done: on_progress(len(surface) + done))
    # What is too far away is left out of means, as DTU has it; in scores it is a miss.
    near_truth, near_surface = (away[away < comparison.max_distance] for away in (to_truth, to_surface))
    if not len(near_truth) or not len(near_surface):
        raise MeshError(
            f"All points of the mesh and the truth are more than {comparison.max_distance:g} apart: check that both "
            "are in the same frame and units."
        )
    return SurfaceMetrics(
        accuracy=float(near_truth.mean()),
        completeness=float(near_surface.mean()),
        accuracy_median=float(np.median(near_truth)),
        completeness_median=float(np.median(near_surface)),
        scores=tuple(_score(to_truth, to_surface, threshold) for threshold in thresholds),
        normal_accuracy=None if their_cosines is None else float(their_cosines.mean()),
        normal_completeness=None if our_cosines is None else float(our_cosines.mean()),
        points=len(surface),
        true_points=len(truth),
    )


def sample_mesh(mesh: trimesh.Trimesh, count: int, seed: int = 0) -> SurfacePoints:
    """Returns points spread evenly over a mesh, with the normals of their faces. Raises MeshError without area."""
    if not len(mesh.faces) or not mesh.area > 0:
        raise MeshError("The mesh has no faces with an area, so there is nothing to compare: extract it again.")
    points, faces = trimesh.sample.sample_surface(mesh, count, seed=seed)[:2]
    return SurfacePoints(np.asarray(points, np.float64), np.asarray(mesh.face_normals)[np.asarray(faces)])


def _score(to_truth: np.ndarray, to_surface: np.ndarray, threshold: float) -> Score:
    precision, recall = float((to_truth < threshold).mean()), float((to_surface < threshold).mean())
    both = precision + recall
    return Score(threshold, precision, recall, 2 * precision * recall / both if both else 0.0)


def _nearest(
    points: SurfacePoints, others: SurfacePoints, on_progress: Callable[[int], None]
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"] | None]:
    """Distances to the nearest of the other points, and |cos| between the normals there, if both have them."""
    # Splitting at the middle of boxes is several times faster to build and as fast to search.
    tree = KDTree(others.positions, balanced_tree=False, compact_nodes=False)
    distances = np.empty(len(points))
    cosines = None if points.normals is None or others.normals is None else np.empty(len(points))
    for start in range(0, len(points), _CHUNK):
        part = slice(start, start + _CHUNK)
        distances[part], nearest = tree.query(points.positions[part], workers=-1)
        if cosines is not None:
            assert points.normals is not None and others.normals is not None
            cosines[part] = np.abs((points.normals[part] * others.normals[nearest]).sum(axis=1))
        on_progress(min(start + _CHUNK, len(points)))
    return distances, cosines
