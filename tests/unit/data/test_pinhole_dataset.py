"""The data set of pinhole pictures: cameras, pixels, what nerfstudio's viewer and renderer take from it."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader
from PIL import Image

from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.errors import CaptureError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.sampling import sample_map
from f3rm_ext.features.source import prepare_features
from f3rm_ext.features.store.images import ImageIndex, ImageSet

BARREL = {"k1": -0.2, "k2": 0.02}


def test_without_distortion_it_is_nerfstudios(make_outputs):
    outputs = make_outputs(3, sizes=((12, 16), (20, 8)))
    dataset, reference = PinholeDataset(outputs), InputDataset(outputs)
    for name in ("fx", "fy", "cx", "cy", "width", "height", "camera_to_worlds"):
        torch.testing.assert_close(getattr(dataset.cameras, name), getattr(reference.cameras, name))
    for i in range(3):
        assert torch.equal(dataset[i]["image"], reference[i]["image"]) and dataset[i]["image_idx"] == i
        assert (dataset.get_numpy_image(i) == reference.get_numpy_image(i)).all()
        assert torch.equal(dataset.get_image_float32(i), reference.get_image_float32(i))
    assert dataset.cameras.distortion_params is None


def test_cameras_fit_the_pictures_before_one_is_opened(make_outputs):
    outputs = make_outputs(4, sizes=((48, 64), (64, 48)), extra=BARREL)
    dataset = PinholeDataset(outputs, 0.6)
    assert (dataset.cameras.camera_type == CameraType.PERSPECTIVE.value).all()
    sizes = []
    for i in range(4):
        height, width = dataset.get_numpy_image(i).shape[:2]
        assert (height, width) == (int(dataset.cameras.height[i]), int(dataset.cameras.width[i]))
        sizes.append((height, width))
        view = dataset.views[i]
        assert float(dataset.cameras.cx[i] / width) == pytest.approx(view.cx / view.width)
        assert float(dataset.cameras.fy[i] / height) == pytest.approx(view.fy / view.height)
    assert sizes[0] == sizes[2] != sizes[1]
    # The photo's middle, where there is no distortion, is still seen in the middle.
    red, row, column = dataset.get_numpy_image(1)[sizes[1][0] // 2, sizes[1][1] // 2]
    assert red == 10 and abs(int(row) - 32) <= 1 and abs(int(column) - 24) <= 1
    for path in dataset.image_filenames:
        path.unlink()
    assert torch.equal(PinholeDataset(outputs, 0.6).cameras.cx, dataset.cameras.cx)


@pytest.mark.parametrize("background", [None, [0.0, 0.0, 0.0], [0.0, 0.5, 1.0]])
def test_what_is_shown_has_three_channels_and_pictures_keep_alpha(make_outputs, background):
    outputs = make_outputs(2, alpha=(0,))
    outputs.alpha_color = None if background is None else torch.tensor(background)
    dataset = PinholeDataset(outputs)
    assert dataset.picture(0).pixels.shape == (12, 16, 4) and dataset.picture(1).pixels.shape == (12, 16, 3)
    behind = torch.tensor(background or [1.0, 1.0, 1.0])
    alpha = 128 / 255
    shown = dataset[0]["image"][3, 5]
    torch.testing.assert_close(
        shown, torch.tensor([0, 3 / 255, 5 / 255]) * alpha + behind * (1 - alpha), atol=3e-3, rtol=0
    )
    assert torch.equal(dataset.get_data(0, "uint8")["image"], dataset.get_image_uint8(0))
    given = dataset.metadata["alpha_color"]
    assert given is None if background is None else torch.equal(given, behind)


def test_masks_go_with_the_pictures(make_outputs):
    dataset = PinholeDataset(make_outputs(2, sizes=((48, 64),), masks=32, extra=BARREL), 0.5)
    for i in range(2):
        data = dataset[i]
        assert data["mask"].shape == (*data["image"].shape[:2], 1) and data["mask"].dtype == torch.bool
        kept = data["mask"][..., 0]
        assert not kept[:, : kept.shape[1] // 2].any() and kept[:, kept.shape[1] // 2 + 1 :].all()


def test_the_circle_of_a_fisheye_camera_is_a_mask(make_outputs):
    extra = {"camera_model": "OPENCV_FISHEYE", "fisheye_crop_radius": 20, "k1": 0.01}
    dataset = PinholeDataset(make_outputs(2, sizes=((48, 64),), extra=extra))
    mask = dataset[0]["mask"][..., 0]
    height, width = mask.shape
    assert mask[height // 2, width // 2] and not mask[0, 0] and not mask[height // 2, 0]
    assert "fisheye_crop_radius" not in (dataset.cameras.metadata or {})


def test_folding_distortion_names_the_image(make_outputs):
    outputs = make_outputs(2, extra={"k1": -9.0})
    with pytest.raises(CaptureError, match=r"distortion of .*000\.png"):
        PinholeDataset(outputs)


def test_extractors_that_resize_see_the_photo_at_full_size(make_outputs, tmp_path):
    """Grids are in pixels of the training images, so that samples are the same as in training at full size."""

    class Bands:
        """Mean brightness of 16 bands of columns."""

        resizes, dim, batch_size, identity = True, 3, 2, ExtractorIdentity("bands", "1", "none", "16 bands", "mean")
        seen: ClassVar[list[tuple[int, ...]]] = []

        def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
            return PatchGrid.covering(1, 16, height_px, width_px)

        def extract(self, images):
            self.seen.extend(image.shape[:2] for image in images)
            return [torch.from_numpy(i.astype("f4")).mean(0).unflatten(0, (16, -1)).mean(1)[None] / 255 for i in images]

    outputs = make_outputs(2, sizes=((48, 64),))
    options = FeatureOptions(extractors=("bands",), cache_dir=tmp_path)
    for resizes, size in ((True, (48, 64)), (False, (24, 32))):
        build = type("Built", (Bands,), {"resizes": resizes, "seen": [],
                                         "identity": replace(Bands.identity, model=str(resizes))})  # fmt: skip
        (half,) = prepare_features(
            [PinholeDataset(outputs, 0.5)], options, device="cpu", build=lambda *_, build=build, **__: build()
        )
        assert build.seen == [size] * 2
        (full,) = prepare_features(
            [PinholeDataset(outputs)], options, device="cpu", build=lambda *_, build=build, **__: build()
        )
        assert len(build.seen) == (2 if resizes else 4), "photos at full size are extracted once"
        places = np.array([[10.0, 5.0], [3.0, 17.5], [20.0, 31.0]])
        one, two = sample_map(half.load(1)["bands"], places), sample_map(full.load(1)["bands"], places * 2)
        np.testing.assert_allclose(one, two, atol=1e-6 if resizes else 0.05)


def test_features_are_not_taken_for_those_of_another_lens(make_outputs, tmp_path):
    """The index of known images tells the same file apart by what is done to its pixels."""
    outputs = make_outputs(2, sizes=((48, 64),), extra=BARREL)
    index = ImageIndex(tmp_path / "images.json")
    keys = ImageSet(PinholeDataset(outputs), index).keys()
    assert ImageSet(PinholeDataset(outputs), index).known_keys() == keys
    assert ImageSet(PinholeDataset(outputs, 0.5), index).known_keys() == [None, None]
    lens = outputs.cameras.distortion_params.clone()
    lens[:, 0] = -0.1
    outputs.cameras.distortion_params = lens
    assert ImageSet(PinholeDataset(outputs), index).known_keys() == [None, None]
    assert ImageSet(InputDataset(outputs), index).known_keys() == [None, None]


def test_nerfstudios_own_loader_works_on_it(make_outputs):
    """As its dataset renderer uses it."""
    dataset = PinholeDataset(make_outputs(3, sizes=((48, 64),), alpha=(1,), extra=BARREL))
    seen = 0
    for camera, batch in FixedIndicesEvalDataloader(input_dataset=dataset, device="cpu", num_workers=1):
        assert batch["image"].shape == (int(camera.height), int(camera.width), 3)
        seen += 1
    assert seen == 3


def test_drafts_of_large_photos_are_much_as_the_photos(make_outputs, tmp_path):
    outputs = make_outputs(2, sizes=((252, 336),), masks=160, extra=BARREL)
    coarse = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    outputs.image_filenames[0] = tmp_path / "photo.jpg"
    Image.fromarray(coarse).resize((336, 252), Image.Resampling.BICUBIC).save(outputs.image_filenames[0], quality=95)
    whole, drafts = PinholeDataset(outputs, 30 / 336), PinholeDataset.scale_to_side(outputs, 30)
    assert drafts.photos.draft == 4 and PinholeDataset.scale_to_side(outputs, 200).photos.draft == 1
    for name in ("fx", "cy", "width", "height"):
        torch.testing.assert_close(getattr(drafts.cameras, name), getattr(whole.cameras, name), rtol=0.02, atol=0)
    for i in range(2):
        expected, found = whole.picture(i), drafts.picture(i)
        assert expected.pixels.shape == found.pixels.shape and expected.valid is not None and found.valid is not None
        assert (found.valid != expected.valid).float().mean() <= 1 / 30
        assert (found.pixels.float() - expected.pixels.float()).abs().mean() < 3
