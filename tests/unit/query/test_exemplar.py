"""Exemplar queries against direct computations."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.nerf.chunked import ChunkedRenderer
from f3rm_ext.query.exemplar import (
    best_pixel,
    exemplar_at,
    intersection_over_union,
    render_with_similarity,
    similarity_image,
    similarity_images,
)

HEIGHT, WIDTH, DIM = 7, 9, 40


class Features:
    """Stands in for a model: features are a fixed function of a ray's direction; remembers its largest chunk."""

    def __init__(self, chunk: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.matrix = torch.randn(3, DIM, generator=generator)
        self.device = torch.device("cpu")
        self.chunked = ChunkedRenderer(chunk)
        self.largest = 0
        head = SimpleNamespace(dim=DIM)
        self.feature_field = SimpleNamespace(names=("daisy",), head=lambda name: head)
        self.config = SimpleNamespace(output_features=False)

    def render_features(self, rays: RayBundle) -> dict[str, Tensor]:
        self.largest = max(self.largest, len(rays))
        return {"daisy": self.of(rays.directions)}

    def forward(self, rays: RayBundle) -> dict[str, Tensor]:
        assert self.config.output_features, "features have to be asked for"
        return {"rgb": rays.directions.abs(), "feature": self.of(rays.directions), "feature_pca": rays.directions}

    def of(self, directions: Tensor) -> Tensor:
        return (directions * 3).sin() @ self.matrix


@pytest.fixture
def camera() -> Cameras:
    return Cameras(torch.eye(4)[None, :3], fx=8.0, fy=8.0, cx=WIDTH / 2, cy=HEIGHT / 2, width=WIDTH, height=HEIGHT)


@pytest.fixture
def feature_map() -> FeatureMap:
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float16)
    return FeatureMap(values=values, grid=PatchGrid.covering(3, 4, 30, 40))


def as_model(features: Features) -> Any:
    return features


def test_similarity_equals_the_cosine_of_full_features(camera: Cameras) -> None:
    features = Features(chunk=10)
    vectors = torch.randn(3, DIM, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.01], [1.0], [50.0]])
    found = similarity_images(as_model(features), camera, "daisy", vectors)
    full = features.of(camera.generate_rays(0, keep_shape=True).directions).double()
    expected = torch.einsum("hwd,qd->hwq", full, vectors.double())
    expected /= full.norm(dim=-1, keepdim=True) * vectors.double().norm(dim=-1)
    assert found.shape == (HEIGHT, WIDTH, 3)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert features.largest == 10, "features of more rays than a chunk were held at once"


def test_one_vector_is_the_first_of_several(camera: Cameras) -> None:
    features = Features(chunk=16)
    vector = features.matrix[1]
    several = similarity_images(as_model(features), camera, "daisy", torch.stack([vector, -vector]))
    torch.testing.assert_close(similarity_image(as_model(features), camera, "daisy", vector), several[..., 0])
    torch.testing.assert_close(several[..., 1], -several[..., 0])


def test_rendering_and_similarity_in_one_pass_are_the_same(camera: Cameras) -> None:
    features = Features(chunk=10)
    vectors = torch.randn(2, DIM, generator=torch.Generator().manual_seed(2))
    outputs = render_with_similarity(as_model(features), camera, "daisy", vectors)
    expected = similarity_images(as_model(features), camera, "daisy", vectors)
    torch.testing.assert_close(outputs.pop("similarity"), expected)
    assert set(outputs) == {"rgb", "feature_pca"}, "full features are not kept"
    assert features.config.output_features is False, "the model is left as it was"


def test_a_model_that_keeps_its_features_goes_on_doing_so(camera: Cameras) -> None:
    features = Features(chunk=64)
    features.config.output_features = True
    outputs = render_with_similarity(as_model(features), camera, "daisy", torch.ones(1, DIM))
    assert outputs["feature"].shape == (HEIGHT, WIDTH, DIM) and features.config.output_features


def test_the_exemplar_of_a_ray_is_found_at_that_ray(camera: Cameras) -> None:
    features = Features(chunk=64)
    rays = camera.generate_rays(0, keep_shape=True)
    vector = features.of(rays.directions[5, 2])
    similarity = similarity_image(as_model(features), camera, "daisy", vector)
    assert best_pixel(similarity) == (5, 2)
    assert similarity[5, 2] == pytest.approx(1.0, abs=1e-5)


def test_a_zero_vector_is_similar_to_nothing(camera: Cameras) -> None:
    similarity = similarity_image(as_model(Features(chunk=64)), camera, "daisy", torch.zeros(DIM))
    assert not similarity.any() and similarity.isfinite().all()


def test_unknown_head_and_wrong_dimension_are_refused(camera: Cameras) -> None:
    with pytest.raises(ConfigError, match=r"no feature 'clip'.*daisy"):
        similarity_image(as_model(Features(chunk=64)), camera, "clip", torch.ones(DIM))
    with pytest.raises(ConfigError, match=r"7 dimensions.*has 40"):
        similarity_image(as_model(Features(chunk=64)), camera, "daisy", torch.ones(7))


def test_an_exemplar_at_a_patch_centre_is_that_patch(feature_map: FeatureMap) -> None:
    exemplar = exemplar_at("daisy", feature_map, (15.0, 25.0), image="a.png")  # centre of row 1, column 2
    patch = torch.from_numpy(feature_map.values[1, 2].astype(np.float32))
    torch.testing.assert_close(exemplar.vector, patch / patch.norm())
    assert (exemplar.head, exemplar.image, exemplar.yx_px) == ("daisy", "a.png", (15.0, 25.0))


def test_an_exemplar_between_patches_is_interpolated(feature_map: FeatureMap) -> None:
    exemplar = exemplar_at("daisy", feature_map, (20.0, 7.5))  # half-way down, a quarter to the right
    values = torch.from_numpy(feature_map.values.astype(np.float32))
    mixed = 0.5 * (0.75 * values[1, 0] + 0.25 * values[1, 1]) + 0.5 * (0.75 * values[2, 0] + 0.25 * values[2, 1])
    torch.testing.assert_close(exemplar.vector, mixed / mixed.norm())


def test_a_zero_feature_is_no_exemplar() -> None:
    empty = FeatureMap(values=np.zeros((2, 2, 3), np.float16), grid=PatchGrid.covering(2, 2, 8, 8))
    with pytest.raises(ConfigError, match=r"x = 3, y = 4 of b\.png is zero.*choose another place"):
        exemplar_at("daisy", empty, (4.0, 3.0), image="b.png")


def test_best_pixel_takes_the_first_of_equals() -> None:
    similarity = torch.zeros(3, 4)
    similarity[1, 3] = similarity[2, 0] = 0.5
    assert best_pixel(similarity) == (1, 3)


def test_intersection_over_union() -> None:
    left = torch.tensor([[True, True, False, False]])
    middle = torch.tensor([[False, True, True, False]])
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert intersection_over_union(left, middle) == pytest.approx(1 / 3)
    assert intersection_over_union(left, left) == 1.0
    assert intersection_over_union(nothing, nothing) == 0.0
