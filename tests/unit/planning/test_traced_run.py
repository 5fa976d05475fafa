"""Cached images and features by formula, compared with those of the datamanagers."""

import math

import pytest
import torch

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.data.pixel_sampler import ImagePixels, PackedPixels
from f3rm_ext.data.placement import Placement
from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import FeatureSize
from f3rm_ext.features.extractors.registry import build_extractor, feature_size
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.memory.estimate import CONTEXT_BYTES
from f3rm_ext.planning.request import CaptureSizes
from f3rm_ext.planning.traced_run import CachedImages, feature_sizes, feature_specs

CAPTURE = CaptureSizes(train_images=20, eval_images=3, width_px=160, height_px=90)


def test_bytes_are_those_of_packed_images() -> None:
    cached = CachedImages.from_split(F3rmDataManagerConfig(train_num_images_to_sample_from=4), "train", 20, CAPTURE)
    images = [ImagePixels(torch.zeros(90, 160, 3, dtype=torch.uint8)) for _ in range(4)]
    assert cached.images == PackedPixels.pack(range(4), images).pixels.nbytes


@pytest.mark.parametrize(("option", "count"), [(-1, 20), (math.inf, 20), (100, 20), (7, 7)])
def test_as_many_images_are_cached_as_the_option_says(option: float, count: int) -> None:
    config = ImageDataManagerConfig(train_num_images_to_sample_from=option, train_num_times_to_repeat_images=10)
    cached = CachedImages.from_split(config, "train", 20, CAPTURE)
    assert cached.images == count * 90 * 160 * 3 and cached.changes == (count < 20)


def test_features_are_halves_per_patch() -> None:
    sizes = [FeatureSize(10, 5, 64), FeatureSize(2, 2, 8)]
    cached = CachedImages.from_split(F3rmDataManagerConfig(), "train", 20, CAPTURE, sizes)
    assert cached.features == 20 * 2 * (10 * 5 * 64 + 2 * 2 * 8)


@pytest.mark.parametrize(("free", "kept"), [(4000, True), (3999, False)])
def test_images_are_cached_where_the_datamanager_would_put_them(
    free: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, memory = CachedImages(images=600, features=400, changes=False), CONTEXT_BYTES + 50 + free
    monkeypatch.setattr("f3rm_ext.data.placement.free_memory", lambda device: free)
    placement = Placement(torch.device("cpu"), wanted=True, off="x", log=False)
    assert cached.on_device(True, "cuda", memory, 50) == placement.decide(1000) == kept
    assert not cached.on_device(False, "cuda", memory, 50) and not cached.on_device(True, "cpu", memory, 50)


def test_codes_take_the_place_of_dimensions() -> None:
    (full,), (codes,) = (
        feature_sizes(FeatureOptions(extractors=("dense-daisy",), codes=number), CAPTURE) for number in (0, 16)
    )
    assert codes == FeatureSize(full.rows, full.cols, 16) and full.dim > 16
    (spec,) = feature_specs(FeatureOptions(extractors=("dense-daisy",)), [codes])
    assert (spec.dim == 16 and spec.name == "dense_daisy") or spec.name == "dense-daisy"


@pytest.mark.parametrize(
    "text", ["clip:model=ViT-B-32,pretrained=random,short_side_px=64", "clip:model=ViT-L-14-336,pretrained=random"]
)
def test_sizes_without_weights_are_those_of_the_extractor(text: str) -> None:
    extractor = build_extractor(text, device=torch.device("cpu"))
    grid = extractor.patch_grid(90, 160)
    assert feature_size(text, 90, 160) == FeatureSize(grid.rows, grid.cols, extractor.dim)


def test_sizes_of_published_models() -> None:
    assert feature_size("dinov2", 448, 896) == FeatureSize(32, 64, 384)
    assert feature_size("dino:model=vitb8,stride_px=none", 224, 448) == FeatureSize(28, 56, 768)
    assert feature_size("dino", 224, 224) == FeatureSize(55, 55, 384)
    with pytest.raises(ExtractorError):
        feature_size("clap", 90, 160)
