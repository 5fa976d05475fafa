"""Photos in every state people have them in become upright 8-bit JPEG or PNG files."""

import io
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.photos import capture_names, find_masks, find_photos, read_mask, read_photo


def picture(width: int = 40, height: int = 20) -> Image.Image:
    """Red on the left, blue on the right, a white corner at the top left."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = pixels[:, width // 2 :, 2] = 255
    pixels[: height // 4, : width // 8] = 255
    return Image.fromarray(pixels)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_photos_come_in_natural_order_and_other_files_are_ignored(tmp_path: Path) -> None:
    for name, words in (("a.txt", r"\.jpeg"), ("a.NEF", "raw")):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CaptureError, match=words):
            find_photos(tmp_path)
    for name in ("b/2.jpg", "b/10.jpg", "a.PNG", "notes.txt", ".hidden.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find_photos(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.PNG", "b/2.jpg", "b/10.jpg"]
    (tmp_path / "b").rename(tmp_path / ".elsewhere")
    (tmp_path / "b").symlink_to(".elsewhere")
    (tmp_path / ".elsewhere" / "around").symlink_to(tmp_path)
    assert find_photos(tmp_path) == found
    (tmp_path / "3²4.jpg").write_bytes(b"")  # a digit, but no decimal one
    assert find_photos(tmp_path)[0].name == "3²4.jpg"
    paths = [Path("in") / name for name in ("été 1.jpg", "été_1.png", "x/été 1.jpg", "日本.jpg")]
    assert capture_names(paths, Path("in")) == ["été_1", "été_1_2", "x_été_1", "日本"]


def test_what_captures_have_beside_their_photos_is_left_out(tmp_path: Path) -> None:
    sizes = {"images/a.jpg": (40, 21), "images_2/a.jpg": (20, 10), "images_4/a.jpg": (10, 5), "images_4/b.jpg": (10, 5),
             "images_8/a.jpg": (40, 21), "cam_1/a.jpg": (40, 20), "cam_2/a.jpg": (20, 10)}  # fmt: skip
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(*size).save(tmp_path / name)
    others = "answer/mug.png", "demo/eval/a.png", "demo/posed/images/a.jpg", "posed/images/a.jpg", ".thumbnails/a.jpg"
    for name in ("depth/a.png", "Confidence/a.png", "masks/cam_1/a.png", "masks/cam_2/a.png", "corrected_images/a.jpg",
                 *others):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        picture(40, 21).save(tmp_path / name)
    for name, record in (
        ("answer/summary.json", {"made_by": "f3rm-ext query"}),
        ("demo/manifest.json", {"made_by": "f3rm-ext demo"}),
        ("posed/sfm.json", {"made_by": "f3rm-ext sfm process"}),
        ("cam_1/manifest.json", {"serial": 1}),
    ):
        (tmp_path / name).write_text(json.dumps(record))
    said: list[str] = []
    found = [path.relative_to(tmp_path).as_posix() for path in find_photos(tmp_path, said.append)]
    assert found == ["cam_1/a.jpg", "cam_2/a.jpg", "images/a.jpg", "images_4/b.jpg", "images_8/a.jpg"]
    assert re.findall(r"(\d+) in (\w+)", said[0]) == [
        *(("1", "Confidence"), ("1", "answer"), ("1", "corrected_images"), ("2", "demo"), ("1", "depth")),
        *(("1", "images_2"), ("1", "images_4"), ("2", "masks"), ("1", "posed")),
    ]
    assert len(find_photos(tmp_path / "images_2")) == 1, "unless their folder is named"
    assert len(find_photos(tmp_path / "masks")) == 2
    for name in ("images", "images_2", "images_4", "images_8", "cam_1", "cam_2"):
        shutil.rmtree(tmp_path / name)
    assert len(find_photos(tmp_path)) == 9, "or there is nothing else"


def test_a_file_that_can_be_used_keeps_its_bytes(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.jpg", quality=80)
    photo = read_photo(tmp_path / "a.jpg")
    assert photo.data == (tmp_path / "a.jpg").read_bytes() and photo.suffix == ".jpg" and not photo.turned


def test_a_portrait_photo_is_turned_upright_and_keeps_its_focal_length(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274], exif[271], exif[272] = 6, "Maker", "Model"
    exif.get_ifd(0x8769)[41989] = 28
    picture().save(tmp_path / "a.jpg", quality=95, subsampling=0, exif=exif)
    photo = read_photo(tmp_path / "a.jpg")
    assert photo.turned and (photo.width, photo.height) == (20, 40) and photo.stored_size == (40, 20)
    image = opened(photo.data)
    assert image.size == (20, 40) and image.getexif()[274] == 1 and image.getexif().get_ifd(0x8769)[41989] == 28
    top, bottom = np.asarray(image)[10, 5], np.asarray(image)[35, 5]
    assert top[0] > 200 > 50 > top[2] and bottom[2] > 200 > 50 > bottom[0]
    assert photo.camera == "Maker Model 28 20x40"


def test_details_of_a_turned_photo_that_cannot_be_written_are_left_out(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274], exif[256], exif.get_ifd(0x8769)[41989] = 6, 40, 28
    data = exif.tobytes()
    entry = struct.pack(">HHII", 256, 4, 1, 40)  # the width as a LONG, which becomes an ASCII text
    assert data.count(entry) == 1
    picture().save(tmp_path / "a.jpg", exif=data.replace(entry, struct.pack(">HHI4s", 256, 2, 4, b"100\0")))
    image = opened(read_photo(tmp_path / "a.jpg").data)
    assert image.size == (20, 40) and image.getexif()[274] == 1 and image.getexif().get_ifd(0x8769)[41989] == 28


@pytest.mark.parametrize(
    ("changes", "size", "focal_px"),
    [
        ({}, (1000, 500), 1250.0),
        ({}, (500, 1000), 1250.0),  # turned upright
        ({41488: 3}, (1000, 500), 50 * 25.0),
        ({}, (4000, 2000), None),  # COLMAP reads it right
        ({}, (1000, 1000), None),  # cropped
        ({41989: 45}, (1000, 500), None),  # which COLMAP prefers, and does not depend on the size
        ({41486: None}, (1000, 500), None),
        ({40962: 0, 40963: 0}, (1000, 500), None),
    ],
)
def test_the_focal_length_of_a_reduced_photo(
    tmp_path: Path, changes: dict[int, Any], size: tuple[int, int], focal_px: float | None
) -> None:
    """50 mm at 100 px per mm, of 4000 x 2000 px once."""
    unit = changes.get(41488, 2)
    tags = {37386: 50.0, 41486: {2: 2540.0, 3: 1000.0}[unit], 41488: unit, 40962: 4000, 40963: 2000, **changes}
    exif = Image.Exif()
    exif.get_ifd(0x8769).update({tag: value for tag, value in tags.items() if value is not None})
    Image.new("RGB", size).save(tmp_path / "a.jpg", exif=exif)
    assert read_photo(tmp_path / "a.jpg").focal_px == focal_px


@pytest.mark.parametrize(
    ("mode", "suffix", "expected"),
    [("L", ".png", "L"), ("1", ".png", "L"), ("P", ".png", "RGB"), ("LA", ".png", "RGBA"), ("CMYK", ".tif", "RGB"),
     ("I;16", ".png", "L"), ("F", ".tif", "L"), ("RGB", ".bmp", "RGB"), ("RGB", ".webp", "RGB")],
)  # fmt: skip
def test_every_mode_becomes_eight_bits(tmp_path: Path, mode: str, suffix: str, expected: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.asarray(picture().convert("L")).astype(np.uint16) * 257)
    else:
        image = picture().convert(mode)
    image.save(tmp_path / f"a{suffix}")
    photo = read_photo(tmp_path / f"a{suffix}")
    found = opened(photo.data)
    assert found.mode == expected and found.format in ("PNG", "JPEG")
    if expected == "L" and mode != "1":  # levels stay
        assert np.abs(np.asarray(found).astype(int) - np.asarray(picture().convert("L"))).max() <= 1


def test_transparent_pixels_are_known(tmp_path: Path) -> None:
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(40) < 10, 0, 255).astype(np.uint8)[None].repeat(20, 0)))
    image.save(tmp_path / "a.png")
    photo = read_photo(tmp_path / "a.png")
    assert photo.alpha is not None and photo.alpha[:, 10:].all() and not photo.alpha[:, :10].any()


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    picture(400, 300).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:700] if content is None else content)
    with pytest.raises(CaptureError, match=r"a\.jpg"):
        read_photo(tmp_path / "a.jpg")


def test_heic_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    (tmp_path / "a.heic").write_bytes(b"")
    with pytest.raises(CaptureError, match="pillow-heif"):
        read_photo(tmp_path / "a.heic")


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_found_by_name_with_either_suffix(tmp_path: Path) -> None:
    photos = [tmp_path / "in" / name for name in ("a.jpg", "sub/b.jpg")]
    for name in ("a.png", "sub/b.jpg.png"):
        (tmp_path / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "masks" / name).write_bytes(b"")
    found = find_masks(tmp_path / "masks", photos, tmp_path / "in")
    assert [found[photo].name for photo in photos] == ["a.png", "b.jpg.png"]
    with pytest.raises(CaptureError, match=r"1 of 3.*c\.jpg"):
        find_masks(tmp_path / "masks", [*photos, tmp_path / "in" / "c.jpg"], tmp_path / "in")


@pytest.mark.parametrize(
    ("orientation", "upright", "width"),
    [(1, False, 40), (3, False, 40), (6, False, 40), (6, True, 40), (5, True, 20), (6, True, 20)],
)
def test_a_mask_follows_its_photo(tmp_path: Path, orientation: int, upright: bool, width: int) -> None:
    """The mask of a square photo on its side, whose size does not tell, is taken as upright."""
    exif = Image.Exif()
    exif[274] = orientation
    stored = picture(width)
    stored.save(tmp_path / "a.jpg", quality=95, subsampling=0, exif=exif)
    photo = read_photo(tmp_path / "a.jpg", max_size=20)
    red = Image.fromarray(np.where(np.asarray(stored)[..., 0] > 128, 255, 0).astype(np.uint8))
    if upright:  # what a segmentation of the upright photo would give
        red = red.transpose(Image.Transpose.TRANSPOSE if orientation == 5 else Image.Transpose.ROTATE_270)
    red.save(tmp_path / "a.png")
    mask = read_mask(tmp_path / "a.png", tmp_path / "a.jpg", photo)
    shown = np.asarray(opened(photo.data).convert("RGB"))[..., 0] > 128
    assert mask.shape == (photo.height, photo.width)
    assert (mask == shown).mean() > 0.95


@pytest.mark.parametrize(
    "kind", ["levels", "bits", "classes", "palette", "colour", "16 bits", "alpha", "soft", "lossy"]
)
def test_masks_of_every_kind_keep_the_same(tmp_path: Path, kind: str) -> None:
    picture().save(tmp_path / "a.png")
    kept = np.zeros((20, 40), bool)
    kept[4:12, 8:24] = True
    levels = np.where(kept, 255, 0).astype(np.uint8)
    mask = Image.fromarray(levels)
    if kind == "bits":
        mask = mask.convert("1")
    elif kind == "classes":
        mask = Image.fromarray(np.where(kept, np.arange(40) % 3 + 1, 0).astype(np.uint8))
    elif kind == "palette":
        mask = Image.fromarray(kept.astype(np.uint8), mode="P")
        mask.putpalette([0, 0, 0, 64, 0, 0])
    elif kind == "colour":
        mask = Image.fromarray(np.stack([levels // 4, 0 * levels, 0 * levels], axis=-1))
    elif kind == "16 bits":
        mask = Image.fromarray(levels.astype(np.uint16) * 257)
    elif kind == "alpha":
        mask = Image.fromarray(np.stack([np.full_like(levels, 200), levels], axis=-1), mode="LA")
    elif kind == "soft":
        mask = Image.fromarray(np.where(kept, 200, 20).astype(np.uint8))
    mask.save(tmp_path / f"mask.{'jpg' if kind == 'lossy' else 'png'}")
    found = read_mask(next(tmp_path.glob("mask.*")), tmp_path / "a.png", read_photo(tmp_path / "a.png"))
    assert (found == kept).mean() > (0.95 if kind == "lossy" else 0.999)


def test_a_mask_of_another_size_is_refused(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.jpg")
    Image.new("L", (41, 20)).save(tmp_path / "a.png")
    with pytest.raises(CaptureError, match=r"41 × 20.*40 ×"):
        read_mask(tmp_path / "a.png", tmp_path / "a.jpg", read_photo(tmp_path / "a.jpg"))
