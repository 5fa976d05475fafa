"""Cameras to look from: of 3DGS, of captures, and made up for a content."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CaptureError, MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.texture.photos import PhotoSource
from f3rm_ext.preview.cameras import (
    NamedCamera,
    extent_of,
    find_cameras_file,
    nerfstudio_cameras,
    overview,
    read_cameras_file,
    source_cameras,
)
from f3rm_ext.preview.content import Content

ENTRY = {
    "id": 0, "img_name": "a.jpg", "width": 200, "height": 100, "position": [5.0, 0.0, 0.0],
    "rotation": [[0.0, 0.0, -1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], "fx": 90.0, "fy": 80.0,
}  # fmt: skip
"""Looks along -x; its right is along z."""


def test_cameras_of_3dgs(tmp_path: Path) -> None:
    folder = tmp_path / "point_cloud" / "iteration_7"
    folder.mkdir(parents=True)
    assert find_cameras_file(folder / "point_cloud.ply") is None
    (tmp_path / "cameras.json").write_text(json.dumps([ENTRY]))
    found = find_cameras_file(folder / "point_cloud.ply")
    assert found == tmp_path / "cameras.json"
    (named,) = read_cameras_file(found)
    pixels, depth = named.camera.project(np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]))
    assert named.name == "a.jpg" and depth.tolist() == [5, 5]
    np.testing.assert_allclose(pixels, [[100, 50], [100 + 2 / 5 * 90, 50 + 1 / 5 * 80]])


@pytest.mark.parametrize(
    "change",
    [
        {"fx": 0.0},
        {"width": -1},
        {"position": [1.0, 2.0]},
        {"position": [1e999, 0.0, 0.0]},
        {"rotation": [[1.0, 0.0, 0.0]] * 3},
        {"img_name": None},
    ],
)
def test_files_of_another_kind(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "cameras.json").write_text(json.dumps([ENTRY | change]))
    with pytest.raises(CaptureError, match=r"cameras\.json"):
        read_cameras_file(tmp_path / "cameras.json")


def test_photos_of_the_same_name_are_told_apart() -> None:
    cameras = nerfstudio_cameras([overview(np.eye(3))] * 2)
    outputs = SimpleNamespace(cameras=cameras, image_filenames=[Path("rig/right/1.jpg"), Path("rig/left/1.jpg")])
    source, content = source_of(outputs), Content("1 point", np.eye(3), "z")
    assert [named.name for named in source_cameras(source, content, "scene")] == ["left/1.jpg", "right/1.jpg"]


def source_of(outputs: SimpleNamespace) -> PhotoSource:
    """A capture whose scene frame is its own."""
    outputs.dataparser_transform, outputs.dataparser_scale = np.eye(4)[:3], 1.0
    return PhotoSource(SimpleNamespace(get_dataparser_outputs=lambda split: outputs), Path("capture"))


def test_cameras_of_another_capture_are_refused() -> None:
    outputs = SimpleNamespace(cameras=nerfstudio_cameras([overview(np.eye(3))]), image_filenames=[Path("1.jpg")])
    own, other = (CaptureFrame(np.eye(3), np.array([x, 0.0, 0.0]), 1.0).describe() for x in (0.0, 5.0))
    for record, frame in ((own, "auto"), (other, "scene"), ({}, "auto")):
        content = Content("1 point", np.eye(3), "z", record={"frame": "scene", **record})
        assert len(source_cameras(source_of(outputs), content, frame)) == 1
    content = Content("1 point", np.eye(3), "z", path=Path("a.ply"), record={"frame": "scene", **other})
    with pytest.raises(MeshError, match=r"a\.ply .*another capture"):
        source_cameras(source_of(outputs), content)


def test_an_overview_sees_the_content_upright() -> None:
    places = np.random.default_rng(0).uniform(-1, 1, (500, 3)) * [1, 3, 0.5] + [7, 8, 9]
    camera = overview(places).camera
    np.testing.assert_allclose(camera.rotation @ camera.rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(camera.rotation) == pytest.approx(1)
    pixels, depth = camera.project(places)
    inside = (pixels > 0).all(axis=1) & (pixels < [camera.width, camera.height]).all(axis=1) & (depth > 0)
    assert inside.mean() > 0.9
    (low, high), _ = camera.project(extent_of(places)[0] + np.array([[0, 0, -0.1], [0, 0, 0.1]]))
    assert high[1] < low[1], "up is up"
    spread = np.ptp(pixels[inside], axis=0)
    assert spread.max() > 0.5 * camera.height, "and fills the picture"


def test_cameras_turn_with_the_content_and_become_those_of_nerfstudio() -> None:
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    point = np.array([[0.3, -0.2, 0.1]])
    camera = overview(np.random.default_rng(1).normal(size=(50, 3))).camera._replace(middle=np.array([300.0, 400.0]))
    turned = NamedCamera("a", camera).turn(turn).camera
    np.testing.assert_allclose(turned.project(point @ turn.T)[0], camera.project(point)[0])
    again = Camera.of(PinholeCameras.of(nerfstudio_cameras([NamedCamera("a", camera)])), 0)
    np.testing.assert_allclose(again.project(point)[0], camera.project(point)[0], rtol=1e-4)
    assert (again.width, again.height) == (camera.width, camera.height)
