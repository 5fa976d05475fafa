"""Photos enter COLMAP's database once, and share cameras as they are told to."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.database import FeatureDatabase

pycolmap = pytest.importorskip("pycolmap")


@pytest.fixture
def database(tmp_path: Path) -> FeatureDatabase:
    """An empty one, beside 24 photos of one size and two of another."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(26):
        Image.new("RGB", (64, 48) if number < 24 else (48, 64)).save(images / f"{number}.png")
    return FeatureDatabase(tmp_path / "database.db", images, tmp_path / "masks", 500, 500)


def cameras_of(database: FeatureDatabase) -> dict[str, tuple[int, str, float]]:
    """Camera, model and focal length of each photo."""
    with database.open() as opened:
        cameras = {camera.camera_id: camera for camera in opened.read_all_cameras()}
        found = {}
        for image in opened.read_all_images():
            camera = cameras[image.camera_id]
            found[image.name] = (image.camera_id, camera.model.name, camera.mean_focal_length())
        return found


def test_two_cameras_in_one_folder(database: FeatureDatabase) -> None:
    wanted = {f"{i}.png": "wide" if i < 24 else "tall" for i in range(26)}
    database.add_photos(wanted, "auto", {"24.png": 70.0, "25.png": 74.0})
    found = cameras_of(database)
    assert found.keys() == wanted.keys() and len({camera for camera, *_ in found.values()}) == 2
    assert {found["0.png"][1:], found["23.png"][1:]} == {("OPENCV", 1.2 * 64)}
    assert {found["24.png"][1:], found["25.png"][1:]} == {("SIMPLE_RADIAL", 72.0)}


def test_a_predicted_focal_length_counts_where_no_other_is_known(database: FeatureDatabase) -> None:
    for number, tags in ((1, {37386: 5.0, 41989: 45}), (2, {37386: 5.0})):  # 45 mm as on film; 5 mm alone
        exif = Image.Exif()
        exif.get_ifd(0x8769).update(tags)
        Image.new("RGB", (64, 48)).save(database.images / f"{number}.jpg", exif=exif)
    wanted = {name: name for name in ("0.png", "1.jpg", "2.jpg", "3.png")}
    database.add_photos(wanted, "auto", {"0.png": 70.0}, dict.fromkeys(wanted, 50.0))
    found = {name: focal for name, (*_, focal) in cameras_of(database).items()}
    assert found == {
        "0.png": 70.0,
        "1.jpg": pytest.approx(45 * 80 / np.hypot(36, 24), rel=1e-3),
        "2.jpg": 50.0,
        "3.png": 50.0,
    }


def test_photos_that_come_later_share_the_camera_and_the_rest_stays(database: FeatureDatabase) -> None:
    few = {f"{i}.png": "wide" for i in range(3)}
    database.add_photos(few, "pinhole", {})
    database.find_features(list(few), lambda *_: None)
    before = cameras_of(database)
    database.add_photos({**few, "3.png": "wide", "4.png": "another"}, "pinhole", {})
    after = cameras_of(database)
    assert {name: after[name] for name in few} == before and after["3.png"] == before["0.png"]
    assert after["4.png"][0] != before["0.png"][0]
    with database.open() as opened:
        assert opened.num_rigs() == 2 and opened.num_frames() == 5
        assert all(opened.exists_descriptors(database.ids()[name]) for name in few)
    database.add_photos({**few, "5.png": "a third"}, "pinhole", {})
    assert cameras_of(database).keys() == {f"{i}.png" for i in range(6)}, "no other file of the folder"
    file = database.path.stat().st_ino
    database.add_photos({**few, "3.png": "wide"}, "pinhole", {})
    assert database.path.stat().st_ino == file, "nothing was new"


def test_a_killed_addition_leaves_the_database_as_it_was(
    database: FeatureDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("database or disk is full")

    database.add_photos({"0.png": "wide"}, "auto", {})
    monkeypatch.setattr(pycolmap, "import_images", killed)
    with pytest.raises(CaptureError, match=r"COLMAP.*disk"):
        database.add_photos({"0.png": "wide", "1.png": "wide"}, "auto", {})
    assert list(database.ids()) == ["0.png"]


def test_a_damaged_database_is_no_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "database.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(CaptureError, match=r"database\.db.*--start-over") as error:
        FeatureDatabase(path, tmp_path, tmp_path, 1000, 1000).ids()
    assert "disk" not in str(error.value)
