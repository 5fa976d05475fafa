"""Similarity transforms of Gaussians, including their view-dependent colours."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases

_DIRECTIONS = 64
_SKEW = 1e-4
"""Tolerance of orthonormality: transforms in files are rounded."""


def to_scene(gaussians: Gaussians, outputs: Any) -> Gaussians:
    """Brings Gaussians from the frame of a capture's original poses to the scene frame.

    The original poses are those before any change by nerfstudio: COLMAP's, even if ns-process-data or the colmap
    dataparser swapped axes, or those of a transforms.json without ``applied_transform``.

    Args:
        outputs: dataparser outputs with ``dataparser_transform`` (3, 4) and ``dataparser_scale``.

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
    return transform(gaussians, rotation, factor * own, factor * matrix[:, 3])


def transform(
    gaussians: Gaussians, rotation: Float[np.ndarray, "3 3"], scale: float, shift: Float[np.ndarray, "3"]
) -> Gaussians:
    """Moves Gaussians to x' = scale · R · x + shift, so that they look the same from every direction.

    Args:
        rotation: R, orthonormal, float64; may include a reflection.
    """
    from scipy.spatial.transform import Rotation  # slow to import

    linear, offset, turn = (
        torch.from_numpy(values).to(gaussians.means.device)
        for values in (scale * rotation, shift, _harmonics(rotation, gaussians.sh_degree))
    )
    # A Gaussian is symmetric, so its mirror image is a rotated Gaussian.
    proper = rotation * np.sign(np.linalg.det(rotation))
    xyzw = gaussians.quats.detach().cpu().double().numpy()[:, [1, 2, 3, 0]]
    wxyz = (Rotation.from_matrix(proper) * Rotation.from_quat(xyzw)).as_quat()[:, [3, 0, 1, 2]]
    rest = torch.einsum("jk,nkc->njc", turn.float(), gaussians.features_rest.float())
    return replace(
        gaussians,
        means=(gaussians.means.double() @ linear.T + offset).to(gaussians.means.dtype),
        scales=gaussians.scales + float(np.log(scale)),
        quats=torch.from_numpy(wxyz).to(gaussians.quats),
        features_rest=rest.to(gaussians.features_rest.dtype),
    )


def _harmonics(rotation: Float[np.ndarray, "3 3"], degree: int) -> Float[np.ndarray, "coeffs coeffs"]:
    """Returns the matrix that rotates SH coefficients of degrees 1 and up: what is seen along d is then seen along R d.

    Rotated harmonics of a degree are linear combinations of the harmonics of that degree. Their factors follow by least
    squares from values in more directions than there are coefficients.
    """
    directions = np.random.default_rng(0).standard_normal((_DIRECTIONS, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    before, after = (sh_bases(degree, torch.from_numpy(d)).numpy() for d in (directions, directions @ rotation.T))
    return np.linalg.lstsq(after, before, rcond=None)[0]
