"""Masks: how they are read, what is refused, and a decoder that learns what features tell."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco import segmentation
from f3rm_ext.moco.encoder import make_backbone
from f3rm_ext.moco.evaluation import fine_tune
from f3rm_ext.moco.weights import export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixteen pictures whose left part is red and the rest blue; the part's masks are 7 and 3, and 255 at the top."""
    random = np.random.default_rng(0)
    for name in ("pictures", "masks"):
        (tmp_path / name / "sub").mkdir(parents=True)
    for number in range(16):
        picture, mask = np.zeros((64, 80, 3), np.uint8), np.full((64, 80), 3, np.uint8)
        edge = int(random.integers(24, 56))
        picture[:, :edge, 0], picture[:, edge:, 2] = 200, 200
        mask[:, :edge], mask[:4] = 7, 255
        Image.fromarray(picture).save(tmp_path / "pictures" / "sub" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / "sub" / f"{number}.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "pictures" / "without.png")
    return tmp_path


def test_masks_are_cut_as_their_pictures(folder: Path) -> None:
    data = segmentation.read_masked(folder / "pictures", folder / "masks", 32)
    assert data.images.shape == (16, 32, 32, 3) and data.classes == [3, 7]
    red = data.images[:, 8:, :, 0] > 100
    assert (red == (data.masks[:, 8:] == 7)).mean() > 0.98
    assert (data.masks[:, 0] == 255).all()


def test_a_decoder_tells_what_features_tell(folder: Path) -> None:
    data = segmentation.read_masked(folder / "pictures", folder / "masks", 64)
    torch.manual_seed(0)
    facts = {"algorithm": "v3", "architecture": "resnet18", "image_size": 64, "step": 0}
    weights = export(make_backbone("resnet18", 64), folder, facts)
    calls = []
    scores = segmentation.evaluate_masks(data, weights, 1, 40, done=lambda: calls.append(None))
    assert list(scores) == ["pre-trained", "random weights"] and len(calls) == 2
    assert all(score["mean_iou"][0] > 0.7 for score in scores.values())  # one class is 0.25


def test_masks_are_flipped_with_their_pictures_while_all_is_trained(folder: Path) -> None:
    data = segmentation.read_masked(folder / "pictures", folder / "masks", 64)
    labels = torch.from_numpy(np.select([data.masks == 3, data.masks == 7], [0, 1], -1))
    train, test = torch.arange(16).tensor_split(2)
    network = torch.nn.Conv2d(3, 8, 1)
    head = partial(torch.nn.Conv2d, 8, 2, 1)
    predicted = fine_tune(network, head, data.images, labels, train, test, 400, 0)
    assert segmentation.mean_iou(predicted, labels[test], 2) > 0.97


def test_fine_tuned_scores_stand_beside_frozen_ones(folder: Path) -> None:
    data = segmentation.read_masked(folder / "pictures", folder / "masks", 32)
    facts = {"algorithm": "v3", "architecture": "resnet18", "image_size": 32, "step": 0}
    weights = export(make_backbone("resnet18", 32), folder, facts)
    for score in segmentation.evaluate_masks(data, weights, 2, 1, fine_tune_passes=1).values():
        assert len(score["mean_iou"]) == len(score["fine_tuned"]) == 2 and score["mean_iou"] != score["fine_tuned"]


def test_patches_of_a_vit_are_features_too() -> None:
    maps = segmentation.dense_features(make_backbone("vit_small", 32), np.zeros((2, 48, 48, 3), np.uint8))
    assert maps.shape == (2, 384, 3, 3)


def test_masks_that_cannot_be_used_are_refused(folder: Path) -> None:
    pictures, masks = folder / "pictures", folder / "masks"
    with pytest.raises(ConfigError, match=r"0 .*mask"):
        segmentation.read_masked(pictures, folder / "absent", 32)
    for number in range(16):
        Image.new("L", (80, 64), 3).save(masks / "sub" / f"{number}.png")
    with pytest.raises(ConfigError, match="one class"):
        segmentation.read_masked(pictures, masks, 32)
    Image.new("L", (40, 64)).save(masks / "sub" / "3.png")
    with pytest.raises(ConfigError, match=r"3\.png.*40 x 64"):
        segmentation.read_masked(pictures, masks, 32)
