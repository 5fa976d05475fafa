"""Gaussians as they are stored."""

from collections.abc import Callable

import pytest
import torch
from scipy.spatial.transform import Rotation

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians, degree_from_count, quats_to_rotations, sh_rest_count

Make = Callable[..., Gaussians]


@pytest.mark.parametrize(("degree", "count"), [(0, 0), (1, 3), (2, 8), (3, 15)])
def test_counts_of_coefficients(degree: int, count: int, colorful: Make) -> None:
    assert sh_rest_count(degree) == count and degree_from_count(count) == degree
    assert colorful(5, degree).sh_degree == degree


def test_no_degree_has_that_many_coefficients() -> None:
    with pytest.raises(ConfigError, match=r"7 .*0, 3, 8, 15"):
        degree_from_count(7)


def test_rotations_are_those_of_scipy() -> None:
    quats = torch.randn(20, 4, dtype=torch.float64) * 3
    expected = Rotation.from_quat(quats[:, [1, 2, 3, 0]].numpy()).as_matrix()
    torch.testing.assert_close(quats_to_rotations(quats), torch.from_numpy(expected))


def test_the_normal_is_the_smallest_axis(colorful: Make) -> None:
    gaussians = colorful(2)
    gaussians.scales = torch.tensor([[0.0, 1.0, -3.0], [-2.0, 1.0, 0.0]])
    half = 0.5**0.5
    gaussians.quats = torch.tensor([[1.0, 0.0, 0.0, 0.0], [half, 0.0, 0.0, half]])  # the second: x becomes y
    torch.testing.assert_close(gaussians.normals(), torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))


def test_selection_and_renaming(colorful: Make) -> None:
    gaussians = colorful(5, 2)
    chosen = gaussians[torch.tensor([True, False, True, False, False])]
    assert len(chosen) == 2 and torch.equal(chosen.features_rest, gaussians.features_rest[[0, 2]])
    again = Gaussians.from_tensors({**gaussians.tensors(), "step": torch.tensor(1)})
    assert all(torch.equal(a, b) for a, b in zip(again.tensors().values(), gaussians.tensors().values(), strict=True))


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_other_degrees_keep_the_lower_coefficients(degree: int, colorful: Make) -> None:
    gaussians, count = colorful(5, 2), sh_rest_count(degree)
    changed = gaussians.to_sh_degree(degree)
    both = min(count, 8)
    assert changed.features_rest.shape == (5, count, 3)
    assert torch.equal(changed.features_rest[:, :both], gaussians.features_rest[:, :both])
    assert not changed.features_rest[:, both:].any()


def test_what_cannot_be_used(colorful: Make) -> None:
    gaussians = colorful(5, 2)
    assert gaussians.require_finite("a.ply") is gaussians
    with pytest.raises(ConfigError, match=r"no Gaussians.*a\.ply"):
        gaussians[:0].require_finite("a.ply")
    gaussians.scales[1, 2] = float("nan")
    gaussians.scales[3] = float("inf")
    with pytest.raises(ConfigError, match=r"2 of 5.*a\.ply.*scales"):
        gaussians.require_finite("a.ply")
