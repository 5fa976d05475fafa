"""Images of a data set: keys that follow pixels, and an index that only saves time."""

import json
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from f3rm_ext.features.store import images as images_module
from f3rm_ext.features.store.images import ImageIndex, ImageSet, blend_background, image_key, set_key

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def train(toy: ModuleType, tmp_path: Path) -> list[Path]:
    return toy.write_images(tmp_path / "train", 5)


def test_index_entry_counts_only_for_the_same_file(toy: ModuleType, tmp_path: Path, train: list[Path]) -> None:
    index = ImageIndex(tmp_path / "images.json")
    keys = ImageSet(toy.ToyDataset(train), index).keys()
    index.save()
    again = ImageSet(toy.ToyDataset(train), ImageIndex(index.path))
    assert again.known_keys() == keys
    stat = train[0].stat()
    os.utime(train[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert ImageSet(toy.ToyDataset(train), ImageIndex(index.path)).known_keys() == [None, *keys[1:]]
    scaled = toy.ToyDataset(train)
    scaled.scale_factor = 0.5
    assert ImageSet(scaled, ImageIndex(index.path)).known_keys() == [None] * 5


def test_index_keeps_what_another_process_added(tmp_path: Path) -> None:
    one, two = ImageIndex(tmp_path / "images.json"), ImageIndex(tmp_path / "images.json")
    one.set("a", (1, 1), "key-a")
    one.save()
    two.set("b", (2, 2), "key-b")
    two.save()
    three = ImageIndex(tmp_path / "images.json")
    assert (three.get("a", (1, 1)), three.get("b", (2, 2))) == ("key-a", "key-b")
    assert three.get("a", (1, 2)) is None


def test_index_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "_MAX_INDEX_ENTRIES", 3)
    index = ImageIndex(tmp_path / "images.json")
    for number in range(5):
        index.set(str(number), (1, 1), "key")
    index.save()
    assert list(json.loads(index.path.read_text())["entries"]) == ["2", "3", "4"]


def test_image_keys_follow_pixels_and_shape() -> None:
    flat = np.arange(48, dtype=np.uint8)
    keys = {image_key(flat.reshape(shape)) for shape in ((4, 4, 3), (2, 8, 3), (4, 3, 4), (3, 4, 4))}
    assert len(keys) == 4
    assert image_key(flat.reshape(4, 4, 3)) == image_key(np.asfortranarray(flat.reshape(4, 4, 3)))
    assert set_key(["b", "a", "a"]) == set_key(["a", "b"]) != set_key(["a"])


def test_transparent_pixels_are_laid_on_white() -> None:
    image = np.zeros((1, 3, 4), dtype=np.uint8)
    image[0, :, 0] = 200
    image[0, :, 3] = (0, 255, 51)
    assert blend_background(image).tolist() == [[[255, 255, 255], [200, 0, 0], [244, 204, 204]]]
