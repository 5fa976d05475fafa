"""Captures that are refused, and what is made of those that are not."""

import math

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.dataparsers import nerfstudio_dataparser
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from f3rm_ext.capture import dataparser as module
from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.errors import CaptureError, ConfigError


def parse(capture, split: str = "train", **options):
    return CaptureDataParserConfig(data=capture.folder, **options).setup().get_dataparser_outputs(split)


def refused(capture, message: str, **options) -> str:
    with pytest.raises(CaptureError, match=message) as caught:
        parse(capture, **options)
    text = str(caught.value)
    assert "\n" not in text and text.endswith("."), "one sentence"
    return text


def test_a_good_capture_gives_what_nerfstudio_gives(capture):
    before, original = capture.contents(), nerfstudio_dataparser.load_from_json
    for split in ("train", "val", "test"):
        ours = parse(capture, split)
        theirs = NerfstudioDataParserConfig(data=capture.folder).setup().get_dataparser_outputs(split)
        assert ours.image_filenames == theirs.image_filenames
        torch.testing.assert_close(ours.cameras.camera_to_worlds, theirs.cameras.camera_to_worlds)
        for name in ("fx", "fy", "cx", "cy", "width", "height", "distortion_params"):
            torch.testing.assert_close(getattr(ours.cameras, name), getattr(theirs.cameras, name))
        torch.testing.assert_close(ours.dataparser_transform, theirs.dataparser_transform)
        assert ours.dataparser_scale == theirs.dataparser_scale
    assert capture.contents() == before, "inputs are never changed"
    assert nerfstudio_dataparser.load_from_json is original


def test_a_nerfstudio_that_reads_otherwise_is_noticed():
    with pytest.raises(RuntimeError, match="load_from_json"):
        module._inject_transforms(lambda self, split: None, {})


def test_no_capture_and_no_transforms(capture):
    (capture.folder / "transforms.json").unlink()
    refused(capture, "neither transforms.json nor")
    (capture.folder / "sparse" / "0").mkdir(parents=True)  # nothing in it
    refused(capture, "neither transforms.json nor")
    capture.folder = capture.folder / "nowhere"
    refused(capture, "nowhere")


@pytest.mark.parametrize("text", ["", '{"frames": [', "\x00\x01", "[]", "{}", '{"frames": 3}', '{"frames": [1]}'])
def test_transforms_without_frames(capture, text):
    (capture.folder / "transforms.json").write_text(text)
    refused(capture, r'transforms\.json .*"frames"')


def pose_with(row: int, column: int, value: float) -> list[list[float]]:
    pose = np.eye(4)
    pose[row, column] = value
    return pose.tolist()


ABSENT = object()


@pytest.mark.parametrize(
    ("frame", "key", "value", "message"),
    [
        (2, "file_path", ABSENT, "Frame 2 of .* has no file_path"),
        (3, "transform_matrix", pose_with(1, 3, math.nan), "03.png has a NaN or infinite"),
        (3, "transform_matrix", pose_with(1, 3, math.inf), "03.png has a NaN or infinite"),
        (4, "transform_matrix", pose_with(0, 0, 7.0), "04.png is not rigid"),
        (1, "transform_matrix", np.eye(4)[:3].tolist(), "01.png is not a matrix of 4 x 4"),
        (1, "transform_matrix", ABSENT, "01.png is not a matrix of 4 x 4"),
        *((None, key, ABSENT, f"intrinsics {key} of images/00.png are missing") for key in ("fl_x", "cy", "w")),
        (None, "fl_y", 0, "intrinsic fl_y of images/00.png is"),
        (None, "fl_x", math.nan, "intrinsic fl_x of images/00.png is"),
        (None, "w", -3, "intrinsic w of images/00.png is"),
        (None, "h", "wide", "intrinsic h of images/00.png is"),
        (None, "cx", None, "intrinsic cx of images/00.png is"),
        (None, "camera_model", "PINHOLEY", "PINHOLEY .*OPENCV"),
        (None, "val_filenames", ["images/00.png"], "val_filenames but no train_filenames"),
        (None, "frames", [], "no image"),
    ],
)
def test_mistakes_in_transforms_are_named(capture, frame, key, value, message):
    owner = capture.meta if frame is None else capture.frames[frame]
    owner[key] = value
    if value is ABSENT:
        del owner[key]
    refused(capture.save(), message)


def test_cameras_at_one_place_tell_no_scale(capture):
    for frame in capture.frames:
        for row, value in zip(frame["transform_matrix"], (3.0, -1.0, 0.5), strict=False):
            row[3] = value
    refused(capture.save(), "All cameras are at one place.*--auto-scale-poses False")
    outputs = parse(capture, auto_scale_poses=False)
    assert torch.equal(outputs.cameras.camera_to_worlds[:, :, 3], torch.zeros(len(outputs.cameras), 3))


def test_json_file_given_directly(capture):
    path = capture.folder / "transforms.json"
    other = path.rename(path.with_name("other.json"))
    capture.folder = other
    assert len(parse(capture).image_filenames) == 6


def test_missing_images_are_named(make_capture):
    capture = make_capture(9)
    for name in capture.names[:7]:
        (capture.folder / name).unlink()
    text = refused(capture, "7 of 9 images of the capture are not there")
    assert all(name in text for name in capture.names[:5]) and "and 2 more" in text
    assert capture.names[5] not in text and "--drop-missing-frames True" in text


def test_names_without_suffix_are_those_of_their_files(capture):
    names = capture.names
    capture.meta |= {"train_filenames": names[:4], "test_filenames": names[4:]}
    before = [path.name for path in parse(capture.save()).image_filenames]
    for frame, name in zip(capture.frames, names, strict=True):
        frame["file_path"] = name.removesuffix(".png")
        capture.write_image(name.replace(".png", ".depth.png"), (4, 3))  # which NeRFCapture writes beside a photo
    for key in ("train_filenames", "test_filenames"):
        capture.meta[key] = [name.removesuffix(".png") for name in capture.meta[key]]
    assert [path.name for path in parse(capture.save()).image_filenames] == before
    (capture.folder / names[0]).unlink()
    refused(capture, "1 of 6 images of the capture are not there")


def test_missing_frames_can_be_dropped(make_capture, log):
    capture = make_capture(9)
    for split, numbers in (("train", range(6)), ("val", (6, 7)), ("test", (7, 8))):
        capture.meta[f"{split}_filenames"] = [capture.names[i] for i in numbers]
    capture.save()
    for i in (0, 3, 7):
        (capture.folder / capture.names[i]).unlink()
    before = capture.contents()
    parser = CaptureDataParserConfig(data=capture.folder, drop_missing_frames=True).setup()
    found = {split: [path.name for path in parser.get_dataparser_outputs(split).image_filenames]
             for split in ("train", "val", "test")}  # fmt: skip
    assert found == {"train": ["01.png", "02.png", "04.png", "05.png"], "val": ["06.png"], "test": ["08.png"]}
    assert len([line for line in log if "3 of 9 images" in line]) == 1
    assert capture.contents() == before


def test_dropping_must_leave_two(capture):
    for name in capture.names[1:]:
        (capture.folder / name).unlink()
    refused(capture, "a single image", drop_missing_frames=True)
    (capture.folder / capture.names[0]).unlink()
    refused(capture, "no image", drop_missing_frames=True)
    capture.meta["frames"] = capture.frames[:1]
    refused(capture.save(), "a single image")


@pytest.mark.parametrize(("given", "asked"), [("val", "test"), ("test", "val")])
def test_val_and_test_stand_in_for_each_other(capture, given: str, asked: str):
    capture.meta |= {"train_filenames": capture.names[:4], f"{given}_filenames": capture.names[4:]}
    assert [path.name for path in parse(capture.save(), asked).image_filenames] == ["04.png", "05.png"]


def test_only_a_training_list_with_names_written_differently(capture):
    capture.meta["train_filenames"] = [f"./{name}" for name in capture.names]
    assert len(parse(capture.save()).image_filenames) == 6
    assert parse(capture, "val").image_filenames == []


def test_split_lists_with_unknown_names(capture):
    capture.meta |= {"train_filenames": capture.names[:4], "val_filenames": [*capture.names[4:], "images/99.png"]}
    assert "images/99.png" in refused(capture.save(), "val_filenames in transforms.json lists 1 images")
    assert len(parse(capture, "val", drop_missing_frames=True).image_filenames) == 2


@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_image(capture, number):
    (capture.folder / capture.names[number]).write_text("no image")
    refused(capture, f"images/0{number}.png is damaged or not an image", train_split_fraction=1.0)


def test_photos_of_phones_with_200_megapixels_are_read(capture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 12 // 4)  # Pillow refuses twice this number
    assert parse(capture).image_filenames


def test_size_that_differs_from_what_is_stated(capture):
    capture.write_image(capture.names[3], (20, 12))
    text = refused(capture, r"03\.png has 20 x 12 pixels, but its camera has 16 x 12", train_split_fraction=1.0)
    assert "give this frame its own w, h, fl_x" in text


def test_images_of_different_sizes_with_their_own_intrinsics(capture):
    capture.write_image(capture.names[3], (20, 10))
    capture.frames[3] |= {"w": 20, "h": 10, "fl_x": 22.0, "cx": 10.0}
    cameras = parse(capture.save(), train_split_fraction=1.0).cameras
    assert cameras.width[:, 0].tolist() == [16, 16, 16, 20, 16, 16]
    assert cameras.height[:, 0].tolist() == [12, 12, 12, 10, 12, 12]
    assert cameras.fx[:, 0].tolist() == [18.0, 18.0, 18.0, 22.0, 18.0, 18.0]
    assert cameras.cx[3, 0] == 10.0 and cameras.cy[3, 0] == 6.0


def test_camera_models_of_frames(capture):
    """nerfstudio writes the model into the frames where there are several cameras, and reads it at the top."""
    del capture.meta["camera_model"]
    for frame in capture.frames:
        frame["camera_model"] = "OPENCV_FISHEYE"
    assert set(parse(capture.save()).cameras.camera_type.flatten().tolist()) == {CameraType.FISHEYE.value}
    capture.frames[1]["camera_model"] = "PINHOLE"
    refused(capture.save(), r"mix kinds of cameras \(OPENCV_FISHEYE, PINHOLE\)")
    for frame in capture.frames[2:]:
        frame["camera_model"] = "SIMPLE_RADIAL"
    capture.frames[0]["camera_model"] = "OPENCV"
    assert set(parse(capture.save()).cameras.camera_type.flatten().tolist()) == {CameraType.PERSPECTIVE.value}
    capture.frames[3]["camera_model"] = "PINHOLEY"
    refused(capture.save(), "PINHOLEY .*OPENCV")


def test_copies_of_photos_without_copies_of_masks_are_not_used(make_capture):
    capture = make_capture(4, size=(1700, 6))
    for frame in capture.frames:
        name = frame["file_path"]
        frame["mask_path"] = name.replace("images/", "masks/")
        capture.write_image(frame["mask_path"], (1700, 6), "L")
        capture.write_image(name.replace("images/", "images_2/"), (850, 3))
    outputs = parse(capture.save(), train_split_fraction=1.0)
    assert outputs.cameras.width[:, 0].tolist() == [1700] * 4
    assert all(path.is_file() for path in outputs.mask_filenames)


def test_downscaled_images(make_capture):
    capture = make_capture(4, size=(17, 13))
    capture.meta |= {"cx": 8.5, "cy": 6.5}
    for name in capture.names:
        capture.write_image(name.replace("images/", "images_2/"), (9, 6))  # ffmpeg may round up
    cameras = parse(capture.save(), downscale_factor=2, train_split_fraction=1.0).cameras
    assert cameras.width[:, 0].tolist() == [9] * 4 and cameras.height[:, 0].tolist() == [6] * 4
    # The copies show the whole photos.
    assert cameras.cx[:, 0].tolist() == [4.5] * 4 and cameras.cy[:, 0].tolist() == [3.0] * 4
    assert cameras.fx[:, 0].tolist() == pytest.approx([18 * 9 / 17] * 4)
    assert cameras.fy[:, 0].tolist() == pytest.approx([18 * 6 / 13] * 4)
    (capture.folder / "images_2" / "01.png").unlink()
    assert "images_2/01.png" in refused(capture, "1 of 4 images", downscale_factor=2)
    refused(capture, "camera-res-scale-factor 0.25", downscale_factor=4)


def test_the_circle_of_fisheye_photos_shrinks_with_them(make_capture):
    capture = make_capture(3)
    capture.meta |= {"camera_model": "OPENCV_FISHEYE", "fisheye_crop_radius": 5}
    for name in capture.names:
        capture.write_image(name.replace("images/", "images_2/"), (8, 6))
    assert parse(capture.save()).cameras.metadata["fisheye_crop_radius"] == 5
    assert parse(capture, downscale_factor=2).cameras.metadata["fisheye_crop_radius"] == 2.5


def test_originals_are_not_needed_with_a_factor(capture):
    for name in capture.names:
        capture.write_image(name.replace("images/", "images_2/"), (8, 6))
        (capture.folder / name).unlink()
    assert len(parse(capture, downscale_factor=2).image_filenames) == 6


def add_masks(capture, size: tuple[int, int] = (16, 12)) -> None:
    (capture.folder / "masks").mkdir()
    for i, frame in enumerate(capture.frames):
        frame["mask_path"] = f"masks/{i:02d}.png"
        Image.new("L", size, 255).save(capture.folder / frame["mask_path"])
    capture.save()


def test_masks(capture):
    add_masks(capture)
    assert len(parse(capture).mask_filenames) == 6
    (capture.folder / "masks/02.png").unlink()
    assert "masks/02.png" in refused(capture, "is not there", train_split_fraction=1.0)
    del capture.frames[4]["mask_path"]
    assert "images/04.png" in refused(capture.save(), "1 of 6 frames have no mask_path")


def test_masks_of_another_size(capture):
    add_masks(capture, (8, 6))
    refused(capture, "00.png has 8 x 6 pixels, but its image .* has 16 x 12")


def test_cameras_alone_need_no_images(capture):
    """nerfstudio sets the factor before parsing when it wants cameras only (ns-render)."""
    full = parse(capture)
    for name in capture.names:
        (capture.folder / name).unlink()
    parser = CaptureDataParserConfig(data=capture.folder).setup()
    parser.downscale_factor = 1
    for _ in range(2):
        outputs = parser.get_dataparser_outputs("train")
        torch.testing.assert_close(outputs.cameras.camera_to_worlds, full.cameras.camera_to_worlds)


def test_cameras_alone_drop_the_same_frames(capture):
    """Otherwise the scene would be centred otherwise than in training."""
    (capture.folder / capture.names[5]).unlink()
    trained = parse(capture, drop_missing_frames=True)
    parser = CaptureDataParserConfig(data=capture.folder, drop_missing_frames=True).setup()
    parser.downscale_factor = 1
    torch.testing.assert_close(
        parser.get_dataparser_outputs("train").dataparser_transform, trained.dataparser_transform
    )


def test_files_are_checked_once_for_all_splits(capture, watch_calls):
    calls = watch_calls(module.checks, "read_transforms")
    parser = CaptureDataParserConfig(data=capture.folder).setup()
    for split in ("train", "val", "test"):
        parser.get_dataparser_outputs(split)
    assert len(calls) == 1


def test_split_by_name_that_no_name_allows(capture):
    refused(capture, "cannot be split by file name", eval_mode="filename")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split_fraction": 0.0}, "train-split-fraction"),
        ({"train_split_fraction": 1.5}, "train-split-fraction"),
        ({"eval_interval": 0}, "eval-interval"),
        ({"downscale_factor": 0}, "downscale-factor"),
    ],
)
def test_options_that_cannot_work(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        CaptureDataParserConfig(**options)
