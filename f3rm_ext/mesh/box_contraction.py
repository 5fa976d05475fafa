"""Contraction of space without bounds around the cameras of a capture."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64


@dataclass(frozen=True)
class BoxContraction:
    """Pulls unbounded space into a cube (mip-NeRF 360, Barron et al. 2022, eq. 10, with the maximum norm).

    The innermost box becomes the cube from -1 to 1 and is only scaled; infinity becomes the surface of the cube from -2
    to 2.
    """

    center: Float64[np.ndarray, "3"]
    """Mean of the cameras' positions, scene frame."""
    radius: float
    """Half the side of the innermost box, scene units."""

    @classmethod
    def from_cameras(
        cls, positions: Float[np.ndarray, "cams 3"], depths: Sequence[Float[np.ndarray, "..."]]
    ) -> "BoxContraction":
        """Returns that of a capture: the radius is the extent of the cameras and the median depth together.

        The depths are those of each camera's pixels with a surface.
        """
        medians = [float(np.median(depth)) for depth in depths if len(depth)]
        middle = positions.mean(axis=0)
        extent = 1.1 * float(np.linalg.norm(positions - middle, axis=1).max())  # as 3DGS measures it
        return cls(middle, max(extent + (float(np.median(medians)) if medians else 0.0), 1e-3))

    def distances(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, " n"]:
        """Returns the largest coordinate of points, in radii."""
        return np.abs(points - self.center).max(axis=1, initial=0.0) / self.radius

    def in_shell(
        self, points: Float[np.ndarray, "n 3"], inner: float, outer: float, margin: float = 0.0
    ) -> Bool[np.ndarray, " n"]:
        """Returns which points are in a shell or not farther from it than the margin; all lengths are in radii."""
        away = self.distances(points)
        return (away >= inner - margin) & (away < outer + margin)

    def contract(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Returns points in the cube from -2 to 2."""
        norm = np.maximum(self.distances(points), 1.0)[:, None]
        return (points - self.center) / self.radius * (2 - 1 / norm) / norm

    def expand(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Undoes :meth:`contract`."""
        norm = np.maximum(np.abs(points).max(axis=1, initial=0.0), 1.0)[:, None]
        return points / (norm * (2 - norm)) * self.radius + self.center
