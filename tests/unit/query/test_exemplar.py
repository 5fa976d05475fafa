"""Regions of photos, and the directions taken from them."""

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.exemplar import Region, exemplar, with_residual

GRID = PatchGrid.covering(3, 4, 30, 40)


@pytest.fixture
def feature_map() -> FeatureMap:
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float16)
    return FeatureMap(values=values, grid=GRID)


@pytest.fixture
def code_map(feature_map: FeatureMap) -> FeatureMap:
    residual = np.random.default_rng(1).uniform(0.5, 2.0, size=(3, 4)).astype(np.float16)
    return FeatureMap(values=feature_map.values, grid=GRID, residual_norm=residual)


def unit(values: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(values.astype(np.float64))
    return flat / flat.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.png", Region("a.png")),
        ("images/a.png:12.5,7", Region("images/a.png", 12.5, 7.0)),
        ("a.png:1,2,30,4", Region("a.png", 1.0, 2.0, 30.0, 4.0)),
        ("C:/odd:name.png:1,2", Region("C:/odd:name.png", 1.0, 2.0)),
        ("C:/photos/a.png", Region("C:/photos/a.png")),
        ("C:\\photos\\a.png", Region("C:\\photos\\a.png")),
        ("a.png: 1, 2", Region("a.png", 1.0, 2.0)),
    ],
)
def test_regions_are_read(text: str, expected: Region) -> None:
    assert Region.parse(text) == expected
    assert Region.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["", ":1,2", "a.png:1", "a.png:1,2,3", "a.png:x,y", "a.png:nan,2", "a.png:1,inf"])
def test_regions_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not understood: .*IMAGE:x,y,w,h"):
        Region.parse(text)


@pytest.mark.parametrize("text", ["a.png:1,2,0,5", "a.png:1,2,5,-1"])
def test_empty_boxes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        Region.parse(text)


def test_a_region_at_another_size_is_the_same_place() -> None:
    assert Region("a", 10.0, 20.0, 30.0, 40.0).scaled(0.5, 2.0) == Region("a", 5.0, 40.0, 15.0, 80.0)
    assert Region("a", 10.0, 20.0).scaled(0.5, 2.0) == Region("a", 5.0, 40.0)
    assert Region("a").scaled(0.5, 2.0) == Region("a")


def test_extent_and_middle() -> None:
    assert Region("a", 10.0, 20.0, 30.0, 40.0).box_px(99, 99) == (10, 20, 40, 60)
    assert Region("a", 10.0, 20.0).box_px(99, 99) == (10, 20, 10, 20)
    assert Region("a").box_px(80, 60) == (0, 0, 80, 60)
    assert Region("a", 10.0, 20.0, 30.0, 40.0).middle_px(99, 99) == (25, 40) and Region("a").middle_px(80, 60) == (
        40,
        30,
    )
    assert [Region("a", 1.0, 2.0).is_point, Region("a", 1.0, 2.0, 3.0, 4.0).is_point, Region("a").is_point] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("inside", ["a", "a:0,0", "a:40,30", "a:0,0,40,30", "a:39,29,1,1"])
def test_places_inside_are_taken(inside: str) -> None:
    Region.parse(inside).require_inside(40, 30)


@pytest.mark.parametrize("outside", ["a:-1,0", "a:0,-0.5", "a:40.5,3", "a:3,31", "a:30,0,11,5", "a:0,20,5,11"])
def test_places_outside_are_refused(outside: str) -> None:
    with pytest.raises(ConfigError, match=r"outside the image, which has 40 x 30 pixels"):
        Region.parse(outside).require_inside(40, 30)


def test_an_exemplar_at_a_patch_centre_is_that_patch(feature_map: FeatureMap) -> None:
    found = exemplar(feature_map, Region("a.png", 25.0, 15.0))  # centre of row 1, column 2
    torch.testing.assert_close(found.values.double(), unit(feature_map.values[1, 2])[None], atol=1e-6, rtol=0)
    assert found.sources == ("a.png:25,15",)


def test_an_exemplar_between_patches_is_interpolated(feature_map: FeatureMap) -> None:
    found = exemplar(feature_map, Region("a", 7.5, 20.0))  # half-way down, a quarter to the right
    values = feature_map.values.astype(np.float64)
    mixed = 0.5 * (0.75 * values[1, 0] + 0.25 * values[1, 1]) + 0.5 * (0.75 * values[2, 0] + 0.25 * values[2, 1])
    torch.testing.assert_close(found.values.double(), unit(mixed)[None], atol=1e-6, rtol=0)


def test_a_box_is_the_mean_direction_of_the_patches_in_it(feature_map: FeatureMap) -> None:
    # Centres at x = 5, 15, 25, 35 and y = 5, 15, 25: those at the edges of the box count.
    found = exemplar(feature_map, Region("a", 10.0, 0.0, 15.0, 15.0))
    expected = unit(feature_map.values[:2, 1:3].reshape(-1, 5)).mean(dim=0)
    torch.testing.assert_close(found.values.double(), (expected / expected.norm())[None], atol=1e-6, rtol=0)


def test_a_box_between_patches_is_its_middle(feature_map: FeatureMap) -> None:
    between = exemplar(feature_map, Region("a", 18.0, 16.0, 4.0, 6.0))
    middle = exemplar(feature_map, Region("a", 20.0, 19.0))
    torch.testing.assert_close(between.values, middle.values)


def test_a_whole_image_is_the_mean_direction_of_all_its_patches(feature_map: FeatureMap) -> None:
    expected = unit(feature_map.values.reshape(-1, 5)).mean(dim=0)
    found = exemplar(feature_map, Region("a"))
    torch.testing.assert_close(found.values.double(), (expected / expected.norm())[None], atol=1e-6, rtol=0)
    assert found.sources == ("a",)


def test_what_codes_leave_out_shortens_the_exemplar(code_map: FeatureMap) -> None:
    assert code_map.residual_norm is not None
    found = exemplar(code_map, Region("a", 25.0, 15.0)).values[0].double()
    codes = torch.from_numpy(code_map.values[1, 2].astype(np.float64))
    full = (codes.norm() ** 2 + float(code_map.residual_norm[1, 2]) ** 2) ** 0.5
    torch.testing.assert_close(found, codes / full, atol=1e-6, rtol=0)
    assert float(found.norm()) < 0.99


def test_the_residual_is_a_last_channel(feature_map: FeatureMap, code_map: FeatureMap) -> None:
    assert with_residual(feature_map) is feature_map
    joined = with_residual(code_map)
    assert joined.values.shape == (3, 4, 6) and joined.residual_norm is None and joined.grid == GRID
    np.testing.assert_array_equal(joined.values[..., 5], code_map.residual_norm)


@pytest.mark.parametrize("place", ["b.png:3,4", "b.png:1,1,5,5", "b.png"])
def test_a_zero_feature_is_no_exemplar(place: str) -> None:
    empty = FeatureMap(values=np.zeros((2, 2, 3), np.float16), grid=PatchGrid.covering(2, 2, 8, 8))
    with pytest.raises(ConfigError, match=r"feature of 'b\.png.* is zero.*ask another way"):
        exemplar(empty, Region.parse(place))


def test_zero_patches_do_not_spoil_a_box() -> None:
    values = np.zeros((1, 2, 3), np.float16)
    values[0, 1] = (0, 3, 4)
    half = FeatureMap(values=values, grid=PatchGrid.covering(1, 2, 4, 8))
    torch.testing.assert_close(exemplar(half, Region("a")).values, torch.tensor([[0.0, 0.6, 0.8]]))


def test_a_map_with_a_patch_per_pixel() -> None:
    values = np.ones((300, 400, 2), np.float16)
    found = exemplar(FeatureMap(values=values, grid=PatchGrid.covering(300, 400, 300, 400)), Region("a"))
    torch.testing.assert_close(found.values, torch.full((1, 2), 0.5**0.5))
