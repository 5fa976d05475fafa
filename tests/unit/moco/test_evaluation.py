"""Probes against scikit-learn and by hand, histograms, halves and intervals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.daisy import DaisyConfig, DaisyExtractor
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN, IMAGENET_STD
from f3rm_ext.moco import evaluation


def clusters(seed: int, classes: int = 3, each: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.eye(classes, 8) * 2
    labels = torch.arange(classes).repeat_interleave(each)
    return centres[labels] + torch.randn(len(labels), 8, generator=generator), labels


def test_linear_probe_is_that_of_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    (train, labels), (test, _) = clusters(0), clusters(1)
    found = evaluation.linear_probe(train, labels, test, 1e-3)
    mean, std = train.mean(dim=0), train.std(dim=0)
    peer = linear_model.LogisticRegression(C=1 / (2e-3 * len(train)), max_iter=1000)  # the same penalty
    peer.fit(((train - mean) / std).numpy(), labels.numpy())
    np.testing.assert_array_equal(found.numpy(), peer.predict(((test - mean) / std).numpy()))


def test_nearest_neighbours_vote_by_similarity() -> None:
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    labels = torch.tensor([0, 1, 1])
    found = evaluation.nearest_neighbours(train, labels, torch.tensor([[5.0, 0.1], [0.1, 3.0]]), count=2)
    assert found.tolist() == [0, 1]


def test_histograms_count_colours() -> None:
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images[1, :2] = (255, 0, 40)
    found = evaluation.color_histograms(images)
    assert found[0, 0] == 1 and found[0].sum() == 1
    assert found[1, 0].item() == found[1, 7 * 64 + 1].item() == pytest.approx(0.5**0.5)


def test_daisy_is_the_mean_and_the_spread_over_each_picture() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    found = evaluation.daisy_features(images)
    extractor = DaisyExtractor(DaisyConfig(), device=torch.device("cpu"))
    for image, row in zip(images, found.double().numpy(), strict=True):
        values = np.asarray(extractor.extract([image])[0], np.float64).reshape(-1, len(row) // 2)
        expected = np.concatenate([values.mean(axis=0), values.std(axis=0, ddof=1)])
        np.testing.assert_allclose(row, expected, atol=1e-4)


def test_a_backbone_takes_what_imagenet_gave_it() -> None:
    images = np.array([[(0, 0, 0), (255, 0, 51)]], np.uint8)[None]
    images = np.concatenate([images, images], axis=1)
    expected = (images / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    np.testing.assert_allclose(evaluation.normalize_images(images).permute(0, 2, 3, 1), expected, atol=1e-5)


def test_halves_share_nothing_and_hold_every_class() -> None:
    labels = torch.arange(4).repeat_interleave(7)
    train, test = evaluation.split_classes(labels, 0)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(28))
    assert labels[train].bincount().tolist() == [3] * 4
    assert not torch.equal(train, evaluation.split_classes(labels, 1)[0])


def test_folders_without_classes_are_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no classes"):
        evaluation.read_labelled(pictures, 32)
    for name, count in (("a", 5), ("b", 2)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (40, 40)).save(tmp_path / name / f"{number}.png")
    with pytest.raises(ConfigError, match="class b"):
        evaluation.read_labelled(tmp_path, 32)
    (tmp_path / "no.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"no\.safetensors"):
        evaluation.open_backbone(tmp_path / "no.safetensors")


def test_imagenet_weights_with_other_names_are_read_in_order(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save(state, tmp_path / "timm.pth")
    torch.save({f"_{name}": value for name, value in state.items()}, tmp_path / "other.pth")
    torch.save(dict(list(state.items())[:-1]), tmp_path / "part.pth")
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    found = [evaluation.imagenet_features(tmp_path / name, images) for name in ("timm.pth", "other.pth")]
    assert torch.equal(*found) and found[0].std() > 0
    with pytest.raises(ConfigError, match="EfficientNet-lite0"):
        evaluation.imagenet_features(tmp_path / "part.pth", images)
