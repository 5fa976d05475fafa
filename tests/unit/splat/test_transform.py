"""Splats in another frame: they look the same to cameras that went along, whatever their degree."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors
from f3rm_ext.splat.transform import to_scene

TURN = Rotation.from_euler("xyz", [0.3, -1.2, 2.0]).as_matrix()
COLMAP = np.array([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]])
"""What ns-process-data applies to the poses."""
MIRROR = np.diag([1.0, 1.0, -1.0])


def outputs(rotation: np.ndarray, shift: tuple[float, ...] = (0.4, -0.1, 2.0), scale: float = 0.3) -> Any:
    matrix = np.column_stack([rotation, shift])
    return SimpleNamespace(dataparser_transform=torch.from_numpy(matrix).float(), dataparser_scale=scale)


@pytest.mark.parametrize("rotation", [np.eye(3), COLMAP, TURN, TURN @ MIRROR], ids=["none", "axes", "turn", "mirror"])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_colors_are_those_of_turned_directions(colorful: Any, rotation: np.ndarray, degree: int) -> None:
    splats = colorful(50, degree)
    directions = torch.nn.functional.normalize(torch.randn(50, 3, generator=torch.Generator().manual_seed(1)), dim=1)
    moved = to_scene(splats, outputs(rotation))
    turned = directions @ torch.from_numpy(rotation).float().T
    torch.testing.assert_close(
        sh_colors(degree, turned, moved.features_dc, moved.features_rest),
        sh_colors(degree, directions, splats.features_dc, splats.features_rest),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize(
    "rotation", [COLMAP, TURN, TURN @ MIRROR, 2 * TURN], ids=["axes", "turn", "mirror", "own scale"]
)
def test_shapes_go_along(colorful: Any, rotation: np.ndarray) -> None:
    splats = colorful(50)
    moved = to_scene(splats, outputs(rotation))
    linear = torch.from_numpy(rotation).float()
    torch.testing.assert_close(moved.means, 0.3 * (splats.means @ linear.T + torch.tensor([0.4, -0.1, 2.0])))

    def covariance(some: Gaussians) -> torch.Tensor:
        axes = some.rotations() * some.sizes()[:, None]
        return axes @ axes.transpose(1, 2)

    torch.testing.assert_close(covariance(moved), 0.09 * linear @ covariance(splats) @ linear.T, atol=1e-6, rtol=1e-4)
    scale = 0.3 * float(linear.det().abs()) ** (1 / 3)
    torch.testing.assert_close(moved.sizes(), scale * splats.sizes())
    assert torch.equal(moved.opacities, splats.opacities)


def test_a_transform_that_shears_is_refused(colorful: Any) -> None:
    with pytest.raises(ConfigError, match="a rotation"):
        to_scene(colorful(5), outputs(np.array([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]])))
