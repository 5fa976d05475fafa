"""The features of regions, the rest of their photos, and good places to choose."""

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.exemplar import (
    REST,
    SCENE,
    deepest_pixel,
    distinctive_patch,
    join_examples,
    scene_clusters,
    sharpness,
    take_example,
)
from f3rm_ext.query.options import Region

GRID = PatchGrid.covering(3, 4, 30, 40)


@pytest.fixture
def feature_map() -> FeatureMap:
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float16)
    return FeatureMap(values=values, grid=GRID)


@pytest.fixture
def code_map(feature_map: FeatureMap) -> FeatureMap:
    residual = np.random.default_rng(1).uniform(0.5, 2.0, size=(3, 4)).astype(np.float16)
    return FeatureMap(values=feature_map.values, grid=GRID, residual_norm=residual)


def embed_place(feature_map: FeatureMap, region: Region) -> Embeddings:
    positives = take_example(feature_map, region).positives
    return Embeddings(positives.values[:1], positives.sources[:1])


def unit(values: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(values.astype(np.float64))
    return flat / flat.norm(dim=-1, keepdim=True)


def test_an_exemplar_between_patches_is_interpolated(feature_map: FeatureMap) -> None:
    found = embed_place(feature_map, Region("a", 7.5, 20.0))  # half-way down, a quarter to the right
    values = feature_map.values.astype(np.float64)
    mixed = 0.5 * (0.75 * values[1, 0] + 0.25 * values[1, 1]) + 0.5 * (0.75 * values[2, 0] + 0.25 * values[2, 1])
    torch.testing.assert_close(found.values.double(), unit(mixed)[None], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("region", "patches"),
    # Centres at x = 5, 15, 25, 35 and y = 5, 15, 25: those at the edges of the box count.
    [(Region("a", 10.0, 0.0, 15.0, 15.0), np.s_[:2, 1:3]), (Region("a"), np.s_[:])],
    ids=["box", "whole image"],
)
def test_an_area_is_the_mean_direction_of_the_patches_in_it(feature_map: FeatureMap, region, patches) -> None:
    found = embed_place(feature_map, region)
    expected = unit(feature_map.values[patches].reshape(-1, 5)).mean(dim=0)
    torch.testing.assert_close(found.values.double(), (expected / expected.norm())[None], atol=1e-6, rtol=0)
    assert found.sources == (str(region),)


def test_a_box_between_patches_is_its_middle(feature_map: FeatureMap) -> None:
    between = embed_place(feature_map, Region("a", 18.0, 16.0, 4.0, 6.0))
    middle = embed_place(feature_map, Region("a", 20.0, 19.0))
    torch.testing.assert_close(between.values, middle.values)


def test_what_codes_leave_out_shortens_the_exemplar(code_map: FeatureMap) -> None:
    assert code_map.residual_norm is not None
    found = embed_place(code_map, Region("a", 25.0, 15.0)).values[0].double()
    codes = torch.from_numpy(code_map.values[1, 2].astype(np.float64))
    full = (codes.norm() ** 2 + float(code_map.residual_norm[1, 2]) ** 2) ** 0.5
    torch.testing.assert_close(found, codes / full, atol=1e-6, rtol=0)
    assert float(found.norm()) < 0.99


@pytest.mark.parametrize("place", ["b.png:3,4", "b.png:1,1,5,5", "b.png"])
def test_a_zero_feature_is_no_exemplar(place: str) -> None:
    empty = FeatureMap(values=np.zeros((2, 2, 3), np.float16), grid=PatchGrid.covering(2, 2, 8, 8))
    with pytest.raises(ConfigError, match=r"'b\.png.*zero"):
        embed_place(empty, Region.parse(place))


def test_zero_patches_do_not_spoil_a_box() -> None:
    values = np.zeros((1, 2, 3), np.float16)
    values[0, 1] = (0, 3, 4)
    half = FeatureMap(values=values, grid=PatchGrid.covering(1, 2, 4, 8))
    torch.testing.assert_close(embed_place(half, Region("a")).values, torch.tensor([[0.0, 0.6, 0.8]]))


# --- things and what to tell them from --------------------------------------------------------------------------------


DIM = 5
PHOTO_GRID = PatchGrid.covering(rows=6, cols=8, height_px=60, width_px=80)


def photo(residual: bool = False) -> FeatureMap:
    """A thing (axis 0) in the left top 3 × 4 patches, wall (axis 1) around it, floor (axis 2) in the last two rows."""
    values = np.zeros((6, 8, DIM), dtype=np.float16)
    values[..., 1] = 2.0
    values[:3, :4] = 0.0
    values[:3, :4, 0] = 3.0
    values[4:] = 0.0
    values[4:, :, 2] = 0.5
    return FeatureMap(values=values, grid=PHOTO_GRID, residual_norm=np.ones((6, 8), np.float16) if residual else None)


def directions(found: torch.Tensor) -> set[int]:
    assert torch.allclose(found.norm(dim=1), torch.ones(len(found)), atol=1e-5)
    return {int(row.argmax()) for row in found}


@pytest.mark.parametrize(
    ("region", "own"),
    [
        (Region("a.png", 15.0, 12.0), {0}),
        (Region("a.png", 70.0, 5.0), {1}),
        (Region("a.png", 33.0, 55.0), {2}),
        (Region("a.png", 0.0, 0.0, 40.0, 30.0), {0}),
        (Region("a.png", 5.0, 5.0, 15.0, 15.0), {0}),
    ],
    ids=["thing", "wall", "floor", "box", "part"],
)
def test_a_thing_is_told_from_the_rest(region: Region, own: set[int]) -> None:
    found = take_example(photo(), region)
    assert directions(found.positives.values) == own
    rest = directions(found.negatives.values)
    assert rest == {0, 1, 2} - own or region.width_px == 15.0, "what sticks out of a box is told from it"
    torch.testing.assert_close(found.positives.values[:1], embed_place(photo(), region).values)
    assert found.positives.sources[0] == str(region)


def test_a_thing_is_connected_and_of_several_parts() -> None:
    """Left a thing with two shades, right another of the first shade, which is neither part of it nor told from it."""
    values = np.zeros((6, 9, DIM), np.float16)
    values[..., 1] = 1.0
    values[1:4, 1:3], values[1:4, 6:8] = (1.0, 0, 0, 0, 0), (1.0, 0, 0, 0, 0)
    values[1:4, 3] = (0.8, 0, 0, 0.6, 0)
    flat = FeatureMap(values=values, grid=PatchGrid.covering(6, 9, 60, 90))
    found = take_example(flat, Region("a.png", 15.0, 25.0), np.eye(DIM, dtype=np.float32)[1:3])
    axis = torch.tensor([0.8, 0, 0, 0.6, 0])
    assert float((found.positives.values @ axis).max()) == pytest.approx(1.0, abs=1e-3)
    rest = [source for source in found.negatives.sources if source.startswith("rest of a.png")]
    assert len(rest) == 1 and len(found.negatives) == 3


def test_several_examples_do_not_contradict_each_other() -> None:
    """The thing of each point is the rest of the photo to the other one."""
    points = (Region("a.png", 15.0, 12.0), Region("a.png", 70.0, 5.0))
    found = join_examples([take_example(photo(), region) for region in points])
    assert directions(found.positives.values) == {0, 1} and directions(found.negatives.values) == {2}
    single = take_example(photo(), points[0])
    assert join_examples([single]).negatives.sources == single.negatives.sources


def test_what_is_like_the_example_in_the_scene_is_no_negative() -> None:
    scene = np.asarray([[1, 0.1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0]], np.float32)
    scene /= np.linalg.norm(scene, axis=1, keepdims=True)
    found = take_example(photo(), Region("a.png", 15.0, 12.0), scene)
    assert [source for source in found.negatives.sources if source.startswith("scene")] == [
        f"scene, cluster {i}" for i in (1, 2, 3)
    ]
    assert 0 not in directions(found.negatives.values)
    whole = take_example(photo(), Region("a.png"), scene)
    assert len(whole.positives) == 1 and len(whole.negatives) > 0


def test_with_codes_the_norm_counts_what_they_leave_out() -> None:
    found = take_example(photo(residual=True), Region("a.png", 0.0, 0.0, 40.0, 30.0)).negatives.values.norm(dim=1)
    assert float(found.max()) == pytest.approx(2 / 5**0.5, abs=1e-3)
    assert float(found.min()) == pytest.approx(0.5 / 1.25**0.5, abs=1e-3)


def test_a_photo_that_shows_nothing_else() -> None:
    flat = FeatureMap(values=np.ones((6, 8, DIM), np.float16), grid=PHOTO_GRID)
    assert len(take_example(flat, Region("a.png", 5.0, 5.0)).negatives) == 0


def test_patches_without_a_feature_are_in_no_cluster() -> None:
    values = photo().values.copy()
    values[4:] = 0.0
    found = take_example(FeatureMap(values=values, grid=PHOTO_GRID), Region("a.png", 0.0, 0.0, 40.0, 30.0))
    assert directions(found.negatives.values) == {1}


def test_few_clusters_and_always_the_same() -> None:
    values = np.random.default_rng(0).normal(size=(60, 80, DIM)).astype(np.float16)
    noise = FeatureMap(values=values, grid=PatchGrid.covering(60, 80, 60, 80))
    clusters = scene_clusters([noise, noise])
    assert 1 < len(clusters) <= SCENE
    found = [take_example(noise, Region("a.png", 3.0, 3.0), clusters) for _ in range(2)]
    assert 1 < len(found[0].negatives) <= SCENE + REST and 1 < len(found[0].positives) <= 5
    assert torch.equal(found[0].negatives.values, found[1].negatives.values)


# --- good places ------------------------------------------------------------------------------------------------------


def test_deepest_pixel_keeps_away_from_the_border_of_the_image_and_lies_on_what_is_chosen() -> None:
    row, col = deepest_pixel(np.ones((11, 31), bool))
    assert row == 5 and 5 <= col <= 25
    y, x = np.mgrid[:40, :40] - 20
    ring = np.abs(np.hypot(y, x) - 12) < 4
    assert ring[deepest_pixel(ring)]


def test_sharp_images_are_sharper() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    assert sharpness(noise) > sharpness(noise // 4) > sharpness(np.full((20, 20, 3), 9, np.uint8)) == 0


def map_of(values: np.ndarray) -> FeatureMap:
    return FeatureMap(values.astype(np.float16), PatchGrid.covering(values.shape[0], values.shape[1], 80, 80))


def test_a_distinctive_patch_is_found_again_and_unlike_the_rest() -> None:
    plain, rare, lonely = np.eye(3)
    here = np.tile(plain, (8, 8, 1))
    here[3, 4], here[4, 3], here[0, 0] = rare, lonely, rare
    other = np.tile(plain, (8, 8, 1))
    other[6, 6] = rare
    # `lonely` is nowhere else, and the `rare` patch in the corner is not in the middle of the photo.
    assert distinctive_patch(map_of(here), [map_of(other)] * 3) == (35.0, 45.0)


def test_distinctive_patch_of_a_single_photo_and_of_a_tiny_one() -> None:
    here = np.random.default_rng(1).normal(size=(1, 1, 4))
    assert distinctive_patch(map_of(here), []) == (40.0, 40.0)
