"""Pictures as tiles, the files that are left out, and views that depend on seed, pass and picture alone."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN as MEAN
from f3rm_ext.features.extractors.preprocess import IMAGENET_STD as STD
from f3rm_ext.moco.pictures import PictureOptions, read_tiles
from f3rm_ext.moco.tiles import prepare
from f3rm_ext.moco.views import (
    BatchSampler,
    ViewPairs,
    Views,
    _jitter_colors,
    load_batches,
    make_views,
)

CPU = torch.device("cpu")


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
    assert np.unique(read_tiles(tmp_path / "deep.png", 32, PictureOptions())[""]).tolist() == [200]
    assert np.unique(read_tiles(tmp_path / "grey.png", 32, PictureOptions())[""]).tolist() == [100]


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_deep_colour_pictures_have_a_white_level(tmp_path: Path, suffix: str) -> None:
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / f"deep{suffix}"
    cv2.imwrite(str(path), np.full((40, 60, 3), (900, 1500, 3000), np.uint16))  # blue first
    tile = read_tiles(path, 32, PictureOptions(white=3000))[""]
    assert tile[0, 0].tolist() == [255, 127, 76]


@pytest.mark.parametrize("planar", [False, True])
def test_three_bands_of_many_are_read(planar: bool, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    values = np.stack([np.full((40, 40), 1000 * band, np.uint16) for band in range(1, 6)], axis=0 if planar else -1)
    path = tmp_path / "many.tif"
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate" if planar else "contig")
    (tile,) = read_tiles(path, 32, PictureOptions(bands=(4, 3, 1), white=5000)).values()
    assert tile[0, 0].tolist() == [204, 153, 51]
    with pytest.raises(ValueError, match=r"--bands .* 6"):
        read_tiles(path, 32, PictureOptions(bands=(6, 1, 2)))
    with pytest.raises(ConfigError, match=r"many\.tif.* 5 bands.*--bands"):
        prepare(tmp_path, tmp_path / "cache", 32)


def test_large_pictures_are_cut_into_tiles(tmp_path: Path) -> None:
    picture = np.zeros((90, 130, 3), np.uint8)
    picture[40:80, 80:120] = 200
    Image.fromarray(picture).save(tmp_path / "large.png")
    Image.new("RGB", (20, 20)).save(tmp_path / "small.png")
    tiles = prepare(tmp_path, tmp_path / "cache", 32, PictureOptions(tile_px=40))
    assert len(tiles) == 6 and tiles.files[5] == "large.png [row 1, column 2]"
    assert [int(tile.max()) for tile in tiles.open()] == [0, 0, 0, 0, 0, 200]
    assert "40 px" in tiles.skipped["small.png"]
    assert prepare(tmp_path, tmp_path / "cache", 32).fingerprint != tiles.fingerprint
    with pytest.raises(ConfigError, match="--tile-px is 8"):
        PictureOptions(tile_px=8)


def test_tiff_files_of_colours_and_damaged_ones_need_no_bands(tmp_path: Path) -> None:
    Image.new("RGBA", (40, 40), (10, 20, 30, 255)).save(tmp_path / "four.tif")
    (tmp_path / "damaged.tif").write_bytes(b"no picture")
    tiles = prepare(tmp_path, tmp_path / "cache", 32)
    assert tiles.open()[0, 0, 0].tolist() == [10, 20, 30] and set(tiles.skipped) == {"damaged.tif"}


@pytest.mark.parametrize(("tag", "value", "bands"), [("RowsPerStrip", 0, (3, 2, 1)), ("ImageLength", (8, 8), None)])
def test_rasters_with_senseless_tags_are_left_out(
    tag: str, value: Any, bands: tuple[int, int, int] | None, pictures: Path, tmp_path: Path
) -> None:
    tifffile = pytest.importorskip("tifffile")
    (tmp_path / "a.png").write_bytes((pictures / "00.png").read_bytes())
    values = np.zeros((40, 40, 3), np.uint8)
    tifffile.imwrite(tmp_path / "b.tif", values, photometric="rgb", compression="zlib", metadata=None)
    with tifffile.TiffFile(tmp_path / "b.tif", mode="r+b") as file:
        file.pages.first.tags[tag].overwrite(value)
    tiles = prepare(tmp_path, tmp_path / "cache", 32, PictureOptions(bands=bands))
    assert tiles.files == ("a.png",) and set(tiles.skipped) == {"b.tif"}


def test_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=str(folder)):
            prepare(folder, tmp_path, 32)


def test_views_depend_on_seed_pass_and_picture_alone(pictures: Path, tmp_path: Path) -> None:
    tiles = prepare(pictures, tmp_path, 32)
    one, two = (ViewPairs(tiles, (Views(32), Views(32)), seed=0) for _ in range(2))
    two.__getitems__([(0, 5)])
    torch.rand(7)
    first, second, numbers = one.__getitems__([(1, 3), (1, 7)])
    again = two.__getitems__([(1, 2), (1, 3)])
    assert numbers.tolist() == [3, 7] and first.shape == (2, 3, 32, 32)
    torch.testing.assert_close(first[0], again[0][1])
    torch.testing.assert_close(second[0], again[1][1])
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], one.__getitems__([(2, 3)])[0][0])
    other = ViewPairs(tiles, (Views(32), Views(32)), seed=1)
    assert not torch.equal(first[0], other.__getitems__([(1, 3)])[0][0])


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


def test_without_colours_a_view_has_the_colours_of_its_tile() -> None:
    tiles = torch.tensor([[200, 100, 50]] * 300, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, 40, 40)
    plain, colored = (
        Views(32, color_jitter)(tiles, generators(300)).mean(dim=(2, 3)) for color_jitter in (False, True)
    )
    wanted = (torch.tensor([200, 100, 50]) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(plain, wanted.expand(300, 3), atol=2e-2, rtol=0)
    assert colored.std(dim=0).min() > 0.2
    pixels = colored * torch.tensor(STD) + torch.tensor(MEAN)
    grey = ((pixels.max(dim=1).values - pixels.min(dim=1).values) < 0.02).float().mean()
    assert 0.04 < grey < 0.2


def test_colours_change_as_torchvision_changes_them() -> None:
    views = 0.3 + 0.3 * torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    views *= torch.tensor([1.0, 0.8, 0.6]).view(3, 1, 1)
    untouched = torch.tensor([[0.0, 0.5, 0.5, 0.5, 0.5, 1.0]])
    torch.testing.assert_close(_jitter_colors(views, untouched), views)
    strengths = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2}
    for column, (name, strength) in enumerate(strengths.items(), start=1):
        for draw in (0.1, 0.8):
            draws = untouched.clone()
            draws[0, column] = draw
            wanted = getattr(functional, f"adjust_{name}")(views, 1 + strength * (2 * draw - 1))
            torch.testing.assert_close(_jitter_colors(views, draws), wanted, atol=1e-3, rtol=0, msg=name)
    grey = torch.cat([untouched[:, :5], torch.zeros(1, 1)], dim=1)
    wanted = functional.rgb_to_grayscale(views, num_output_channels=3)
    torch.testing.assert_close(_jitter_colors(views, grey), wanted, atol=1e-3, rtol=0)


def test_crops_show_parts_in_all_symmetries_of_a_square() -> None:
    size = 32
    ramp = torch.arange(64, dtype=torch.uint8) * 3
    tile = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.full((64, 64), 90).byte()])
    views = Views(size, color_jitter=False, blurred=0.0)(tile.expand(400, -1, -1, -1), generators(400))
    pixels = (views * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None])[:, :2]
    across = (pixels[..., -4:].mean(dim=(2, 3)) - pixels[..., :4].mean(dim=(2, 3))).round(decimals=1)
    assert (across[:, 0].abs() > 0.1).float().mean() == pytest.approx(0.5, abs=0.1)  # the rest are turned aside
    for channel in range(2):
        assert (across[:, channel] > 0).float().mean() == pytest.approx(0.25, abs=0.08)
    spans = across.abs().max(dim=1).values / (28 / 32 * 63 * 3 / 255)
    assert 0.3 < spans.min() < 0.55 and spans.max() <= 1.15


def test_training_on_the_cpu_of_a_machine_with_a_gpu_leaves_the_gpu_alone(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tiles = prepare(pictures, tmp_path, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory to be pinned for a GPU that it does not find
        next(load_batches(tiles, make_views(32, True, True), CPU, batch_size=4, seed=0, first=0, workers=0))


def test_views_of_v3_differ_in_blur_and_solarization() -> None:
    random = torch.randint(256, (64, 3, 40, 40), dtype=torch.uint8, generator=generators(1)[0])
    one, two = (views(random, generators(64)) for views in make_views(32, False, symmetric=False))
    rough = [views.diff(dim=3).abs().mean(dim=(1, 2, 3)).median().item() for views in (one, two)]
    assert rough[0] < 0.7 * rough[1]
    same = make_views(32, True, symmetric=True)
    assert same[0] is same[1]


def test_every_pass_has_each_picture_once_and_can_begin_anywhere() -> None:
    whole = iter(BatchSampler(20, 6, seed=0, first=0))
    batches = [next(whole) for _ in range(9)]
    for epoch in range(3):
        numbers = [number for batch in batches[3 * epoch : 3 * epoch + 3] for _, number in batch]
        assert len(set(numbers)) == 18
    later = iter(BatchSampler(20, 6, seed=0, first=4))
    assert [next(later) for _ in range(5)] == batches[4:]


def test_loader_processes_change_nothing(pictures: Path, tmp_path: Path) -> None:
    tiles = prepare(pictures, tmp_path, 32)
    here, there = (
        next(load_batches(tiles, make_views(32, True, True), CPU, batch_size=4, seed=0, first=1, workers=workers))
        for workers in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
