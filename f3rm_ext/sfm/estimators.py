"""Front ends that predict camera poses, found by entry point; COLMAP refines what they predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Float

from f3rm_ext.errors import ConfigError, UserError, reason_of

ENTRY_POINT_GROUP = "f3rm_ext.pose_estimators"
COLMAP = "colmap"
ROTATION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class PredictedPoses:
    """Cameras as a front end predicts them."""

    viewmats: Mapping[str, Float[np.ndarray, "4 4"]]
    """World to camera, OpenCV axes (x right, y down, looking along +z), by file name of the photo. The unit of the
    world is free. Photos may be missing."""
    focal_px: Mapping[str, float] = field(default_factory=dict)
    """Focal length in pixels by file name. What EXIF tells counts first; where both are missing, COLMAP guesses."""


@runtime_checkable
class PoseEstimator(Protocol):
    """A front end: a function registered under the entry point group ``f3rm_ext.pose_estimators``.

    It may raise :class:`f3rm_ext.errors.UserError` with one sentence about the photos or what it needs.
    """

    def __call__(self, images: Sequence[Path], /) -> PredictedPoses:
        """Predicts poses.

        Args:
            images: Upright 8-bit photos, JPEG or PNG, in the order of their names or of time.
        """
        ...


@runtime_checkable
class StampedEstimator(PoseEstimator, Protocol):
    """A front end whose predictions depend on more than the photos."""

    def stamp(self) -> str:
        """Returns what identifies the rest, such as its weights: captures are made again where it changes."""
        ...


def available_methods() -> list[str]:
    """Returns the values of ``--method``."""
    return ["auto", COLMAP, *sorted(_entry_points())]


def build_estimator(method: str) -> PoseEstimator | None:
    """Returns the front end of a method; None for COLMAP, which needs none. Raises ConfigError if there is no such
    front end, or it cannot be loaded."""
    if method in ("auto", COLMAP):
        return None
    point = _entry_points().get(method)
    if point is None:
        raise ConfigError(f"There is no --method {method}: choose from {', '.join(available_methods())}.")
    try:
        estimator = point.load()
    except Exception as error:  # importing another package can raise anything
        raise ConfigError(
            f"--method {method} of {point.value} cannot be loaded ({type(error).__name__}: {reason_of(error)}): "
            "fix or uninstall that package."
        ) from error
    if not callable(estimator):
        raise ConfigError(f"--method {method} ({point.value}) is not a function: fix or uninstall that package.")
    return cast(PoseEstimator, estimator)


def predict_poses(method: str, estimator: PoseEstimator, images: Sequence[Path]) -> PredictedPoses:
    """Runs a front end and checks what it returns. Raises ConfigError if it fails, knows fewer than two photos, or
    returns something else than rigid poses."""
    try:
        predicted = estimator(images)
        viewmats = {name: np.asarray(viewmat, dtype=np.float64) for name, viewmat in predicted.viewmats.items()}
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"--method {method} failed ({type(error).__name__}: {reason_of(error)}): fix it, or use --method colmap."
        ) from error
    names = {path.name for path in images}
    if len(names & viewmats.keys()) < 2:
        raise ConfigError(f"--method {method} predicts fewer than two of these photos: use --method colmap.")
    for name, viewmat in viewmats.items():
        if not _is_rigid(viewmat):
            raise ConfigError(f"--method {method} predicts a pose for {name} that is not rigid: use --method colmap.")
    return predicted


def _is_rigid(matrix: np.ndarray) -> bool:
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all():
        return False
    rotation = matrix[:3, :3]
    is_orthonormal = np.abs(rotation @ rotation.T - np.eye(3)).max() < ROTATION_TOLERANCE
    return bool(is_orthonormal and np.linalg.det(rotation) > 0)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
