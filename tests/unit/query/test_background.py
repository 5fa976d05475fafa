"""What an example is told from: the kinds of thing in its own photo."""

import numpy as np
import pytest
import torch

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.background import KINDS, background_clusters
from f3rm_ext.query.exemplar import Region

DIM = 5
GRID = PatchGrid.covering(rows=6, cols=8, height_px=60, width_px=80)


def photo(residual: bool = False) -> FeatureMap:
    """A thing (axis 0) in the left top 3 × 4 patches, wall (axis 1) around it, floor (axis 2) in the last two rows."""
    values = np.zeros((6, 8, DIM), dtype=np.float16)
    values[..., 1] = 2.0
    values[:3, :4] = 0.0
    values[:3, :4, 0] = 3.0
    values[4:] = 0.0
    values[4:, :, 2] = 0.5
    return FeatureMap(values=values, grid=GRID, residual_norm=np.ones((6, 8), np.float16) if residual else None)


def directions(found: torch.Tensor) -> set[int]:
    assert torch.allclose(found.norm(dim=1), torch.ones(len(found)), atol=1e-5)
    return {int(row.argmax()) for row in found}


def test_a_box_is_told_from_what_lies_outside_of_it() -> None:
    found = background_clusters(photo(), Region("a.png", 0.0, 0.0, 40.0, 30.0))
    assert directions(found.values) == {1, 2} and len(found) == 2
    assert found.sources == ("a.png without it, kind 1", "a.png without it, kind 2")


def test_what_sticks_out_of_a_box_is_told_from_it() -> None:
    found = background_clusters(photo(), Region("a.png", 0.0, 0.0, 20.0, 30.0))
    assert directions(found.values) == {0, 1, 2}


@pytest.mark.parametrize(("x_px", "y_px", "own"), [(15.0, 12.0, 0), (70.0, 5.0, 1), (33.0, 55.0, 2)])
def test_a_point_is_told_from_all_kinds_but_its_own(x_px: float, y_px: float, own: int) -> None:
    assert directions(background_clusters(photo(), Region("a.png", x_px, y_px)).values) == {0, 1, 2} - {own}


def test_with_codes_the_norm_counts_what_they_leave_out() -> None:
    found = background_clusters(photo(residual=True), Region("a.png", 0.0, 0.0, 40.0, 30.0)).values
    wall, floor = sorted(found.norm(dim=1).tolist(), reverse=True)
    assert wall == pytest.approx(2 / 5**0.5, abs=1e-3) and floor == pytest.approx(0.5 / 1.25**0.5, abs=1e-3)


@pytest.mark.parametrize("region", [Region("a.png"), Region("a.png", 0.0, 0.0, 80.0, 60.0)], ids=["image", "box"])
def test_all_of_the_photo_has_no_surroundings(region: Region) -> None:
    found = background_clusters(photo(), region)
    assert len(found) == 0 and found.values.shape == (0, DIM)


def test_a_photo_that_shows_nothing_else() -> None:
    flat = FeatureMap(values=np.ones((6, 8, DIM), np.float16), grid=GRID)
    assert len(background_clusters(flat, Region("a.png", 5.0, 5.0))) == 0


def test_patches_without_a_feature_are_no_kind() -> None:
    values = photo().values.copy()
    values[4:] = 0.0
    found = background_clusters(FeatureMap(values=values, grid=GRID), Region("a.png", 0.0, 0.0, 40.0, 30.0))
    assert directions(found.values) == {1}


def test_few_kinds_and_always_the_same() -> None:
    values = np.random.default_rng(0).normal(size=(6, 8, DIM)).astype(np.float16)
    found = [background_clusters(FeatureMap(values=values, grid=GRID), Region("a.png", 3.0, 3.0)) for _ in range(2)]
    assert 1 < len(found[0]) < KINDS
    assert torch.equal(found[0].values, found[1].values)
