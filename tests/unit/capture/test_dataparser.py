"""Captures that are refused, and what is made of those that are not."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from nerfstudio.data.dataparsers import nerfstudio_dataparser
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.plugins.registry_dataparser import DataParserSpecification
from PIL import Image

from f3rm_ext.capture import dataparser as module
from f3rm_ext.capture.dataparser import CaptureDataParser, CaptureDataParserConfig, capture_dataparser
from f3rm_ext.errors import CaptureError, ConfigError


def parse(capture, split: str = "train", **options):
    return CaptureDataParserConfig(data=capture.folder, **options).setup().get_dataparser_outputs(split)


def refused(capture, message: str, **options) -> str:
    with pytest.raises(CaptureError, match=message) as caught:
        parse(capture, **options)
    text = str(caught.value)
    assert "\n" not in text and text.endswith("."), "one sentence"
    return text


@pytest.fixture
def log(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module.CONSOLE, "log", lambda *parts, **options: lines.append(" ".join(map(str, parts))))
    return lines


def test_a_good_capture_gives_what_nerfstudio_gives(capture):
    before = capture.contents()
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


def test_nerfstudios_module_is_left_alone(capture):
    original = nerfstudio_dataparser.load_from_json
    parse(capture)
    assert nerfstudio_dataparser.load_from_json is original


def test_a_nerfstudio_that_reads_otherwise_is_noticed():
    with pytest.raises(RuntimeError, match="load_from_json"):
        module._with_transforms(lambda self, split: None, {})


def test_registration():
    assert isinstance(capture_dataparser, DataParserSpecification)
    assert capture_dataparser.config._target is CaptureDataParser
    code = (
        "from nerfstudio.configs.dataparser_configs import all_dataparsers as a; "
        "print(type(a['f3rm-ext-data']).__name__)"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "CaptureDataParserConfig"


def test_yaml_round_trip():
    config = CaptureDataParserConfig(data=Path("a/b"), drop_missing_frames=True, train_split_fraction=0.5)
    assert yaml.load(yaml.dump(config), Loader=yaml.Loader) == config


def test_no_such_folder(capture):
    capture.folder = capture.folder / "nowhere"
    assert "nowhere" in refused(capture, "There is no capture at")


def test_no_transforms(capture):
    (capture.folder / "transforms.json").unlink()
    refused(capture, "neither transforms.json nor")
    (capture.folder / "sparse" / "0").mkdir(parents=True)  # nothing in it
    refused(capture, "neither transforms.json nor")


@pytest.mark.parametrize("text", ["", '{"frames": [', "\x00\x01"])
def test_not_json(capture, text: str):
    (capture.folder / "transforms.json").write_text(text)
    refused(capture, r"transforms\.json is not valid JSON")


@pytest.mark.parametrize("text", ["[]", "{}", '{"frames": 3}', '{"frames": [1]}'])
def test_no_frames(capture, text: str):
    (capture.folder / "transforms.json").write_text(text)
    refused(capture, '"frames"')


def test_frame_without_a_name(capture):
    del capture.frames[2]["file_path"]
    refused(capture.save(), "Frame 2 of .* has no file_path")


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


def test_a_downscale_factor_without_downscaled_images_names_the_other_option(make_capture):
    capture = make_capture(4)
    with pytest.raises(CaptureError, match=r"none in .*images_4: use .*camera-res-scale-factor 0.25"):
        CaptureDataParserConfig(data=capture.folder, downscale_factor=4).setup().get_dataparser_outputs("train")


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


@pytest.mark.parametrize(("count", "message"), [(0, "no image"), (1, "a single image")])
def test_too_few_images(capture, count: int, message: str):
    capture.meta["frames"] = capture.frames[:count]
    refused(capture.save(), message)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_a_pose(capture, bad: float):
    capture.frames[3]["transform_matrix"][1][3] = bad
    assert "images/03.png" in refused(capture.save(), "NaN or infinite")


def test_a_pose_that_is_not_rigid(capture):
    capture.frames[4]["transform_matrix"][0][0] = 7.0
    assert "images/04.png" in refused(capture.save(), "is not rigid")


def test_a_pose_of_the_wrong_shape(capture):
    capture.frames[1]["transform_matrix"] = capture.frames[1]["transform_matrix"][:3]
    assert "images/01.png" in refused(capture.save(), "4 x 4")
    del capture.frames[1]["transform_matrix"]
    refused(capture.save(), "4 x 4")


@pytest.mark.parametrize("key", ["fl_x", "cy", "w"])
def test_missing_intrinsics(capture, key: str):
    del capture.meta[key]
    refused(capture.save(), f"intrinsics {key} of images/00.png are missing")


@pytest.mark.parametrize(
    ("key", "value"), [("fl_y", 0), ("fl_x", float("nan")), ("w", -3), ("h", "wide"), ("cx", None)]
)
def test_impossible_intrinsics(capture, key: str, value: object):
    capture.meta[key] = value
    refused(capture.save(), f"intrinsic {key} of images/00.png is")


def test_unknown_camera_model(capture):
    capture.meta["camera_model"] = "PINHOLEY"
    refused(capture.save(), "PINHOLEY is not known: use one of .*OPENCV")


def test_missing_training_list(capture):
    capture.meta["val_filenames"] = capture.names[:2]
    refused(capture.save(), "val_filenames but no train_filenames")


@pytest.mark.parametrize(("given", "asked"), [("val", "test"), ("test", "val")])
def test_val_and_test_stand_in_for_each_other(capture, given: str, asked: str):
    capture.meta |= {"train_filenames": capture.names[:4], f"{given}_filenames": capture.names[4:]}
    assert [path.name for path in parse(capture.save(), asked).image_filenames] == ["04.png", "05.png"]


def test_only_a_training_list(capture):
    capture.meta["train_filenames"] = capture.names
    assert len(parse(capture.save()).image_filenames) == 6
    assert parse(capture, "val").image_filenames == []


def test_split_lists_with_unknown_names(capture):
    capture.meta |= {"train_filenames": capture.names[:4], "val_filenames": [*capture.names[4:], "images/99.png"]}
    assert "images/99.png" in refused(capture.save(), "val_filenames in transforms.json lists 1 images")
    assert len(parse(capture, "val", drop_missing_frames=True).image_filenames) == 2


def test_split_lists_may_be_written_differently(capture):
    capture.meta["train_filenames"] = [f"./{name}" for name in capture.names]
    assert len(parse(capture.save()).image_filenames) == 6


@pytest.mark.parametrize("part", [0.9, 0.3, 0.0])
def test_a_damaged_image(capture, part: float):
    path = capture.folder / capture.names[2]
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    assert "images/02.png" in refused(capture, "is damaged or not an image", train_split_fraction=1.0)


def test_a_damaged_first_image(capture):
    (capture.folder / capture.names[0]).write_text("no image")
    refused(capture, r"00\.png is damaged or not an image")


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


def test_distortion_of_a_frame_replaces_the_shared_one(capture):
    capture.meta["k1"] = 0.1
    capture.frames[2]["k1"] = 0.3
    distortion = parse(capture.save(), train_split_fraction=1.0).cameras.distortion_params
    np.testing.assert_allclose(distortion[:, 0].numpy(), [0.1, 0.1, 0.3, 0.1, 0.1, 0.1])


def test_downscaled_images(make_capture):
    capture = make_capture(4, size=(17, 13))
    capture.meta |= {"cx": 8.5, "cy": 6.5}
    for name in capture.names:
        capture.write_image(name.replace("images/", "images_2/"), (9, 6))  # ffmpeg may round up
    cameras = parse(capture.save(), downscale_factor=2, train_split_fraction=1.0).cameras
    assert cameras.width[:, 0].tolist() == [9] * 4 and cameras.height[:, 0].tolist() == [6] * 4
    assert float(cameras.fx[0, 0]) == 9.0
    (capture.folder / "images_2" / "01.png").unlink()
    assert "images_2/01.png" in refused(capture, "1 of 4 images", downscale_factor=2)
    refused(capture, "camera-res-scale-factor 0.25", downscale_factor=4)


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


def test_files_are_checked_once_for_all_splits(capture, monkeypatch):
    calls = []
    real = module.checks.read_transforms
    monkeypatch.setattr(module.checks, "read_transforms", lambda path: (calls.append(path), real(path))[1])
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


def test_the_file_is_never_written(capture):
    text = json.dumps(capture.meta, indent=7)
    (capture.folder / "transforms.json").write_text(text)
    parse(capture)
    assert (capture.folder / "transforms.json").read_text() == text
