"""``import f3rm_ext``: README's own lines, on a small run of a field and of splats; and what cannot work."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial import KDTree

import f3rm_ext
from f3rm_ext.errors import ConfigError, UserError

README = Path(__file__).parents[2] / "README.md"
RUN = Path("outputs/capture/f3rm-ext/2026-01-01_120000")


@pytest.fixture(scope="module")
def labelled_field(train: Callable[..., Any], tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of a field with the capture's classes as features."""
    labels = ("--pipeline.datamanager.features.extractors", f"labels:data={tiny_capture}")
    return train(tmp_path_factory.mktemp("face"), 60, *labels)


@pytest.fixture(params=["labelled_field", "labelled_splats"])
def run_folder(request: pytest.FixtureRequest) -> Path:
    """A run of a field, and one of splats."""
    return request.getfixturevalue(request.param).folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of COLMAP's own made-up scene."""
    pycolmap = pytest.importorskip("pycolmap")
    folder = tmp_path_factory.mktemp("made") / "photos"
    folder.mkdir()
    pycolmap.set_random_seed(0)
    truth = pycolmap.synthesize_dataset(
        pycolmap.SyntheticDatasetOptions(
            num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=8, num_points3D=150, camera_width=640,
            camera_height=480, camera_model_id=pycolmap.CameraModelId.PINHOLE,
            camera_params=[800.0, 800.0, 320.0, 240.0],
        )
    )  # fmt: skip
    for image in truth.images.values():
        image.name = f"{image.image_id:05d}.png"
    pycolmap.synthesize_images(pycolmap.SyntheticImageOptions(feature_patch_radius=12), truth, folder)
    return folder


def readme_blocks() -> list[str]:
    """The Python of README: a run that is there, and photos alone."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 2
    return blocks


def test_readme_on_a_run(run_folder: Path, tiny_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.parent.mkdir(parents=True)
    RUN.symlink_to(run_folder)
    seen: dict[str, Any] = {}
    exec(compile(readme_blocks()[0], str(README), "exec"), seen)

    run, best, outputs = seen["run"], seen["best"], seen["outputs"]
    assert run.features == ("labels",)
    height, width = best.scores.shape
    assert best.rgb.shape == (height, width, 3) and 0 <= best.scores.min() <= best.scores.max() <= 1
    col, row = (int(value) for value in best.pixel)
    assert best.scores[row, col] == best.score == best.scores.max()
    matches = run.query("mug")
    assert len(repr(matches[0])) < 200, "a notebook shows it"
    assert matches[0].view == best.view and len(matches) == len(run.cameras("test"))
    assert [match.score for match in matches] == sorted((match.score for match in matches), reverse=True)
    if best.position is not None:  # the place projects to the pixel
        pose = best.camera.camera_to_worlds[0].numpy().astype(np.float64)
        x, y, z = pose[:, :3].T @ (run.frame.to_scene(np.array(best.position)) - pose[:, 3])
        px = (
            float(best.camera.fx) * x / -z + float(best.camera.cx),
            float(best.camera.fy) * y / z + float(best.camera.cy),
        )
        assert px == pytest.approx(best.pixel, abs=1e-2)

    assert outputs["rgb"].shape == (height, width, 3) and outputs["depth"].shape == (height, width, 1)
    assert torch.allclose(outputs["rgb"], run.render(run.cameras("test")[:1])["rgb"])
    mesh = seen["mesh"]
    assert Path("room.ply").is_file() and len(mesh.faces) > 0
    in_scene = run.frame.to_scene(np.asarray(mesh.vertices))
    apart, _ = KDTree(run.mesh(frame="scene").vertices).query(in_scene)  # their order is not fixed
    assert apart.max() < 1e-4 * np.ptp(in_scene)

    (example,) = run.query(
        example="frame_00001.png:20,14,16,12", views="frame_00002.png", scale=0.5, negatives=["none"]
    )
    assert example.scores.shape == (24, 32) and example.view == "frame_00002"
    for wrong in (
        run.query,
        lambda: run.query("mug", example="frame_00001.png"),
        lambda: run.query("mug", views="nowhere.jpg"),
        lambda: run.render(run.cameras("test")),
        lambda: run.cameras("val"),
        lambda: run.mesh(frame="world"),
        lambda: run.mesh(resolution_scale=float("nan")),
        lambda: run.query("mug", scale=0.0),
        lambda: f3rm_ext.load(run_folder),
        lambda: f3rm_ext.load(run_folder / "config.yml", data=tiny_capture),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_readme_on_photos(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").symlink_to(photos)
    seen: dict[str, Any] = {}
    exec(compile(readme_blocks()[1], str(README), "exec"), seen)
    found, maps = seen["poses"], seen["maps"]
    assert found.doubt is None and found.without_pose == {} and (found.capture / "transforms.json").is_file()
    assert len(found.camera_to_world) == len(maps) == 8
    for pose in found.camera_to_world.values():
        np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-6)
    rows, cols, dim = maps[0].values.shape
    assert (rows, cols) == (maps[0].grid.rows, maps[0].grid.cols) and dim > 3
    (first,) = f3rm_ext.extract_features(photos / "00001.png", "dense-daisy")
    np.testing.assert_array_equal(first.values, maps[0].values)


def test_a_mesh_with_features(run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path) -> None:
    board = trimesh.creation.box((1.6, 1.6, 0.02)).subdivide_to_size(0.05)  # about where the table is
    board.apply_translation((0.0, 0.0, 0.76))
    board.export(tmp_path / "board.ply")
    labels = f"labels:data={tiny_capture}"
    words = ("--mesh", tmp_path / "board.ply", "--data", tiny_capture, "--extractors", labels)
    run_command("f3rm-ext", "features", "lift-mesh", *words).succeeds()

    scene = f3rm_ext.load(tmp_path / "board.ply")
    best = scene.query("mug", negatives="none")[0]
    assert best.position is not None and abs(best.position[2] - 0.76) < 0.02 and -1 <= best.score <= 1
    np.testing.assert_allclose(scene.mesh().bounds, board.bounds, atol=1e-5)
    there = scene.frame.to_scene(np.asarray(board.vertices))
    np.testing.assert_allclose([there.min(0), there.max(0)], scene.mesh(frame="scene").bounds, atol=1e-5)
    with pytest.raises(ConfigError, match="vertices"):
        scene.mesh(vertices=100)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"mappr": "global"}, "'mappr'.*mapper"),
        ({"mapper": "glomap"}, "--mapper .*global"),
        ({"masks": "no such folder"}, "no such folder"),
    ],
)
def test_mistakes_are_sentences(photos: Path, tmp_path: Path, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        f3rm_ext.estimate_poses(str(photos), str(tmp_path / "capture"), **options)


def test_all_public_names_are_there() -> None:
    assert {name for name in f3rm_ext.__all__ if getattr(f3rm_ext, name, None) is None} == set()
    assert set(f3rm_ext.__all__) <= set(dir(f3rm_ext))
    with pytest.raises(AttributeError):
        _ = f3rm_ext.no_such_name
