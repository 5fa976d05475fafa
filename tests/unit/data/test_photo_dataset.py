"""Decoding photos, beside nerfstudio's."""

import numpy as np
import pytest
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from f3rm_ext.data import photo_dataset
from f3rm_ext.data.image_reader import read_pixels
from f3rm_ext.data.photo_dataset import PhotoDataset
from f3rm_ext.data.silhouettes import are_silhouettes
from f3rm_ext.errors import CaptureError

TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    ("mode", "options", "fast"),
    [
        ("RGB", {"quality": 91}, True),
        ("RGB", {"quality": 60, "subsampling": 0, "progressive": True, "exif": TURNED}, True),
        ("RGB", {"quality": 75, "subsampling": 2}, True),
        ("L", {"quality": 90}, False),
    ],
)
def test_pixels_are_those_of_nerfstudio(make_outputs, tmp_path, mode, options, fast):
    outputs = make_outputs(2)
    coarse = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize((333, 251), Image.Resampling.BICUBIC).convert(mode)
    path = outputs.image_filenames[0] = tmp_path / "ä photo.jpg"
    photo.save(path, **options)
    assert (photo_dataset._decode_jpeg(path, 1) is not None) == fast
    for scale in (1.0, 0.5):
        found, expected = (kind(outputs, scale).get_numpy_image(0) for kind in (PhotoDataset, InputDataset))
        assert np.array_equal(found, expected) and found.dtype == np.uint8


@pytest.mark.parametrize(("side", "scale"), [(1122, 1024 / 1122), (1361, 1024 / 1361), (720, 0.7), (800, 0.57)])
def test_scaled_photos_have_the_size_of_their_cameras(make_outputs, side, scale):
    outputs = make_outputs(2, sizes=[(12, side)])
    dataset = PhotoDataset(outputs, scale)
    height, width = dataset.get_numpy_image(0).shape[:2]
    assert (int(dataset.cameras.height[0]), int(dataset.cameras.width[0])) == (height, width)
    for name, factor in (("fx", width / side), ("cx", width / side), ("fy", height / 12), ("cy", height / 12)):
        whole = float(getattr(outputs.cameras, name)[0])
        assert float(getattr(dataset.cameras, name)[0]) == pytest.approx(factor * whole), name


def test_a_photo_that_is_cut_short_is_not_filled_with_grey(make_outputs, tmp_path):
    outputs = make_outputs(2)
    path = outputs.image_filenames[0] = tmp_path / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CaptureError, match=r"photo\.jpg"):
        read_pixels(PhotoDataset(outputs), 0)


@pytest.mark.parametrize("kind", ["1", "L", "I;16", "P", "LA", "RGB", "RGBA", "alpha"])
def test_masks_of_all_kinds_of_images_keep_the_same(make_outputs, kind):
    outputs = make_outputs(5, masks=6)
    assert outputs.mask_filenames is not None
    for path in outputs.mask_filenames:
        mask = Image.open(path)
        if kind == "I;16":
            mask = Image.fromarray(np.asarray(mask).astype(np.uint16))
        elif kind == "P":  # white has number 0
            mask = mask.point([1] + [0] * 255)
            mask.putpalette([255, 255, 255, 0, 0, 0])
        elif kind == "alpha":
            mask = Image.merge("LA", (Image.new("L", mask.size, 255), mask))
        else:
            mask = mask.convert(kind)
        mask.save(path)
    part = read_pixels(PhotoDataset(outputs), 1)
    assert part.valid is not None and part.valid[3].tolist() == [x >= 6 for x in range(16)]
    half = read_pixels(PhotoDataset(outputs, 0.5), 1)
    assert half.valid is not None and half.valid[3].tolist() == [x >= 3 for x in range(8)]
    assert not are_silhouettes(outputs.cameras, outputs.mask_filenames)


def test_masks_of_another_size_are_refused(make_outputs):
    outputs = make_outputs(2, masks=6)
    assert outputs.mask_filenames is not None
    Image.new("L", (8, 6)).save(outputs.mask_filenames[0])
    with pytest.raises(CaptureError, match=r"000\.png.*mask"):
        read_pixels(PhotoDataset(outputs), 0)
