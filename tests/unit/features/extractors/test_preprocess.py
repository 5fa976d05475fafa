"""Resizing to whole patches, normalising, and batches of images of different sizes."""

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors import preprocess

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("image", "short_side", "patch", "expected"),
    [
        ((960, 540), 448, 14, (798, 448)),
        ((540, 960), 448, 14, (448, 798)),
        ((720, 1280), 336, 14, (336, 602)),
        ((224, 224), 224, 8, (224, 224)),
        ((100, 2000), 32, 16, (32, 640)),
        ((32, 32), 100, 64, (128, 128)),
        ((33, 32), 40, 64, (64, 64)),
    ],
)
def test_sides_are_whole_patches_near_the_wanted_size(image, short_side, patch, expected) -> None:
    assert preprocess.whole_patches(*image, short_side, patch) == expected


def test_tiny_images_are_refused() -> None:
    with pytest.raises(ExtractorError, match="31x400"):
        preprocess.whole_patches(31, 400, 224, 14)


@pytest.mark.parametrize("size", [(30, 50), (90, 61), (200, 10)])
def test_resize_agrees_with_pillows_bicubic(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).normal(128, 30, (90, 61, 3)).clip(0, 255).astype(np.uint8)
    image[20:50, 10:40] = (255, 0, 90)
    # In floating point: with 8 bits, Pillow clips between its two passes, whose order depends on its version.
    channels = [Image.fromarray(channel) for channel in np.moveaxis(image.astype(np.float32) / 255, 2, 0)]
    expected = np.stack([channel.resize(size[::-1], Image.Resampling.BICUBIC) for channel in channels])
    if size != image.shape[:2]:
        assert expected.min() < -0.01 and expected.max() > 1.01, "bicubic overshoots: there is something to clip"
    found = preprocess.resize(image, size, CPU)
    assert found.shape == (3, *size)
    np.testing.assert_allclose(found.numpy(), expected.clip(0, 1), atol=1e-5)


@pytest.mark.parametrize("view", [np.s_[:, :24], np.s_[::-1, ::2], np.s_[:]])
def test_resize_takes_views_and_read_only_arrays(view) -> None:
    image = np.arange(64 * 48 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 48, 3)[view]
    image.flags.writeable = False
    found = preprocess.resize(image, image.shape[:2], CPU)
    np.testing.assert_array_equal((found * 255).round().byte().permute(1, 2, 0).numpy(), image)


def test_images_of_one_size_go_together_and_come_back_in_order() -> None:
    shapes = [(40, 60), (50, 50), (40, 60), (41, 61), (50, 50), (40, 60)]
    images = [np.full((*shape, 3), 10 * index, np.uint8) for index, shape in enumerate(shapes)]
    seen: list[tuple[int, ...]] = []

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(pixels.shape))
        assert torch.is_inference_mode_enabled()
        return pixels[:, :1].permute(0, 2, 3, 1)[:, ::20, ::20].half()

    found = preprocess.extract_in_batches(
        images, lambda height, width: (height // 20 * 20, width // 20 * 20), forward, batch_size=3, device=CPU
    )
    assert seen == [(3, 3, 40, 60), (1, 3, 40, 60), (2, 3, 40, 40)]
    for index, features in enumerate(found):
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, torch.full_like(features, 10 * index / 255), atol=1e-3, rtol=0)


def test_features_may_enter_autograd() -> None:
    (features,) = preprocess.extract_in_batches(
        [np.zeros((40, 40, 3), np.uint8)],
        lambda height, width: (height, width),
        lambda pixels: pixels.permute(0, 2, 3, 1),
        batch_size=1,
        device=CPU,
    )
    assert not features.is_inference()
    weight = torch.ones(3, requires_grad=True)
    (features @ weight).sum().backward()
