"""The example extractor with made-up weights: what it computes, and what it says when files are missing."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError
from f3rm_ext.features.extractors.registry import available_extractors, build_extractor

timm = pytest.importorskip("timm")
conse = pytest.importorskip("f3rm_ext_conse.extractor", reason="the package examples/extractor_conse is not installed")
vision = pytest.importorskip("f3rm_ext_conse.vision")

CPU = torch.device("cpu")
DIM = 5


class FakeSentences(conse.SentenceEncoder):
    """Embeds a text as the unit vector of its length, so that the test can tell which names were combined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode(self, sentences):
        return np.eye(DIM, dtype=np.float32)[[len(sentence) % DIM for sentence in sentences]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete weights folder with a random classifier; the text encoder is replaced."""
    torch.manual_seed(0)
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    # A random network is all but constant: a strong last layer makes its posteriors vary.
    torch.nn.init.normal_(network.classifier.weight, std=3.0)
    state = {f"other.{index}": tensor for index, tensor in enumerate(network.state_dict().values())}
    torch.save(state, tmp_path / conse.CLASSIFIER_FILE)
    names = ["x" * (index % 7) for index in range(1000)]
    (tmp_path / conse.CLASSES_FILE).write_text(json.dumps(names))
    (tmp_path / conse.TEXT_FOLDER).mkdir()
    for name in conse.FILES[2:]:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(conse, "SentenceEncoder", FakeSentences)
    monkeypatch.delenv(conse.WEIGHTS_VARIABLE, raising=False)
    return tmp_path


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_registered_by_entry_point() -> None:
    info = available_extractors()["conse"]
    assert not info.broken
    assert info.provider == "f3rm-ext-conse"
    assert "without CLIP" in info.description


def test_features_are_convex_combinations_of_class_embeddings(folder: Path) -> None:
    extractor = conse.ConseExtractor(conse.ConseConfig(weights=folder, short_side_px=64, top_classes=3), device=CPU)
    (features,) = extractor.extract([noise(64, 96)])
    assert features.shape == (2, 3, DIM)
    assert features.dtype == torch.float32
    # Embeddings are unit vectors along the axes: the shares are the coordinates and sum to one.
    assert features.min() >= 0
    torch.testing.assert_close(features.sum(dim=-1), torch.ones(2, 3))

    pixels = torch.from_numpy(noise(64, 96)).permute(2, 0, 1)[None].float() / 255
    posteriors = vision.DenseClassifier(folder / conse.CLASSIFIER_FILE, CPU).posteriors(pixels)[0]
    names = json.loads((folder / conse.CLASSES_FILE).read_text())
    for row, col in np.ndindex(2, 3):
        top = posteriors[row, col].argsort(descending=True)[:3]
        expected = torch.zeros(DIM)
        for index in top.tolist():
            expected[len(names[index]) % DIM] += posteriors[row, col, index] / posteriors[row, col, top].sum()
        torch.testing.assert_close(features[row, col], expected, atol=1e-5, rtol=1e-4)


def test_dense_posteriors_agree_with_the_classifier_where_there_is_one_location(folder: Path) -> None:
    classifier = vision.DenseClassifier(folder / conse.CLASSIFIER_FILE, CPU)
    pixels = torch.rand(2, 3, vision.STRIDE_PX, vision.STRIDE_PX)
    dense = classifier.posteriors(pixels)
    assert dense.shape == (2, 1, 1, 1000)
    pooled = classifier._network((pixels * 255 - 127) / 128).softmax(dim=-1)
    torch.testing.assert_close(dense[:, 0, 0], pooled)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (100, 333), (480, 300)])
def test_grid_tiles_the_image(folder: Path, height: int, width: int) -> None:
    extractor = conse.ConseExtractor(conse.ConseConfig(weights=folder, short_side_px=96), device=CPU)
    grid = extractor.patch_grid(height, width)
    (features,) = extractor.extract([noise(height, width)])
    assert features.shape == (grid.rows, grid.cols, extractor.dim)
    assert grid.rows * grid.stride_px[0] == pytest.approx(height)
    assert grid.cols * grid.stride_px[1] == pytest.approx(width)


def test_identity_changes_with_weights_and_options(folder: Path) -> None:
    config = conse.ConseConfig(weights=folder)
    first = conse.ConseExtractor(config, device=CPU).identity
    other = dataclasses.replace(config, top_classes=4)
    assert conse.ConseExtractor(other, device=CPU).identity.key() != first.key()
    (folder / conse.CLASSES_FILE).write_text(json.dumps(["cat"] * 1000))
    assert conse.ConseExtractor(config, device=CPU).identity.weights != first.weights


def test_weights_folder_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_extractors()["conse"].weights_status().missing
    with pytest.raises(WeightsNotFoundError, match=conse.WEIGHTS_VARIABLE):
        build_extractor("conse", device=CPU)
    monkeypatch.setenv(conse.WEIGHTS_VARIABLE, str(folder))
    assert available_extractors()["conse"].weights_status().path == folder
    assert build_extractor("conse", device=CPU).dim == DIM


def test_incomplete_folder_names_the_missing_file(folder: Path) -> None:
    (folder / conse.CLASSES_FILE).unlink()
    with pytest.raises(WeightsNotFoundError, match=conse.CLASSES_FILE):
        build_extractor(f"conse:weights={folder}", device=CPU)


def test_other_network_is_refused(folder: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, folder / conse.CLASSIFIER_FILE)
    extractor = build_extractor(f"conse:weights={folder}", device=CPU)
    with pytest.raises(ExtractorError, match="EfficientNet-lite0"):
        extractor.extract([noise(64, 64)])


@pytest.mark.parametrize("option", ["short_side_px=31", "top_classes=0", "top_classes=1001"])
def test_options_out_of_range(folder: Path, option: str) -> None:
    with pytest.raises(ExtractorError, match=option.partition("=")[0]):
        build_extractor(f"conse:weights={folder},{option}", device=CPU)
