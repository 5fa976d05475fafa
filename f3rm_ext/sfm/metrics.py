"""How far cameras are from the true ones, by the protocols of PoseDiffusion and RayDiffusion.

RRA@τ and RTA@τ are the shares of camera pairs whose relative rotation, and whose direction of relative translation, is
off by less than τ degrees; AUC@30 is the mean of the cumulative histogram, in bins of 1° up to 30°, of the larger of
the two errors (PoseDiffusion, Wang et al. 2023, arXiv 2306.15667). Centre accuracy and the chamfer distance of points
follow RayDiffusion (Zhang et al. 2024, arXiv 2402.14817) and DiffusionSfM (Zhao et al. 2025, arXiv 2505.05473).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64
from scipy.spatial import KDTree

THRESHOLDS_DEG = (5, 15, 30)
CENTER_THRESHOLD = 0.1
"""Largest error of an accurate camera centre, in scene scales."""
_AUC_DEG = 30
MOST_PAIRS = 1_000_000
"""Pairs of cameras that are compared: all of up to 1414 cameras, a random sample of more."""
Poses = tuple[Float[np.ndarray, "cams 3 3"], Float[np.ndarray, "cams 3"]]
"""Rotations, camera to world, and centres."""


@dataclass(frozen=True)
class Similarity:
    """A map of points: scale · rotation · x + translation."""

    scale: float
    rotation: Float[np.ndarray, "3 3"]
    translation: Float[np.ndarray, "3"]

    def __call__(self, points: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        return self.scale * points @ self.rotation.T + self.translation


def align(source: Float[np.ndarray, "points 3"], target: Float[np.ndarray, "points 3"]) -> Similarity:
    """Returns the similarity that brings points nearest to others in the sense of least squares (Umeyama 1991).

    If all source points are one, the scale is 1.

    >>> moved = align(np.eye(3), 2 * np.eye(3) + 1)
    >>> round(moved.scale, 6), np.round(moved.translation, 6).tolist()
    (2.0, [1.0, 1.0, 1.0])
    """
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    a, b = source - source_mean, target - target_mean
    U, S, Vt = np.linalg.svd(b.T @ a)
    signs = np.array([1.0, 1.0, 1.0 if np.linalg.det(U @ Vt) >= 0 else -1.0])
    rotation = (U * signs) @ Vt
    spread = float((a**2).sum())
    scale = float((S * signs).sum()) / spread if spread > 0 else 1.0
    return Similarity(scale, rotation, target_mean - scale * rotation @ source_mean)


def camera_pairs(count: int) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
    """Returns the indices i < j of all pairs, or of :data:`MOST_PAIRS` drawn at random, always the same, if fewer.

    >>> [len(camera_pairs(count)[0]) for count in (2, 10, 100_000)]
    [1, 45, 1000000]
    """
    if count * (count - 1) // 2 <= MOST_PAIRS:
        i, j = np.triu_indices(count, 1)
        return i, j
    rng = np.random.default_rng(0)
    one = rng.integers(count, size=MOST_PAIRS)
    other = (one + rng.integers(1, count, size=MOST_PAIRS)) % count
    return np.minimum(one, other), np.maximum(one, other)


def relative_rotation_errors_deg(
    predicted: Float[np.ndarray, "cams 3 3"], true: Float[np.ndarray, "cams 3 3"]
) -> Float[np.ndarray, " pairs"]:
    """Returns how far the rotation between two cameras is off, for :func:`camera_pairs`; camera to world."""
    i, j = camera_pairs(len(true))
    relative = [rotations[j].transpose(0, 2, 1) @ rotations[i] for rotations in (predicted, true)]
    difference = relative[0].transpose(0, 2, 1) @ relative[1]
    # atan2 of sine and cosine: exact for small angles, where the arc cosine loses half of the digits.
    skew = difference - difference.transpose(0, 2, 1)
    sine = np.sqrt((skew**2).sum(axis=(1, 2)) / 8)
    cosine = (np.trace(difference, axis1=1, axis2=2) - 1) / 2
    return np.degrees(np.arctan2(sine, cosine))


def relative_translation_errors_deg(predicted: Poses, true: Poses) -> Float[np.ndarray, " pairs"]:
    """Returns how far the direction from camera j to camera i is off, as camera j sees it, for :func:`camera_pairs`.

    The sign of the direction does not count, as published: errors are at most 90°.
    """
    i, j = camera_pairs(len(true[1]))
    directions = []
    for rotations, centers in (predicted, true):
        offset = np.einsum("pji,pj->pi", rotations[j], centers[i] - centers[j])
        directions.append(offset / np.maximum(np.linalg.norm(offset, axis=1, keepdims=True), 1e-15))
    sine = np.linalg.norm(np.cross(*directions), axis=1)
    cosine = np.abs((directions[0] * directions[1]).sum(axis=1))
    return np.degrees(np.arctan2(sine, cosine))


def area_under_curve(errors_deg: Float[np.ndarray, " pairs"]) -> float:
    """Returns the mean of the cumulative histogram of errors in 30 bins of 1°; errors of 30° and more count as misses.

    >>> area_under_curve(np.array([0.5, 29.5]))
    0.5166666666666667
    """
    inside = errors_deg[errors_deg < _AUC_DEG]
    counts = np.bincount(inside.astype(int), minlength=_AUC_DEG)
    return float(np.cumsum(counts / max(len(errors_deg), 1)).mean())


@dataclass(frozen=True)
class PoseMetrics:
    """How well poses fit. Shares are of all pairs or cameras; missing cameras count as misses."""

    cameras: int
    """Cameras that both have."""
    missing: int
    """True cameras that were not predicted."""
    pairs: int
    """Pairs of cameras that were compared: all, or those of :func:`camera_pairs`."""
    rra: dict[str, float]
    """Share of pairs whose relative rotation is off by less than 5°, 15°, 30°."""
    rta: dict[str, float]
    """The same for the direction of the relative translation."""
    auc_30: float
    """Area under the curve of the larger of both errors."""
    rotation_error_deg: float
    """Median error of relative rotations, over the pairs that were predicted."""
    translation_error_deg: float
    """Median error of directions, over the pairs that were predicted."""
    center_accuracy: float
    """Share of camera centres off by less than 0.1 scene scales after the best similarity."""
    center_error: float
    """Median error of the centres after the best similarity, in scene scales: the largest distance of a true camera
    from their mean."""
    center_error_units: float
    """The same in the units of the truth."""


def compare_poses(
    predicted: Poses, true: Poses, all_true_centers: Float[np.ndarray, "all 3"] | None = None, missing: int = 0
) -> PoseMetrics:
    """Compares cameras with the true ones, in any frame and scale.

    With three centres or fewer the similarity leaves little error: as published, the accuracy of two is always 1.

    Args:
        all_true_centers: centres of the whole sequence, which set the scene scale; by default those compared.
        missing: cameras that should have been predicted and were not. Every pair with one of them is a miss.
    """
    rotation = relative_rotation_errors_deg(predicted[0], true[0])
    translation = relative_translation_errors_deg(predicted, true)
    cameras, count = len(true[1]), len(true[1]) + missing
    known = cameras * (cameras - 1) / (count * (count - 1))  # share of the pairs that have no missing camera
    all_centers = true[1] if all_true_centers is None else all_true_centers
    scene_scale = float(np.linalg.norm(all_centers - all_centers.mean(axis=0), axis=1).max())
    errors = np.linalg.norm(align(predicted[1], true[1])(predicted[1]) - true[1], axis=1)
    shares = errors / max(scene_scale, 1e-15)
    return PoseMetrics(
        cameras=cameras,
        missing=missing,
        pairs=len(rotation),
        rra={str(limit): known * float((rotation < limit).mean()) for limit in THRESHOLDS_DEG},
        rta={str(limit): known * float((translation < limit).mean()) for limit in THRESHOLDS_DEG},
        auc_30=known * area_under_curve(np.maximum(rotation, translation)),
        rotation_error_deg=float(np.median(rotation)),
        translation_error_deg=float(np.median(translation)),
        center_accuracy=float((shares < CENTER_THRESHOLD).sum() / count),
        center_error=float(np.median(shares)),
        center_error_units=float(np.median(errors)),
    )


def chamfer_distance(predicted: Float[np.ndarray, "points 3"], true: Float[np.ndarray, "points 3"]) -> float:
    """Returns DiffusionSfM's chamfer distance (CD) of point maps.

    The predicted points are brought to the true ones by the best similarity, for which the n-th points correspond. Both
    are divided by the mean distance of the true points from their mean. Then the *squared* distances to the nearest
    point are averaged, and the averages of both directions are added.
    """
    size = float(np.linalg.norm(true - true.mean(axis=0), axis=1).mean())
    aligned, target = (points / max(size, 1e-15) for points in (align(predicted, true)(predicted), true))
    there, back = KDTree(target).query(aligned)[0], KDTree(aligned).query(target)[0]
    return float((there**2).mean() + (back**2).mean())
