"""The extractor of pre-trained ResNets: geometry, identity, and weights that are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18, resnet50

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors.moco import MocoConfig, MocoExtractor
from f3rm_ext.features.extractors.registry import build_extractor, feature_size

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("moco") / "backbone.safetensors"
    save_file({name: value for name, value in resnet18(weights=None).state_dict().items() if name[:3] != "fc."}, path)
    return path


@pytest.mark.parametrize(("stage", "dim", "stride"), [("2", 128, 8), ("3", 256, 16), ("4", 512, 32)])
def test_features_have_the_grid_that_is_told(weights: Path, stage: str, dim: int, stride: int) -> None:
    extractor = build_extractor(f"moco:weights={weights},short_side_px=64,stage={stage}", device=CPU)
    image = np.random.default_rng(0).integers(0, 255, (100, 160, 3), dtype=np.uint8)
    grid, (features,) = extractor.patch_grid(100, 160), extractor.extract([image])
    assert features.shape == (grid.rows, grid.cols, dim) == (64 // stride, grid.cols, extractor.dim)
    size = feature_size(f"moco:weights={weights},short_side_px=64,stage={stage}", 100, 160)
    assert (size.rows, size.cols, size.dim) == tuple(features.shape)


def test_a_feature_sees_what_lies_around_its_centre(weights: Path) -> None:
    extractor = MocoExtractor(MocoConfig(weights=weights, short_side_px=256, stage="2"), device=CPU)
    pixels = torch.rand(1, 3, 256, 256, requires_grad=True)
    extractor._forward(pixels)[0, 16, 12].square().sum().backward()
    assert pixels.grad is not None
    seen = pixels.grad.abs().sum(dim=(0, 1))
    places = torch.arange(256) + 0.5
    centre = [float((seen.sum(dim=1 - axis) * places).sum() / seen.sum()) for axis in (0, 1)]
    assert centre == pytest.approx(extractor.patch_grid(256, 256).centres_px()[16, 12].tolist(), abs=2)


def test_identity_changes_with_weights_and_stage(weights: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save(resnet50(weights=None).state_dict(), other)
    texts = [f"moco:weights={weights}", f"moco:weights={weights},stage=4", f"moco:weights={other}"]
    found = [build_extractor(text, device=CPU).identity for text in texts]
    assert len({identity.key() for identity in found}) == 3 and found[2].model == "resnet50"


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtractorError, match="weights"):
        build_extractor("moco", device=CPU)
    save_file({"layer1.0.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ExtractorError, match="ResNet-18"):
        build_extractor(f"moco:weights={tmp_path / 'other.safetensors'}", device=CPU)
