"""Reading images through the data set."""

import numpy as np
import pytest
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset

from f3rm_ext.data.image_reader import read_eval_batch, read_pixels
from f3rm_ext.errors import CaptureError


def test_pixels_and_masks(make_outputs):
    dataset = InputDataset(make_outputs(3, alpha=(1,), masks=range(3)))
    for i, channels in enumerate((3, 4, 3)):
        part = read_pixels(dataset, i)
        assert part.pixels.shape == (12, 16, channels) and int(part.pixels[5, 7, 0]) == 10 * i
        assert part.valid is not None and part.valid[3].tolist() == [x >= i for x in range(16)]


def test_mask_color_is_in_the_range_of_the_pixels(make_outputs):
    dataset = InputDataset(make_outputs(2, masks=99, parser={"mask_color": (1.0, 0.5, 0.0)}))
    assert read_pixels(dataset, 0).pixels[0, 0].tolist() == [255, 128, 0]


def test_images_may_be_one_pixel_larger_than_their_cameras(make_outputs):
    dataset = InputDataset(make_outputs(2))
    dataset.cameras.height -= 1
    assert read_pixels(dataset, 1).pixels.shape == (11, 16, 3)
    assert read_eval_batch(dataset, 1)["image"].shape == (11, 16, 3)


def test_other_sizes_are_refused(make_outputs):
    dataset = InputDataset(make_outputs(2))
    dataset.cameras.width += 1
    for read in (read_pixels, read_eval_batch):
        with pytest.raises(CaptureError, match=r"001\.png.*16 x 12.*17 x"):
            read(dataset, 1)


def test_damage_names_the_file(make_outputs):
    dataset = InputDataset(make_outputs(2))
    path = dataset.image_filenames[1]
    path.write_bytes(path.read_bytes()[:50])
    for read in (read_pixels, read_eval_batch):
        with pytest.raises(CaptureError, match=r"001\.png"):
            read(dataset, 1)


@pytest.mark.parametrize(("size", "scale"), [((12, 16), 1), ((13, 17), 1), ((24, 32), 0.5)])
def test_the_fisheye_circle_is_scaled_with_the_image(make_outputs, size, scale):
    fisheye = {"camera_model": "OPENCV_FISHEYE", "fisheye_crop_radius": 4 / scale}
    dataset = InputDataset(make_outputs(2, sizes=(size,), extra=fisheye), scale)
    valid = read_pixels(dataset, 0).valid
    assert valid is not None and valid.shape == tuple(scale * side for side in size)
    assert bool(valid[6, 8]) and not bool(valid[0, 0])
    assert torch.nonzero(valid).amin(dim=0).tolist() == [2, 4] and torch.nonzero(valid).amax(dim=0).tolist() == [10, 12]


def test_eval_batch_is_float(make_outputs):
    batch = read_eval_batch(InputDataset(make_outputs(3)), 2)
    assert batch["image"].dtype == torch.float32 and batch["image_idx"] == 2
    assert float(batch["image"][0, 0, 0]) == pytest.approx(20 / 255)


def test_masked_pixels_become_transparent_where_they_are_background(make_outputs):
    dataset = InputDataset(make_outputs(3, alpha=(1,), masks=4))
    for i, alpha in enumerate((255, 128, 255)):
        part = read_pixels(dataset, i, "background")
        assert part.valid is not None and part.empty is not None and part.pixels.shape == (12, 16, 4)
        assert part.empty[3].tolist() == [x < 3 for x in range(16)]
        assert part.valid[3].tolist() == [x != 3 for x in range(16)], "nobody knows what is beside the object"
        assert part.pixels[3, :, 3].tolist() == [alpha if x >= 4 else 0 for x in range(16)]
        assert torch.equal(part.pixels[..., :3], read_pixels(dataset, i).pixels[..., :3])
    plain = InputDataset(make_outputs(2, name="plain"))
    assert read_pixels(plain, 0, "background").pixels.shape == (12, 16, 3), "without masks they stay as they are"


def test_nobody_knows_what_is_outside_of_the_fisheye_circle(make_outputs):
    """It is not background, and it does not count in evaluation either."""
    fisheye = {"camera_model": "OPENCV_FISHEYE", "fisheye_crop_radius": 4}
    dataset = InputDataset(make_outputs(2, masks=lambda i, h, w: np.mgrid[:h, :w][1] < 8, extra=fisheye))
    part, circle = read_pixels(dataset, 0, "background"), read_pixels(dataset, 0).valid
    assert part.valid is not None and circle is not None
    assert part.valid[6, 4] and part.valid[6, 11] and not part.valid[0, 0]
    assert part.pixels[6, 11, 3] == 0 and part.pixels[6, 4, 3] == 255
    assert torch.equal(read_eval_batch(dataset, 0)["mask"][..., 0], circle)
    plain = InputDataset(make_outputs(2, extra=fisheye, name="plain"))
    assert torch.equal(read_eval_batch(plain, 0)["mask"][..., 0], read_pixels(plain, 0).valid)
