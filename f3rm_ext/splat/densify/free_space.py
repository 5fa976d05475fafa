"""The space around the cameras, in which there is no surface."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import project

_NEAREST = 0.01
"""The nearest points may be wrong: the distance is that of the nearest hundredth, of as many as a camera shows."""
_SAMPLE = 10_000
"""Points that suffice to measure distances."""
_ELEMENTS = 1 << 22
"""Distances that are in memory at a time."""


class FreeSpace(NamedTuple):
    """Balls around the cameras. Between neighbouring cameras, Gaussians are seen from far away alone, where they pass
    for a piece of the background; a view from there looks through them as through fog.

    The idea is that of the occlusion regularisation of FreeNeRF (Yang et al. 2023), §3.3, with radii of the scene.
    """

    centres: Float[Tensor, "cams 3"]
    """Positions of the cameras, scene frame."""
    radii: Float[Tensor, " cams"]
    """Scene units."""

    @classmethod
    def measure(cls, views: PinholeCameras, points: Float[Tensor, "points 3"], share: float) -> "FreeSpace":
        """Measures how near to each camera points are, whether it shows them or they lie behind it.

        Args:
            views: training cameras, on the CPU.
            points: at least one, scene frame, on the CPU.
            share: radii as a share of the distance to the nearest points, ≥ 0.
        """
        points = points[:: -(-len(points) // _SAMPLE)].double()
        radii = []
        for index, centre in enumerate(views.positions.double()):
            shown = int(project(views, index, points)[2].sum())
            nearest = (points - centre).norm(dim=1).kthvalue(1 + int(_NEAREST * shown)).values
            radii.append(share * nearest)
        return cls(views.positions.float(), torch.stack(radii).float())

    def to(self, device: torch.device) -> "FreeSpace":
        """Moves all tensors to a device."""
        return FreeSpace(*(part.to(device) for part in self))

    def holds(self, points: Float[Tensor, "points 3"]) -> Bool[Tensor, " points"]:
        """Returns which points lie inside one of the balls."""
        inside = [
            (torch.cdist(some, self.centres, compute_mode="donot_use_mm_for_euclid_dist") < self.radii).any(dim=1)
            for some in points.split(max(1, _ELEMENTS // len(self.centres)))
        ]
        return torch.cat(inside)
