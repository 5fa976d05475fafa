"""Label images as features."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import CaptureError, ExtractorError
from f3rm_ext.features.base import Extractor, FileExtractor, TextExtractor
from f3rm_ext.features.extractors.labels import LabelsExtractor
from f3rm_ext.features.extractors.registry import build_extractor

CPU = torch.device("cpu")
LABELS = np.array([[0, 0, 1, 1], [0, 2, 1, 1]], dtype=np.uint8)
PHOTO = np.zeros((2, 4, 3), np.uint8)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Photos a and b, of which a has labels."""
    for name in ("a", "b"):
        Image.fromarray(PHOTO).save(tmp_path / f"{name}.png")
    Image.fromarray(LABELS).save(tmp_path / "labels.png")
    frames = [{"file_path": "a.png", "label_file_path": "labels.png"}, {"file_path": "b.png"}]
    (tmp_path / "transforms.json").write_text(json.dumps({"classes": ["nothing", "Cup", "hat"], "frames": frames}))
    return tmp_path


def build(capture: Path) -> LabelsExtractor:
    extractor = build_extractor(f"labels:data={capture}", device=CPU)
    assert isinstance(extractor, LabelsExtractor)
    return extractor


def test_it_keeps_the_contracts(capture: Path) -> None:
    extractor = build(capture)
    assert isinstance(extractor, Extractor) and isinstance(extractor, FileExtractor)
    assert isinstance(extractor, TextExtractor)
    grid = extractor.patch_grid(2, 4)
    assert (grid.rows, grid.cols, grid.origin_px, grid.stride_px) == (2, 4, (0.5, 0.5), (1.0, 1.0))
    assert extractor.dim == 3 and extractor.batch_size == 1


def test_features_are_one_hot_labels(capture: Path) -> None:
    (found,) = build(capture).extract_files([PHOTO], [capture / "a.png"])
    assert found.shape == (2, 4, 3) and found.dtype == torch.float32
    torch.testing.assert_close(found, torch.eye(3)[torch.from_numpy(LABELS.astype(np.int64))])


def test_at_half_size_they_are_shares(capture: Path) -> None:
    (found,) = build(capture).extract_files([PHOTO[:1, :2]], [capture / "a.png"])
    torch.testing.assert_close(found, torch.tensor([[[0.75, 0.0, 0.25], [0.0, 1.0, 0.0]]]))


def test_at_another_ratio_they_still_sum_to_one(capture: Path) -> None:
    for height, width in ((1, 3), (3, 7), (4, 8)):
        (found,) = build(capture).extract_files([np.zeros((height, width, 3), np.uint8)], [capture / "a.png"])
        assert found.shape == (height, width, 3)
        torch.testing.assert_close(found.sum(dim=2), torch.ones(height, width))


def test_texts_are_names_of_classes(capture: Path) -> None:
    found = build(capture).encode_text(["hat", "cup", "CUP", "things"])
    torch.testing.assert_close(found[:3], torch.eye(3)[[2, 1, 1]])
    torch.testing.assert_close(found[3], torch.full((3,), 3**-0.5))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))


def test_photos_without_labels_are_refused(capture: Path) -> None:
    with pytest.raises(ExtractorError, match=r"b\.png.*transforms\.json"):
        build(capture).extract_files([PHOTO], [capture / "b.png"])
    with pytest.raises(ExtractorError, match="without a file"):
        build(capture).extract([PHOTO])


def test_labels_without_a_name_are_refused(capture: Path) -> None:
    Image.fromarray(LABELS + 1).save(capture / "labels.png")
    with pytest.raises(ExtractorError, match=r"a\.png .*label 3"):
        build(capture).extract_files([PHOTO], [capture / "a.png"])


def test_label_files_that_are_no_label_images(capture: Path) -> None:
    Image.fromarray(PHOTO).save(capture / "labels.png")
    with pytest.raises(CaptureError, match=r"labels\.png.*3"):
        build(capture).extract_files([PHOTO], [capture / "a.png"])


def test_captures_without_labels_are_refused(capture: Path, tmp_path: Path) -> None:
    (capture / "transforms.json").write_text(json.dumps({"frames": [{"file_path": "a.png"}]}))
    for data in (capture, tmp_path / "nowhere"):
        with pytest.raises(ExtractorError, match="label_file_path"):
            build(data)


def test_other_labels_are_other_features(capture: Path) -> None:
    first = build(capture).identity
    assert build(capture).identity == first and first.extractor == "labels"
    Image.fromarray(LABELS[::-1].copy()).save(capture / "labels.png")
    changed = build(capture).identity
    assert changed.weights != first.weights and changed.key() != first.key()
    text = (capture / "transforms.json").read_text()
    (capture / "transforms.json").write_text(text.replace("hat", "cap"))
    assert build(capture).identity.weights != changed.weights


def test_the_labels_are_hashed_once(capture: Path, watch_calls: Callable[..., Any]) -> None:
    extractor = build(capture)
    first = extractor.identity
    reads = watch_calls(Path, "read_bytes")
    assert extractor.identity == first and not reads
