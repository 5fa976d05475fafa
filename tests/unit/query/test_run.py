"""Opening runs: where they lie, their features, what cannot be opened; and views of photos and camera paths."""

import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import CheckpointError, ConfigError, FeatureStoreError
from f3rm_ext.query.run import Photos, Run, load_run, photo_views, read_camera_path


def copy_of(untrained: Any, folder: Path) -> Path:
    """The config.yml of a copy of the run."""
    shutil.copytree(untrained.folder, folder, copy_function=os.link)
    return folder / "config.yml"


def photos(run: Run) -> Photos:
    """The same with nothing opened yet."""
    return Photos(run.model, run.manager)


def test_a_run_knows_where_it_comes_from(run, untrained, tiny_capture) -> None:
    assert run.checkpoint.resolve() == untrained.checkpoints / "step-000000000.ckpt" and run.step == 0
    assert run.describe() == {"checkpoint": str(run.checkpoint.resolve()), "step": 0, "method": "f3rm-ext-lite"}
    assert run.data == tiny_capture and not run.model.training


def test_splits(run) -> None:
    assert [file.name for file in run.files("test")] == ["frame_00003.png", "frame_00007.png", "frame_00011.png"]
    assert len(run.files("train")) == 9 == len(run.cameras("train"))
    photo = run.photo("test", 1)
    assert photo.shape == (48, 64, 3) and photo.dtype == np.uint8


def test_transparent_photos_can_be_laid_over_what_renderings_have_behind_them(run, monkeypatch) -> None:
    clear = np.zeros((48, 64, 4), np.uint8)
    monkeypatch.setattr(type(run.dataset("test")), "get_numpy_image", lambda self, index: clear)
    assert (run.photo("test", 1) == 255).all()
    for color, value in (("white", 255), ("black", 0), ("random", 0)):
        monkeypatch.setattr(run.model.renderer_rgb, "background_color", color)
        assert (run.photo("test", 1, rendered=True) == value).all(), color


def test_photos_are_found(run, monkeypatch) -> None:
    file = run.files("test")[1]
    for name in (file.name, f"images/{file.name}", str(file)):
        assert run.find_photo(name) == ("test", 1), name
    monkeypatch.chdir(file.parent)
    assert run.find_photo(f"../images/{file.name}") == ("test", 1)
    for name in ("nowhere.png", f"other/{file.name}", "", "images"):
        assert run.find_photo(name) is None, name


def test_photos_of_the_same_name_are_told_apart_by_folder(run, monkeypatch) -> None:
    files = {"train": [Path("/c/left/1.png"), Path("/c/right/1.png")], "test": [Path("/c/top/1.png")]}
    monkeypatch.setattr(Photos, "files", lambda self, split: files[split])
    notes: list[str] = []
    monkeypatch.setattr("f3rm_ext.query.run.note", notes.append)
    assert run.find_photo("right/1.png") == ("train", 1) and run.find_photo("top/1.png") == ("test", 0)
    assert not notes
    assert run.find_photo("1.png") == ("train", 0)
    assert len(notes) == 1 and notes[0].index("left/1.png") < notes[0].index("right/1.png")


def test_features_come_from_the_store(run, watch_calls) -> None:
    import f3rm_ext.features.source as source

    made = watch_calls(source, "prepare_features"), watch_calls(source, "build_extractor")
    for split in ("train", "test"):
        found = photos(run).feature_map(split, 0, "")
        assert found.values.shape[:2] == (48, 64) and np.allclose(found.values.sum(axis=2), 1)
    named = photos(run).feature_map("train", 0, "labels")
    np.testing.assert_array_equal(named.values, photos(run).feature_map("train", 0, "").values)
    with pytest.raises(ConfigError, match="no feature 'clip'"):
        photos(run).feature_map("train", 0, "clip")
    assert made == ([], [])


def test_features_that_are_gone_are_made_again(run, tmp_path, monkeypatch) -> None:
    before = run.feature_map("test", 0, "").values
    monkeypatch.setattr(run.manager.config.features, "cache_dir", tmp_path)
    np.testing.assert_array_equal(photos(run).feature_map("test", 0, "").values, before)
    assert list(tmp_path.rglob("*.npy"))


def test_other_features_than_those_distilled_are_refused(run, tmp_path, monkeypatch) -> None:
    """The store is gone and the extractor has other weights by now."""
    head = run.model.feature_field.head("labels")
    monkeypatch.setattr(run.manager.config.features, "cache_dir", tmp_path)
    monkeypatch.setattr(head, "identity", {**head.identity, "weights": "0123456789abcdef"})
    with pytest.raises(FeatureStoreError, match=r"'labels'"):
        photos(run).feature_map("train", 0, "")


@pytest.mark.parametrize(("turn", "same"), [(0.001, True), (0.3, False), (None, False)])
def test_codes_of_another_basis_are_refused(run, monkeypatch, turn, same) -> None:
    import f3rm_ext.features.source as source

    head = copy.deepcopy(run.model.feature_field.head("labels"))
    plain = head.spec
    rows = torch.eye(head.dim)[:8]
    head.code_basis = rows
    mixed = None
    if turn is not None:
        mixed = rows.clone()
        mixed[0, :2] = torch.tensor([np.cos(turn), np.sin(turn)])
        mixed[1, :2] = torch.tensor([-np.sin(turn), np.cos(turn)])
    stored = run.feature_map("train", 3, "")

    class TensorStorage:
        specs = (replace(plain, code_basis=mixed),)

        def load(self, index: int) -> dict[str, Any]:
            return {"labels": stored}

    monkeypatch.setattr(source, "open_features", lambda datasets, specs, cache: [TensorStorage() for _ in datasets])
    opened = Photos(SimpleNamespace(query_heads=lambda: {"labels": head}, device="cpu"), run.manager)
    if same:
        assert opened.feature_map("train", 3, "") is stored
    else:
        with pytest.raises(FeatureStoreError, match="basis"):
            opened.feature_map("train", 3, "")


def test_captures_without_held_out_photos(run, monkeypatch) -> None:
    monkeypatch.setattr(run.manager, "eval_dataset", None)
    assert run.find_photo("frame_00003.png") is None
    for get in (run.files, run.cameras, lambda split: photos(run).feature_map(split, 0, "")):
        with pytest.raises(ConfigError, match="held-out"):
            get("test")
    assert photos(run).feature_map("train", 0, "").values.shape[:2] == (48, 64)


@pytest.mark.parametrize("place", ["elsewhere/e/f3rm-ext-lite/t", "renamed"])
def test_a_run_that_was_moved_is_found_with_its_own_checkpoint(untrained, tmp_path, place) -> None:
    config = copy_of(untrained, tmp_path / place)
    (config.parent / "nerfstudio_models" / "step-000000000.ckpt").rename(
        config.parent / "nerfstudio_models" / "step-000000007.ckpt"
    )
    moved = load_run(config)
    assert moved.checkpoint == config.parent / "nerfstudio_models" / "step-000000007.ckpt"
    (link := tmp_path / "link.yml").symlink_to(config)
    assert load_run(link).checkpoint == moved.checkpoint


def test_the_newest_whole_checkpoint_counts_and_other_files_do_not(untrained, tmp_path) -> None:
    config = copy_of(untrained, tmp_path / "e" / "f3rm-ext-lite" / "t")
    folder = config.parent / "nerfstudio_models"
    (folder / "step-000000009.ckpt").write_bytes(b"cut short")
    (folder / ".step-000000009.ckpt.1-ab.tmp").touch()
    (folder / "notes.txt").touch()
    assert load_run(config).checkpoint == folder / "step-000000000.ckpt"


def test_there_is_no_file_or_no_checkpoint(untrained, tmp_path) -> None:
    config = copy_of(untrained, tmp_path / "t")
    for path in (tmp_path / "config.yml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_run(path)
    for path in (config.parent / "nerfstudio_models").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_run(config)
    (config.parent / "nerfstudio_models" / "step-000000000.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        load_run(config)


def test_runs_of_other_methods_are_refused_before_anything_is_loaded(untrained, tmp_path) -> None:
    """Such as one of nerfacto, whose capture does not even exist."""
    from nerfstudio.configs.method_configs import method_configs

    config = copy_of(untrained, tmp_path / "t")
    config.unlink()
    config.write_text(yaml.dump(method_configs["nerfacto"]))
    with pytest.raises(ConfigError, match="nerfacto"):
        load_run(config)


# --- views ------------------------------------------------------------------------------------------------------------


POSE = [1.0, 0, 0, 0.1, 0, 1, 0, 0.2, 0, 0, 1, 0.3, 0, 0, 0, 1]


def path_json(**changes: Any) -> dict[str, Any]:
    frames = [{"camera_to_world": POSE, "fov": 90.0, "aspect": 1.5} for _ in range(6)]
    size = {"render_height": 20, "render_width": 30}
    return {"camera_type": "perspective", **size, "camera_path": frames, "seconds": 0.5, **changes}


def save(folder: Path, content: Any) -> Path:
    path = folder / "path.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def capture(tmp_path: Path) -> Any:
    def dataset(*names: str) -> Any:
        poses = torch.eye(4)[None, :3].repeat(len(names), 1, 1)
        poses[:, 0, 3] = torch.arange(len(names))
        cameras = Cameras(poses, fx=30.0, fy=30.0, cx=16.0, cy=12.0, width=32, height=24)
        return SimpleNamespace(cameras=cameras, image_filenames=[tmp_path / name for name in names])

    train, test = dataset("a/0.png", "a/1.png", "b/0.png"), dataset("c/7.png")
    manager = SimpleNamespace(train_dataset=train, eval_dataset=test)
    return Photos(model=None, manager=manager)  # type: ignore[arg-type]


def test_camera_path(tmp_path) -> None:
    path = read_camera_path(save(tmp_path, path_json()))
    assert path.fps == 12.0 and not path.has_crop
    views = path.views()
    assert [view.name for view in views][:2] == ["frame-00000", "frame-00001"] and len(views) == 6
    camera = views[0].camera
    assert (int(camera.width), int(camera.height)) == (30, 20) and views[0].photo is None
    np.testing.assert_allclose(camera.camera_to_worlds[0], np.reshape(POSE, (4, 4))[:3])
    assert float(camera.fy) == pytest.approx(10.0)  # a field of view of 90° over 20 rows
    path = read_camera_path(save(tmp_path, path_json(seconds=0, fps=30.0, crop={"crop_center": [0, 0, 0]})))
    assert path.fps == 30.0 and path.has_crop
    assert read_camera_path(save(tmp_path, path_json(seconds=None))).fps == 24.0


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
def test_what_is_no_camera_path(tmp_path, content) -> None:
    with pytest.raises(ConfigError, match=r"path\.json"):
        read_camera_path(save(tmp_path, content))
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_camera_path(tmp_path / "none.json")


def test_photos(capture) -> None:
    everything = photo_views(capture, "all")
    assert [view.photo for view in everything] == [("train", 0), ("train", 1), ("train", 2), ("test", 0)]
    assert [view.name for view in everything] == ["0-train-0000", "1", "0-train-0002", "7"]
    assert photo_views(capture, "auto")[0].photo == ("test", 0)
    (one,) = photo_views(capture, "1.png")
    assert one.photo == ("train", 1) and float(one.camera.camera_to_worlds[0, 0, 3]) == 1.0
    with pytest.raises(ConfigError, match=r"'tset'.*train, test"):
        photo_views(capture, "tset")
    capture.manager.eval_dataset = None
    assert len(photo_views(capture, "all")) == len(photo_views(capture, "auto")) == 3
    with pytest.raises(ConfigError, match="held-out"):
        photo_views(capture, "test")


def test_scale_leaves_the_capture_as_it_is(capture) -> None:
    (view,) = photo_views(capture, "test", scale=0.5)
    assert (int(view.camera.width), int(view.camera.height), float(view.camera.fx)) == (16, 12, 15.0)
    assert int(capture.cameras("test").width[0]) == 32
    with pytest.raises(ConfigError, match="scale"):
        photo_views(capture, "test", scale=0.01)


@pytest.mark.parametrize(
    "text", ["", "a: 1", ": : :\n\t-", "!!python/object:nowhere.Config {}", "!!python/object:f3rm_ext.Missing {}"]
)
def test_a_config_that_is_none(untrained, tmp_path, text) -> None:
    config = copy_of(untrained, tmp_path / "t")
    config.unlink()
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yml"):
        load_run(config)
