"""ViT backbones beside timm's, what stays fixed, and their dense features."""

from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.features.extractors.moco import MocoConfig, MocoExtractor
from f3rm_ext.moco.encoder import Encoder, predictor
from f3rm_ext.moco.evaluation import open_backbone
from f3rm_ext.moco.vit import VitBackbone, position_code
from f3rm_ext.moco.weights import export


@pytest.fixture(scope="module")
def backbone() -> VitBackbone:
    torch.manual_seed(0)
    return VitBackbone("vit_small", 64).eval()


def test_positions_are_sines_and_cosines_of_column_then_row() -> None:
    found = position_code(3, 8)[5]  # row 1, column 2; rates 1 and 1/100
    sines = [[function(at * rate) for rate in (1, 0.01)] for at in (2, 1) for function in (np.sin, np.cos)]
    np.testing.assert_allclose(found.numpy(), np.concatenate(sines), atol=1e-6)


def test_class_token_is_that_of_timm(backbone: VitBackbone) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("vit_small_patch16_224", img_size=64, num_classes=0).eval()
    network.load_state_dict(backbone.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), network(images), atol=1e-4, rtol=1e-4)


def test_patches_and_positions_are_not_trained(backbone: VitBackbone) -> None:
    fixed = {name for name, value in backbone.named_parameters() if not value.requires_grad}
    assert fixed == {"network.pos_embed", "network.patch_embed.proj.weight", "network.patch_embed.proj.bias"}


def test_heads_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        vit, resnet = Encoder("vit_small", "v3", 64), Encoder("resnet18", "v3")
    widths = [
        [layer.out_features for layer in head if isinstance(layer, torch.nn.Linear)]
        for head in (vit.projector, resnet.projector, predictor("vit_small"), predictor("resnet18"))
    ]
    assert widths == [[4096, 4096, 256], [4096, 256], [4096, 256], [4096, 256]]
    ends = [type(head[-1]).__name__ for head in (vit.projector, predictor("vit_small"), predictor("resnet18"))]
    assert ends == ["BatchNorm1d", "BatchNorm1d", "Linear"]


def test_dense_features_at_any_size(backbone: VitBackbone, tmp_path: Path) -> None:
    facts = {"architecture": "vit_small", "algorithm": "v3", "image_size": 64, "step": 1}
    path = export(backbone, tmp_path, facts)
    again, architecture = open_backbone(path)
    assert architecture == "vit_small"
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(images), backbone(images))
    extractor = MocoExtractor(MocoConfig(weights=path, short_side_px=96), device=torch.device("cpu"))
    (found,) = extractor.extract([np.zeros((60, 100, 3), np.uint8)])
    grid = extractor.patch_grid(60, 100)
    assert found.shape == (6, 10, 384) == (grid.rows, grid.cols, extractor.dim)
    assert grid.origin_px == (5.0, 5.0) and "timm" in (tmp_path / "README.md").read_text()
