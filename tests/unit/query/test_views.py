"""Views of photos and along camera paths."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.run import Photos
from f3rm_ext.query.views import photo_views, read_path

POSE = [1.0, 0, 0, 0.1, 0, 1, 0, 0.2, 0, 0, 1, 0.3, 0, 0, 0, 1]


def path_json(**changes: Any) -> dict[str, Any]:
    frames = [{"camera_to_world": POSE, "fov": 90.0, "aspect": 1.5} for _ in range(6)]
    base = {
        "camera_type": "perspective",
        "render_height": 20,
        "render_width": 30,
        "camera_path": frames,
        "seconds": 0.5,
    }
    return {**base, **changes}


def save(folder: Path, content: Any) -> Path:
    path = folder / "path.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Any:
    def dataset(*names: str) -> Any:
        poses = torch.eye(4)[None, :3].repeat(len(names), 1, 1)
        poses[:, 0, 3] = torch.arange(len(names))
        cameras = Cameras(poses, fx=30.0, fy=30.0, cx=16.0, cy=12.0, width=32, height=24)
        return SimpleNamespace(cameras=cameras, image_filenames=[tmp_path / name for name in names])

    train, test = dataset("a/0.png", "a/1.png", "b/0.png"), dataset("c/7.png")
    manager = SimpleNamespace(train_dataset=train, eval_dataset=test)
    return Photos(model=None, manager=manager)  # type: ignore[arg-type]


def test_camera_path(tmp_path: Path) -> None:
    path = read_path(save(tmp_path, path_json()))
    assert path.fps == 12.0 and not path.has_crop
    views = path.views()
    assert [view.name for view in views][:2] == ["frame-00000", "frame-00001"] and len(views) == 6
    camera = views[0].camera
    assert (int(camera.width), int(camera.height)) == (30, 20) and views[0].photo is None
    np.testing.assert_allclose(camera.camera_to_worlds[0], np.reshape(POSE, (4, 4))[:3])
    assert float(camera.fy) == pytest.approx(10.0)  # a field of view of 90° over 20 rows


def test_camera_path_without_a_length_or_with_a_crop(tmp_path: Path) -> None:
    path = read_path(save(tmp_path, path_json(seconds=0, fps=30.0, crop={"crop_center": [0, 0, 0]})))
    assert path.fps == 30.0 and path.has_crop
    assert read_path(save(tmp_path, path_json(seconds=None))).fps == 24.0


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        path_json(camera_path=[]),
        path_json(render_width=0),
        path_json(render_height="tall"),
        path_json(camera_path=[{"camera_to_world": POSE[:15], "fov": 90.0}]),
        path_json(camera_path=[{"camera_to_world": ["x"] * 16, "fov": 90.0}]),
        path_json(camera_path=[{"camera_to_world": [*POSE[:15], 1e999], "fov": 90.0}][:1] + [{"fov": 3}]),
        path_json(camera_path=[{"camera_to_world": [float("nan"), *POSE[1:]], "fov": 90.0}]),
        path_json(camera_path=[{"camera_to_world": POSE, "fov": 0.0}]),
    ],
)
def test_what_is_no_camera_path(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ConfigError, match=r"path\.json .*: save (one|it)"):
        read_path(save(tmp_path, content))


def test_missing_camera_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no camera path"):
        read_path(tmp_path / "none.json")


def test_photos(photos: Any) -> None:
    assert [view.photo for view in photo_views(photos, "all")] == [
        ("train", 0),
        ("train", 1),
        ("train", 2),
        ("test", 0),
    ]
    assert [view.name for view in photo_views(photos, "test")] == ["7"]
    (one,) = photo_views(photos, "1.png")
    assert one.photo == ("train", 1) and float(one.camera.camera_to_worlds[0, 0, 3]) == 1.0


def test_photos_of_the_same_name_get_names_of_their_own(photos: Any) -> None:
    assert [view.name for view in photo_views(photos, "train")] == ["0-train-0000", "1", "0-train-0002"]


def test_scale_leaves_the_capture_as_it_is(photos: Any) -> None:
    (view,) = photo_views(photos, "test", scale=0.5)
    assert (int(view.camera.width), int(view.camera.height), float(view.camera.fx)) == (16, 12, 15.0)
    assert int(photos.cameras("test").width[0]) == 32
    with pytest.raises(ConfigError, match="leaves nothing"):
        photo_views(photos, "test", scale=0.01)


def test_all_without_held_out_photos(photos: Any) -> None:
    photos.manager.eval_dataset = None
    assert len(photo_views(photos, "all")) == 3
    with pytest.raises(ConfigError, match="no held-out photos"):
        photo_views(photos, "test")


def test_unknown_views(photos: Any) -> None:
    with pytest.raises(ConfigError, match=r"no views 'tset': give all, train, test"):
        photo_views(photos, "tset")
