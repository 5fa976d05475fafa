"""Decoding photos, beside nerfstudio's."""

import numpy as np
import pytest
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from f3rm_ext.data import photo_dataset
from f3rm_ext.data.image_reader import read_pixels
from f3rm_ext.data.photo_dataset import PhotoDataset
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


def test_a_photo_that_is_cut_short_is_not_filled_with_grey(make_outputs, tmp_path):
    outputs = make_outputs(2)
    path = outputs.image_filenames[0] = tmp_path / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CaptureError, match=r"photo\.jpg"):
        read_pixels(PhotoDataset(outputs), 0)
