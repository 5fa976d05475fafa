"""DINO and DINOv2 extractors with small random weights: geometry, options, identity."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError
from f3rm_ext.features.base import Extractor, TextExtractor
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.dino import DinoConfig, DinoExtractor, Dinov2Config, Dinov2Extractor
from f3rm_ext.features.extractors.registry import build_extractor
from f3rm_ext.features.extractors.vit import VisionTransformer

CPU = torch.device("cpu")
WIDTH = 64


def random_weights(patch_px: int, depth: int = 3) -> dict[str, Tensor]:
    """State dict of a small ViT under DINO's names."""
    generator = torch.Generator().manual_seed(patch_px)

    def normal(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    state = {
        "cls_token": normal(1, 1, WIDTH),
        "pos_embed": normal(1, 1 + 3 * 3, WIDTH),
        "patch_embed.proj.weight": normal(WIDTH, 3, patch_px, patch_px),
        "patch_embed.proj.bias": normal(WIDTH),
    }
    attention = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    linear = attention | {"mlp.fc1": (96, WIDTH), "mlp.fc2": (WIDTH, 96)}
    for index in range(depth):
        for name, shape in linear.items():
            state[f"blocks.{index}.{name}.weight"] = normal(*shape)
            state[f"blocks.{index}.{name}.bias"] = normal(shape[0])
        for name in ("norm1", "norm2"):
            state[f"blocks.{index}.{name}.weight"] = normal(WIDTH) + 1
            state[f"blocks.{index}.{name}.bias"] = normal(WIDTH)
    return state | {"norm.weight": normal(WIDTH) + 1, "norm.bias": normal(WIDTH)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Weights files by patch size."""
    folder = tmp_path_factory.mktemp("weights")
    for patch_px in (8, 14):
        torch.save(random_weights(patch_px), folder / f"{patch_px}.pth")
    return {patch_px: folder / f"{patch_px}.pth" for patch_px in (8, 14)}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["dino", "dinov2"])
def test_are_image_extractors_without_text(files, name) -> None:
    extractor = build_extractor(f"{name}:weights={files[8]}", device=CPU)
    assert isinstance(extractor, Extractor)
    assert not isinstance(extractor, TextExtractor)
    assert extractor.identity.extractor == name
    assert extractor.dim == WIDTH


@pytest.mark.parametrize(("height", "width"), [(60, 60), (100, 333), (97, 41)])
@pytest.mark.parametrize("stride", [None, 4, 3])
def test_shape_is_the_grids(files, height, width, stride) -> None:
    config = DinoConfig(weights=files[8], short_side_px=40, stride_px=stride)
    extractor = DinoExtractor(config, device=CPU)
    (features,) = extractor.extract([noise(height, width)])
    grid = extractor.patch_grid(height, width)
    assert features.shape == (grid.rows, grid.cols, WIDTH)
    assert features.dtype == torch.float32
    assert features.device.type == "cpu"


def test_f3rms_default_geometry(files) -> None:
    # 1280 x 720 at load size 224, patch 8, stride 4: 55 rows as in F3RM, columns up to rounding instead of cutting.
    extractor = DinoExtractor(DinoConfig(weights=files[8]), device=CPU)
    grid = extractor.patch_grid(720, 1280)
    assert (grid.rows, grid.cols) == (55, 99)
    first, last = grid.centres_px()[0, 0], grid.centres_px()[-1, -1]
    np.testing.assert_allclose(first + last, (720, 1280), rtol=1e-5)
    np.testing.assert_allclose(first, (4 * 720 / 224, 4 * 1280 / 400), rtol=1e-5)


def test_features_are_the_networks(files) -> None:
    image = noise(42, 56)
    config = Dinov2Config(weights=files[14], short_side_px=42, layers=(0, -1))
    (found,) = Dinov2Extractor(config, device=CPU).extract([image])
    vit = VisionTransformer.from_state_dict(torch.load(files[14], weights_only=True))
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    maps = vit(preprocess.normalise(pixels, preprocess.IMAGENET_MEAN, preprocess.IMAGENET_STD), (0, 2))
    torch.testing.assert_close(found, (maps[0][0] + maps[1][0]) / 2, atol=1e-5, rtol=1e-4)


def test_keys_are_dinos_default(files) -> None:
    image = noise(48, 48)
    config = DinoConfig(weights=files[8], short_side_px=48)
    (default,) = DinoExtractor(config, device=CPU).extract([image])
    spelt_out = dataclasses.replace(config, facet="key", layers=(2,), stride_px=4)
    (keys,) = DinoExtractor(spelt_out, device=CPU).extract([image])
    (tokens,) = DinoExtractor(dataclasses.replace(config, facet="token"), device=CPU).extract([image])
    assert torch.equal(default, keys)
    assert not torch.allclose(default, tokens)


def test_a_patch_that_changes_changes_its_own_feature_most(files) -> None:
    extractor = Dinov2Extractor(Dinov2Config(weights=files[14], short_side_px=70, layers=(0,)), device=CPU)
    image = noise(140, 210)
    grid = extractor.patch_grid(140, 210)
    row, col = 1, 5
    y, x = grid.centres_px()[row, col].astype(int)
    changed = image.copy()
    changed[y - 10 : y + 10, x - 10 : x + 10] = 255
    before, after = extractor.extract([image, changed])
    difference = (after - before).norm(dim=-1)
    assert divmod(int(difference.argmax()), grid.cols) == (row, col)


class TestIdentity:
    def test_follows_weights_and_options(self, files, tmp_path) -> None:
        other = tmp_path / "other.pth"
        torch.save(random_weights(14) | {"norm.bias": torch.zeros(WIDTH)}, other)
        configs = [
            Dinov2Config(weights=files[14]),
            Dinov2Config(weights=other),
            Dinov2Config(weights=files[14], short_side_px=224),
            Dinov2Config(weights=files[14], stride_px=7),
            Dinov2Config(weights=files[14], facet="value"),
            Dinov2Config(weights=files[14], layers=(1,)),
        ]
        keys = {Dinov2Extractor(config, device=CPU).identity.key() for config in configs}
        assert len(keys) == len(configs)

    def test_does_not_follow_the_files_name_or_the_way_a_layer_is_written(self, files, tmp_path) -> None:
        copy = tmp_path / "copy.pth"
        copy.write_bytes(files[14].read_bytes())
        first = Dinov2Extractor(Dinov2Config(weights=files[14], layers=(-1,)), device=CPU).identity
        second = Dinov2Extractor(Dinov2Config(weights=copy, layers=(2,), stride_px=14), device=CPU).identity
        assert first == second


class TestMistakes:
    @pytest.mark.parametrize("layer", [3, -4])
    def test_layer_that_does_not_exist(self, files, layer) -> None:
        with pytest.raises(ExtractorError, match=f"{layer}.*0 to 2"):
            build_extractor(f"dinov2:weights={files[14]},layers=0+{layer}", device=CPU)

    @pytest.mark.parametrize("option", ["short_side_px=31", "stride_px=0", "stride_px=15"])
    def test_sizes_out_of_range(self, files, option) -> None:
        with pytest.raises(ExtractorError, match=option.partition("=")[0]):
            build_extractor(f"dinov2:weights={files[14]},{option}", device=CPU)

    def test_missing_file(self) -> None:
        with pytest.raises(WeightsNotFoundError, match=r"nowhere\.pth"):
            build_extractor("dino:weights=nowhere.pth", device=CPU)

    def test_too_small_an_image(self, files) -> None:
        with pytest.raises(ExtractorError, match="too small"):
            build_extractor(f"dino:weights={files[8]}", device=CPU).extract([noise(20, 400)])


@pytest.mark.parametrize(
    ("extractor", "config", "repository", "file"),
    [
        (DinoExtractor, DinoConfig(model="vitb16"), "facebook/dino-vitb16", "dino_vitbase16_pretrain.pth"),
        (Dinov2Extractor, Dinov2Config(model="vitl14"), "facebook/dinov2-large", "dinov2_vitl14_pretrain.pth"),
        (
            Dinov2Extractor,
            Dinov2Config(model="vits14_reg"),
            "facebook/dinov2-with-registers-small",
            "dinov2_vits14_reg4_pretrain.pth",
        ),
    ],
)
def test_published_weights(extractor, config, repository, file) -> None:
    weights = extractor.weights_source(config)
    assert {name for name, _ in weights.hub_files} == {repository}
    assert weights.urls[0].endswith(f"/{file}")
