"""The own ViT against `transformers`, through files as the hub holds them, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import load_state_dict

pytestmark = pytest.mark.integration
transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")

PATCH, GRID = 14, 4
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": GRID * PATCH,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
}


def save(kind: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "options", "prefix"),
    [
        ("ViT", {"intermediate_size": 512}, 1),
        ("Dinov2", {}, 1),
        ("Dinov2", {"use_swiglu_ffn": True}, 1),
        ("Dinov2WithRegisters", {"num_register_tokens": 4}, 5),
    ],
)
@torch.no_grad()
def test_native_size(tmp_path: Path, kind: str, options: dict[str, Any], prefix: int) -> None:
    reference = save(kind, tmp_path, **options)
    vit = VisionTransformer.from_state_dict(load_state_dict(tmp_path / "model.safetensors"))
    pixels = torch.randn(2, 3, GRID * PATCH, GRID * PATCH)
    expected = reference(pixels).last_hidden_state[:, prefix:]
    torch.testing.assert_close(vit(pixels)[0].flatten(1, 2), expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_interpolated_positions(tmp_path: Path) -> None:
    reference = save("Dinov2", tmp_path)
    vit = VisionTransformer.from_state_dict(load_state_dict(tmp_path / "model.safetensors"))
    pixels = torch.randn(1, 3, 3 * PATCH, 7 * PATCH)
    expected = reference(pixels).last_hidden_state[:, 1:].unflatten(1, (3, 7))
    torch.testing.assert_close(vit(pixels)[0], expected, atol=2e-4, rtol=1e-3)
