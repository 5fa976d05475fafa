"""Extractors run in half precision on CUDA: close to what they give in single precision on the CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from f3rm_ext.features.base import Extractor, TextExtractor
from f3rm_ext.features.extractors.registry import build_extractor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Two smooth pictures of different sizes."""
    pictures = []
    for number, (height, width) in enumerate([(96, 128), (112, 84)]):
        y, x = np.mgrid[0:height, 0:width] / 64
        waves = [np.sin(9 * x + number), np.cos(7 * y - number), np.sin(5 * (x + y) * (number + 1))]
        pictures.append((np.stack(waves, axis=-1) * 127 + 128).astype(np.uint8))
    return pictures


def _assert_close(on_cuda: list[torch.Tensor], on_cpu: list[torch.Tensor]) -> None:
    for half, single in zip(on_cuda, on_cpu, strict=True):
        assert half.shape == single.shape and half.dtype == torch.float32 and half.device == CPU
        assert torch.isfinite(half).all()
        assert functional.cosine_similarity(half, single, dim=-1).min() > 0.995
        assert float((half - single).norm() / single.norm()) < 0.05


def _both(spec: str, cuda: torch.device) -> tuple[Extractor, Extractor]:
    return build_extractor(spec, device=cuda), build_extractor(spec, device=CPU)


def test_dinov2_with_real_weights(data_root: Path, cuda: torch.device) -> None:
    weights = data_root / "weights" / "dinov2_vits14_saliency_fp16.pth"
    if not weights.is_file():
        pytest.skip(f"{weights} is not there")
    photos = [
        np.asarray(Image.open(data_root / "fox" / "images" / name).convert("RGB")) for name in ("0001.jpg", "0033.jpg")
    ]
    on_cuda, on_cpu = _both(f"dinov2:weights={weights},layers=6+7+8+9,short_side_px=224", cuda)
    assert on_cuda.identity == on_cpu.identity, "precision is no reason to extract again"
    _assert_close(on_cuda.extract(photos), on_cpu.extract(photos))


@pytest.mark.parametrize("model", ["ViT-B-32", "ViT-B-32-quickgelu"])
def test_clip_images_and_text(model: str, images: list[np.ndarray], cuda: torch.device) -> None:
    on_cuda, on_cpu = _both(f"clip:model={model},pretrained=random,short_side_px=96", cuda)
    _assert_close(on_cuda.extract(images), on_cpu.extract(images))
    assert isinstance(on_cuda, TextExtractor) and isinstance(on_cpu, TextExtractor)
    prompts = ["a mug", "a fox in the snow"]
    embedded = on_cuda.encode_text(prompts)
    torch.testing.assert_close(embedded.norm(dim=-1), torch.ones(2), atol=1e-3, rtol=0)
    assert functional.cosine_similarity(embedded, on_cpu.encode_text(prompts), dim=-1).min() > 0.995


@pytest.mark.parametrize("image_count", [1, 2])
def test_extractors_release_what_they_do_not_need(
    image_count: int, images: list[np.ndarray], cuda: torch.device, empty_pool: Callable[[], None]
) -> None:
    extractor = build_extractor("clip:model=ViT-B-32,pretrained=random,short_side_px=96", device=cuda)
    extractor.extract(images[:image_count])
    held = torch.cuda.memory_allocated(cuda)
    extractor.extract(images[:image_count])
    assert torch.cuda.memory_allocated(cuda) == held, "features or activations stay on the device"
