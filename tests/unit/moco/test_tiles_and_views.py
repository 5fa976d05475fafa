"""Pictures as tiles, the files that are left out, and views that depend on seed, pass and picture alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.tiles import prepare, read_tile
from f3rm_ext.moco.views import Batches, PairsOfViews, Views, batches_of_views


def test_tiles_are_decoded_once(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = prepare(pictures, tmp_path, 32)
    array = tiles.open()
    assert array.shape == (20, 40, 40, 3) and not tiles.skipped
    np.testing.assert_array_equal(array[3], np.asarray(Image.open(pictures / "03.png")))
    monkeypatch.setattr("f3rm_ext.moco.tiles._decode", None)
    assert prepare(pictures, tmp_path, 32) == tiles


def test_unreadable_files_are_left_out_and_listed(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    whole = (pictures / "00.png").read_bytes()
    (folder / "a.png").write_bytes(whole)
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.jpg").write_text("no picture")
    Image.fromarray(np.full((40, 40), np.nan, np.float32)).save(folder / "nan.tif")
    tiles = prepare(folder, tmp_path, 32)
    assert tiles.files == ("a.png",) and set(tiles.skipped) == {"cut.png", "text.jpg", "nan.tif"}
    assert tiles.open().shape[0] == 1


def test_grey_and_16_bit_pictures_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.full((40, 60), 51_400, np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(np.full((40, 60), 100, np.uint8)).save(tmp_path / "grey.png")
    assert np.unique(read_tile(tmp_path / "deep.png", 32)).tolist() == [200]
    assert np.unique(read_tile(tmp_path / "grey.png", 32)).tolist() == [100]


def test_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pictures"):
        prepare(tmp_path, tmp_path, 32)
    with pytest.raises(ConfigError, match="no folder"):
        prepare(tmp_path / "absent", tmp_path, 32)


def test_views_depend_on_seed_pass_and_picture_alone(pictures: Path, tmp_path: Path) -> None:
    tiles = prepare(pictures, tmp_path, 32)
    one, two = (PairsOfViews(tiles, Views(32), seed=0) for _ in range(2))
    two[(0, 5)]
    torch.rand(7)
    first, second, number = one[(1, 3)]
    again = two[(1, 3)]
    assert torch.equal(first, again[0]) and torch.equal(second, again[1]) and number == 3
    assert first.shape == (3, 32, 32) and not torch.equal(first, second)
    assert not torch.equal(first, one[(2, 3)][0])
    assert not torch.equal(first, PairsOfViews(tiles, Views(32), seed=1)[(1, 3)][0])


def test_every_pass_has_each_picture_once_and_can_begin_anywhere() -> None:
    whole = iter(Batches(20, 6, seed=0, first=0))
    batches = [next(whole) for _ in range(9)]
    for epoch in range(3):
        numbers = [number for batch in batches[3 * epoch : 3 * epoch + 3] for _, number in batch]
        assert len(set(numbers)) == 18
    later = iter(Batches(20, 6, seed=0, first=4))
    assert [next(later) for _ in range(5)] == batches[4:]


def test_loader_processes_change_nothing(pictures: Path, tmp_path: Path) -> None:
    tiles = prepare(pictures, tmp_path, 32)
    here, there = (
        next(batches_of_views(tiles, Views(32), batch_size=4, seed=0, first=1, workers=workers)) for workers in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
