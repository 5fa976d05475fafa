"""The files of a capture agree with each other: images, depth, normals, labels, mesh and poses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import CaptureError
from f3rm_ext.synthetic import SynthConfig, synthesize
from f3rm_ext.synthetic.capture_files import GENERATOR, encode_depth, encode_normals, replace_capture
from f3rm_ext.synthetic.world import LOOK_AT


def test_depth_lies_on_the_mesh_where_the_labels_say(
    capture: SimpleNamespace, unproject: Callable[..., np.ndarray]
) -> None:
    """Depth is rounded to millimetres: unprojected it is half of one, along the ray, off the mesh."""
    from trimesh import Trimesh
    from trimesh.proximity import closest_point

    near = Trimesh(capture.mesh["vertices"], capture.mesh["faces"], process=False)
    for k in (0, 5):
        rows, cols = np.random.default_rng(k).integers((0, 0), (32, 48), (20, 2)).T
        _, distance, face = closest_point(near, unproject(capture, k)[rows, cols])
        assert distance.max() < 8e-4
        # Where two things touch, the rounding may pick the other one.
        assert (capture.mesh["face_label"][face] == capture.labels[k][rows, cols]).mean() > 0.9


def test_normals_agree_with_depth(capture: SimpleNamespace, unproject: Callable[..., np.ndarray]) -> None:
    """On the floor, walls and table top neighbouring points span a plane across the normal."""
    flat = [t["label"] for t in capture.scene["objects"] if t["name"] in ("floor", "walls", "rug")]
    for k in (1, 4):
        points, labels, normals = unproject(capture, k), capture.labels[k], capture.normals[k]
        right, down = points[:-1, 1:] - points[:-1, :-1], points[1:, :-1] - points[:-1, :-1]
        cross = np.cross(down, right)
        cosine = (cross * normals[:-1, :-1]).sum(-1) / np.linalg.norm(cross, axis=-1)
        same = (labels[:-1, :-1] == labels[:-1, 1:]) & (labels[:-1, :-1] == labels[1:, :-1])
        assert np.median(cosine[same & np.isin(labels[:-1, :-1], flat)]) > 0.995


def test_poses_are_rigid_and_look_at_the_centre(capture: SimpleNamespace) -> None:
    rotation = capture.poses[:, :3, :3]
    np.testing.assert_allclose(rotation @ rotation.transpose(0, 2, 1), np.tile(np.eye(3), (10, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rotation), 1)
    np.testing.assert_array_equal(capture.poses[:, 3], np.tile([0, 0, 0, 1], (10, 1)))
    assert capture.scene["look_at"] == list(LOOK_AT)
    # OpenGL: what the camera looks at lies on its negative z axis, and the world's up is up in the picture.
    in_camera = np.einsum("nji,nj->ni", rotation, np.array(LOOK_AT) - capture.poses[:, :3, 3])
    np.testing.assert_allclose(in_camera[:, :2], 0, atol=1e-12)
    assert (in_camera[:, 2] < -1).all() and (rotation[:, 2, 1] > 0.5).all()


def test_split_is_complete_and_disjoint(capture: SimpleNamespace) -> None:
    info = capture.transforms
    train, val, test = (info[f"{split}_filenames"] for split in ("train", "val", "test"))
    assert val == test and test and not set(train) & set(test)
    assert sorted(train + test) == sorted(frame["file_path"] for frame in info["frames"])
    assert {f["file_path"] for f in info["frames"] if f["split"] == "test"} == set(test)


def test_nerfstudio_reads_it(capture: SimpleNamespace) -> None:
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    parser = NerfstudioDataParserConfig(
        data=capture.path, orientation_method="none", center_method="none", auto_scale_poses=False, downscale_factor=1
    ).setup()
    train, val = parser.get_dataparser_outputs("train"), parser.get_dataparser_outputs("val")
    assert len(train.image_filenames) + len(val.image_filenames) == 10
    index = [f["file_path"] for f in capture.transforms["frames"]].index(f"images/{val.image_filenames[0].name}")
    np.testing.assert_allclose(val.cameras.camera_to_worlds[0].numpy(), capture.poses[index, :3], atol=1e-6)
    assert train.metadata["depth_unit_scale_factor"] == capture.transforms["depth_unit_scale_factor"]
    # nerfstudio's own rays and the depth meet the mesh's floor at z = 0.
    rays = val.cameras.generate_rays(0).flatten()
    depth = capture.depth_m[index].reshape(-1, 1)
    steps = depth * rays.metadata["directions_norm"].numpy()
    points = rays.origins.numpy() + rays.directions.numpy() * steps
    floor = next(t["label"] for t in capture.scene["objects"] if t["name"] == "floor")
    on_floor = capture.labels[index].reshape(-1) == floor
    assert on_floor.any()
    np.testing.assert_allclose(points[on_floor, 2], 0, atol=1e-3)


def test_mesh_files_agree(capture: SimpleNamespace) -> None:
    loaded = trimesh.load(capture.path / "gt_mesh.ply", process=False)
    np.testing.assert_array_equal(loaded.vertices.astype(np.float32), capture.mesh["vertices"])
    np.testing.assert_array_equal(loaded.faces, capture.mesh["faces"])
    np.testing.assert_array_equal(loaded.visual.vertex_colors[:, :3], capture.mesh["vertex_color"])
    raw = loaded.metadata["_ply_raw"]["vertex"]["data"]
    np.testing.assert_array_equal(np.asarray(raw["label"]).ravel(), capture.mesh["vertex_label"])


def test_names_are_the_same_everywhere(capture: SimpleNamespace) -> None:
    lines = (capture.path / "classes.txt").read_text().splitlines()
    names = capture.transforms["classes"]
    assert lines == [f"{i} {name}" for i, name in enumerate(names)]
    assert json.loads((capture.path / "classes.json").read_text()) == {str(i): name for i, name in enumerate(names)}
    assert {t["label"]: t["name"] for t in capture.scene["objects"]} == dict(enumerate(names[1:], start=1))
    assert capture.labels.max() < len(names) and (capture.labels > 0).all()


def test_encodings() -> None:
    np.testing.assert_array_equal(encode_depth(np.array([[0.0, 1.2344, 1.2346, 100.0]])), [[0, 1234, 1235, 65535]])
    normals = np.array([[[0.0, 0.0, 1.0], [-1.0, 0.6, 0.8], [0.0, 0.0, 0.0]]])
    np.testing.assert_array_equal(encode_normals(normals)[0], [[128, 128, 255], [0, 204, 230], [128, 128, 128]])


def test_folder_in_use_is_left_alone(tmp_path: Path, tiny_config: Callable[..., SynthConfig]) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CaptureError, match=re.escape(str(tmp_path))):
            synthesize(tmp_path, tiny_config(overwrite=overwrite))
    with pytest.raises(CaptureError, match="not a folder"):
        synthesize(tmp_path / "photo.jpg", tiny_config(overwrite=True))
    with pytest.raises(CaptureError, match="Cannot write"):
        synthesize(tmp_path / ("long" * 99), tiny_config())
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"] and (tmp_path / "photo.jpg").read_text() == "mine"


@pytest.mark.usefixtures("ready_scene")
def test_overwrite_replaces_a_capture_and_keeps_other_files(
    tmp_path: Path, tiny_config: Callable[..., SynthConfig]
) -> None:
    out = synthesize(tmp_path / "room", tiny_config(num_images=3))
    (out / "features").mkdir()
    (out / "features" / "notes.txt").write_text("mine")
    synthesize(out, tiny_config(num_images=4, overwrite=True))
    assert len(list((out / "images").iterdir())) == 4
    assert (out / "features" / "notes.txt").read_text() == "mine"
    (out / "images" / "photo.jpg").write_text("mine")
    with pytest.raises(CaptureError, match=r"photo\.jpg"):
        synthesize(out, tiny_config(num_images=3, overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["room"]


@pytest.mark.parametrize("last", [1, 3, 5])
def test_a_replacement_that_fails_leaves_the_capture_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    def fill(folder: Path, content: str) -> None:
        for name in ("classes.txt", "scene.json", "transforms.json"):
            (folder / name).write_text(content)

    out, moves, rename = tmp_path / "room", 0, Path.rename
    with replace_capture(out, overwrite=False) as folder:
        fill(folder, json.dumps({"generator": GENERATOR}))
    before = {path.name: path.read_text() for path in out.iterdir()}

    def fail(path: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves == last:
            raise OSError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CaptureError, match="Permission denied"), replace_capture(out, overwrite=True) as folder:
        fill(folder, "new")
    assert {path.name: path.read_text() for path in out.iterdir()} == before


@pytest.mark.usefixtures("ready_scene")
def test_a_folder_that_is_there_stays_the_same_one(tmp_path: Path, tiny_config: Callable[..., SynthConfig]) -> None:
    """It may be a shell's working folder, a mount point or behind a link."""
    out, link = tmp_path / "room", tmp_path / "link"
    (out / ".f3rm-ext-partial-1" / "images").mkdir(parents=True)  # of a run that was killed
    link.symlink_to(out)
    inode = out.stat().st_ino
    for overwrite in (False, True):
        synthesize(link, tiny_config(num_images=3, overwrite=overwrite))
        assert out.stat().st_ino == inode and link.is_symlink() and len(list((out / "images").iterdir())) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "room"]
    assert ".f3rm-ext-partial-1" in [path.name for path in out.iterdir()] and len(list(out.iterdir())) == 11


@pytest.mark.usefixtures("ready_scene")
@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("bug")])
def test_trouble_half_way_leaves_nothing(
    tmp_path: Path,
    tiny_config: Callable[..., SynthConfig],
    monkeypatch: pytest.MonkeyPatch,
    trouble: BaseException,
) -> None:
    from f3rm_ext.synthetic import capture_files as files

    written = []

    def fail_at_the_third(path: Path, pixels: np.ndarray) -> None:
        written.append(path)
        if len(written) == 3:
            raise trouble

    monkeypatch.setattr(files, "write_png", fail_at_the_third)
    expected = CaptureError if isinstance(trouble, OSError) else type(trouble)
    with pytest.raises(expected) as caught:
        synthesize(tmp_path / "room", tiny_config(num_images=3))
    assert not isinstance(trouble, OSError) or "No space left" in str(caught.value)
    assert len(written) == 3 and list(tmp_path.iterdir()) == []
