"""COLMAP's models as captures, against nerfstudio's own dataparser for them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from PIL import Image

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.points import XYZ
from f3rm_ext.errors import CaptureError

pytest.importorskip("pycolmap")
Scene = Path
POINTS = np.array([[0.0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3]])


@pytest.fixture
def scene(make_capture: Callable[..., Any], as_colmap: Callable[..., Path], tmp_path: Path) -> Scene:
    """A folder of 20 photos and a model in sparse/0; the photos lie flat in images/."""
    return as_colmap(make_capture(20).folder, tmp_path / "garden", points=POINTS)


def outputs_of(data: Path, split: str = "train", **options: Any) -> Any:
    return CaptureDataParserConfig(data=data, load_3D_points=True, **options).setup().get_dataparser_outputs(split)


def reduce(folder: Path, size: tuple[int, int]) -> None:
    for path in folder.iterdir():
        with Image.open(path) as photo:
            photo.resize(size).save(path)


def figures(cameras: Any) -> list[float]:
    return [float(getattr(cameras, name)[0]) for name in ("fx", "cy", "width", "height")]


def names(outputs: Any) -> list[str]:
    return [Path(path).name for path in outputs.image_filenames]


@pytest.mark.parametrize("split", ["train", "test"])
def test_scene_cameras_splits_and_points_are_those_of_nerfstudio(scene, split) -> None:
    config = ColmapDataParserConfig(data=scene, colmap_path=Path("sparse/0"))
    theirs, ours = config.setup().get_dataparser_outputs(split), outputs_of(scene, split)
    assert names(ours) == names(theirs) and len(names(ours)) == {"train": 17, "test": 3}[split]
    for name in ("camera_to_worlds", "fx", "fy", "cx", "cy", "width", "height", "distortion_params"):
        a, b = getattr(ours.cameras, name), getattr(theirs.cameras, name)
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(ours.dataparser_transform, theirs.dataparser_transform, atol=1e-5)
    assert ours.dataparser_scale == pytest.approx(theirs.dataparser_scale)
    if split == "train":
        ours_points, theirs_points = (np.sort(item.metadata[XYZ].numpy(), axis=0) for item in (ours, theirs))
        np.testing.assert_allclose(ours_points, theirs_points, atol=1e-5)


def test_the_frame_of_the_capture_is_colmaps_own(scene) -> None:
    for outputs in (
        outputs_of(scene),
        ColmapDataParserConfig(data=scene, colmap_path=Path("sparse/0")).setup().get_dataparser_outputs("train"),
    ):
        points = CaptureFrame.from_outputs(outputs, scene).to_capture(outputs.metadata[XYZ].numpy().astype(np.float64))
        np.testing.assert_allclose(np.sort(points, axis=0), np.sort(POINTS, axis=0), atol=1e-4)


def test_the_capture_it_was_made_of_has_the_same_cameras(make_capture, as_colmap, tmp_path) -> None:
    capture = make_capture(8)
    meta, folder = read_transforms(as_colmap(capture.folder, tmp_path / "garden"))
    assert folder == tmp_path / "garden"
    assert (meta["fl_x"], meta["cx"], meta["w"], meta["h"]) == (18.0, 8.0, 16, 12)
    for one, two in zip(meta["frames"], capture.frames, strict=True):
        assert Path(one["file_path"]).name == Path(two["file_path"]).name
        np.testing.assert_allclose(one["transform_matrix"], two["transform_matrix"], atol=1e-12)


@pytest.mark.parametrize("place", ["sparse/0", "colmap/sparse/0", "sparse"])
@pytest.mark.parametrize("text", [False, True], ids=["binary", "text"])
def test_models_are_found_where_programs_write_them(make_capture, as_colmap, tmp_path, place, text) -> None:
    scene = as_colmap(make_capture(4).folder, tmp_path / "garden", place=place, text=text, points=POINTS)
    assert len(outputs_of(scene, eval_mode="all").metadata[XYZ]) == len(POINTS)


def test_other_eval_modes_and_lists_are_followed(scene) -> None:
    assert len(names(outputs_of(scene, "test", eval_interval=10))) == 2
    assert len(names(outputs_of(scene, "test", eval_mode="fraction"))) == 2
    assert len(names(outputs_of(scene, "test", eval_mode="all"))) == 20
    (scene / "test_list.txt").write_text("05.png\n07.png\n")
    (scene / "train_list.txt").write_text("".join(f"{i:02d}.png\n" for i in range(5)))
    assert names(outputs_of(scene, "test")) == ["05.png", "07.png"] and len(names(outputs_of(scene))) == 5
    (scene / "test_list.txt").write_bytes("é.png\n".encode("latin-1"))
    with pytest.raises(CaptureError, match=r"test_filenames.* 1 images"):
        outputs_of(scene, "test")


def test_photos_may_be_elsewhere_or_of_another_size(scene) -> None:
    (scene / "images").rename(scene / "photos")
    assert outputs_of(scene).image_filenames[0].parent == scene / "photos"
    reduce(scene / "photos", (8, 6))
    assert figures(outputs_of(scene).cameras) == [9, 3, 8, 6]


def test_reduced_copies_stand_in_for_missing_photos(scene) -> None:
    before = {path.name for path in scene.iterdir()}
    (scene / "images").rename(scene / "images_4")
    reduce(scene / "images_4", (4, 3))
    assert figures(outputs_of(scene).cameras) == [4.5, 1.5, 4, 3]
    assert {path.name for path in scene.iterdir()} == before - {"images"} | {"images_4"}


def test_a_larger_model_and_masks_that_are_not_read_are_named(make_capture, as_colmap, tmp_path, log) -> None:
    capture = make_capture(6)
    more = as_colmap(capture.folder, tmp_path / "more")
    for text in (False, True):
        scene = as_colmap(make_capture(4).folder, tmp_path / f"garden{text}", text=text)
        read_transforms(scene)
        assert not log
        other = as_colmap(capture.folder, tmp_path / f"more{text}", text=text)
        shutil.copytree(other / "sparse" / "0", scene / "sparse" / "1")
        read_transforms(scene)
        assert len(log) == 1 and "has 4 photos" in log[0] and "sparse/1 has 6" in log[0]
        log.clear()
    shutil.copytree(scene / "sparse" / "1", more / "sparse" / "1")
    (more / "masks").mkdir()
    read_transforms(more)
    assert len(log) == 1 and "--masks-path masks" in log[0]
    log.clear()


def test_transforms_json_goes_before_a_model(scene) -> None:
    meta, _ = read_transforms(scene)
    (scene / "transforms.json").write_text(json.dumps({**meta, "frames": meta["frames"][:5]}))
    assert len(read_transforms(scene)[0]["frames"]) == 5


def test_a_camera_without_photos_may_be_of_any_kind(make_capture, as_colmap, tmp_path) -> None:
    scene = as_colmap(make_capture(4).folder, tmp_path / "garden", models=[*["PINHOLE"] * 4, "FOV"])
    assert len(outputs_of(scene, eval_mode="all").image_filenames) == 4


@pytest.mark.parametrize("damage", ["cut", "empty", "fov", "mixed"])
def test_models_that_cannot_be_used_are_refused(make_capture, as_colmap, tmp_path, damage) -> None:
    models = {"fov": ["FOV"], "mixed": ["PINHOLE", "OPENCV_FISHEYE"]}.get(damage, ["PINHOLE"])
    scene = as_colmap(make_capture(4).folder, tmp_path / "garden", models=models)
    images = scene / "sparse/0/images.bin"
    if damage in ("cut", "empty"):
        images.write_bytes(images.read_bytes()[: 60 if damage == "cut" else 0])
    with pytest.raises(CaptureError, match="sparse/0"):
        outputs_of(scene)
