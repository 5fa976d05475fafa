"""Gaussians turned, shifted and scaled into another frame, their colours included."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.spatial.transform import Rotation
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases

_DIRECTIONS = 64
_SKEW = 1e-4
"""Most that rotations may differ from orthonormal ones, as transforms of files are rounded."""


@dataclass(frozen=True)
class Move:
    """A change of frame: x' = scale · R · x + shift."""

    rotation: Float[np.ndarray, "3 3"]
    """R, orthonormal, float64; may mirror."""
    scale: float
    """> 0."""
    shift: Float[np.ndarray, "3"]
    """In units of the new frame."""

    @classmethod
    def to_scene(cls, outputs: Any) -> "Move":
        """From the frame of a capture's own poses to the scene frame.

        The own poses are those before nerfstudio changed anything: COLMAP's, also where ns-process-data or the colmap
        dataparser exchanged axes; or those of transforms.json, where it has no ``applied_transform``.

        Args:
            outputs: a dataparser's, with ``dataparser_transform`` (3, 4) and ``dataparser_scale``.

        Raises:
            ConfigError: the transform is not made of a rotation, a shift and a scale.
        """
        matrix = np.asarray(outputs.dataparser_transform, dtype=np.float64)[:3, :4]
        linear, factor = matrix[:, :3], float(outputs.dataparser_scale)
        own = abs(float(np.linalg.det(linear))) ** (1 / 3)
        rotation = linear / max(own, 1e-12)
        if not np.allclose(rotation @ rotation.T, np.eye(3), atol=_SKEW):
            raise ConfigError(
                "The dataparser's transform is not made of a rotation, a shift and a scale, so splats cannot be "
                "brought from the capture's frame to the scene: bring them there yourself and leave "
                "--pipeline.model.start-frame at scene."
            )
        return cls(rotation, factor * own, factor * matrix[:, 3])

    def points(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points 3"]:
        """Points in the new frame."""
        moved = points.double() @ self._tensor(self.scale * self.rotation, points).T + self._tensor(self.shift, points)
        return moved.to(points.dtype)

    def gaussians(self, gaussians: Gaussians) -> Gaussians:
        """Gaussians that look in the new frame as these do in the old one, from every direction."""
        turn = self._tensor(_harmonics(self.rotation, gaussians.sh_degree), gaussians.means)
        rest = torch.einsum("jk,nkc->njc", turn.float(), gaussians.features_rest.float())
        # A Gaussian is its own mirror image, so that a mirrored one is a turned one.
        proper = self.rotation * np.sign(np.linalg.det(self.rotation))
        x, y, z, w = Rotation.from_matrix(proper).as_quat()
        turned = self._tensor(np.array([w, x, y, z]), gaussians.quats).to(gaussians.quats.dtype)
        return replace(
            gaussians,
            means=self.points(gaussians.means),
            scales=gaussians.scales + float(np.log(self.scale)),
            quats=_after(turned, gaussians.quats),
            features_rest=rest.to(gaussians.features_rest.dtype),
        )

    @staticmethod
    def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


def _harmonics(rotation: Float[np.ndarray, "3 3"], degree: int) -> Float[np.ndarray, "coeffs coeffs"]:
    """What turns coefficients of degrees 1 and up, so that a colour seen along d is then seen along R d.

    Turned harmonics of a degree are sums of the harmonics of that degree; the factors follow from their values in more
    directions than there are coefficients.
    """
    directions = np.random.default_rng(0).standard_normal((_DIRECTIONS, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    before, after = (sh_bases(degree, torch.from_numpy(d)).numpy() for d in (directions, directions @ rotation.T))
    return np.linalg.lstsq(after, before, rcond=None)[0]


def _after(first: Float[Tensor, "4"], quats: Float[Tensor, "gaussians 4"]) -> Float[Tensor, "gaussians 4"]:
    """Rotations of quaternions (w, x, y, z), each followed by another: their products."""
    w, x, y, z = quats.unbind(-1)
    a, b, c, d = first
    return torch.stack(
        [
            a * w - b * x - c * y - d * z,
            a * x + b * w + c * z - d * y,
            a * y - b * z + c * w + d * x,
            a * z + b * y - c * x + d * w,
        ],
        dim=-1,
    )
