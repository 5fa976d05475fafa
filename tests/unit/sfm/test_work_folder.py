"""The folder of a capture belongs to one command, keeps finished work, and loses nobody's files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm import work_folder
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.work_folder import NEXT, STATE, WorkFolder, file_stamp

KNOWN = {"size": [4, 3], "camera": "x", "turned": False, "blur": 0.1, "fingerprint": "00ff"}
RESULT = {
    **{"key": {}, "photos": 1, "registered": 1, "without_pose": {}, "blurred": [], "same": {}, "points": 9},
    **{"track_length": 2.0, "reprojection_error_px": 0.5, "gps_error_m": None, "doubt": ""},
}
OPTIONS = {"feature_size": 1000, "camera_model": "auto"}


def begun(out: Path, source: Path) -> WorkFolder:
    """A folder with one photo and a database."""
    work = WorkFolder(out)
    assert work.begin(OPTIONS, {"a": file_stamp(source)}) == ""
    (work.images / "a.jpg").write_bytes(b"copy")
    work.database.write_bytes(b"database")
    work.save(photos={"a.jpg": {"source": str(source), "stamp": file_stamp(source), **KNOWN}})
    return work


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"original")
    return path


def test_the_same_call_and_new_photos_keep_what_is_there(tmp_path: Path, source: Path) -> None:
    begun(tmp_path / "out", source)
    stamps = {"a": file_stamp(source)}
    for more in ({}, {"b": "1 2"}):
        again = WorkFolder(tmp_path / "out")
        assert again.begin(OPTIONS, stamps | more) == "" and again.database.exists() and list(again.photos) == ["a.jpg"]


@pytest.mark.parametrize("change", ["options", "content", "removed"])
def test_what_does_not_fit_any_more_is_done_again_and_copies_stay(tmp_path: Path, source: Path, change: str) -> None:
    begun(tmp_path / "out", source)
    again = WorkFolder(tmp_path / "out")
    options = dict(OPTIONS)
    if change == "options":
        options["feature_size"] = 500
    elif change == "content":
        source.write_bytes(b"another original")
    else:
        source = tmp_path / "other.jpg"
        source.write_bytes(b"")
    stamps = {"b" if change == "removed" else "a": file_stamp(source)}
    reason = again.begin(options, stamps)
    assert ("--feature-size" if change == "options" else str(tmp_path / "a.jpg")) in reason
    assert not again.database.exists() and not again.photos and (again.images / "a.jpg").read_bytes() == b"copy"


def finished(out: Path, source: Path) -> WorkFolder:
    """A folder with a whole capture."""
    work = begun(out, source)
    (out / "transforms.json").write_text("{}")
    (out / "sparse_pc.ply").write_bytes(b"points")
    (out / "mine.txt").write_bytes(b"mine")
    work.publish(RESULT)
    return work


def test_a_capture_stays_until_another_is_whole(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    finished(out, source)
    WorkFolder(out).begin(OPTIONS | {"feature_size": 600}, {"a": file_stamp(source)})
    assert WorkFolder(out).begin(OPTIONS, {"a": file_stamp(source)}) == "" and not (out / NEXT).exists()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    options = OPTIONS | {"feature_size": 500}
    for _ in range(2):  # the second call resumes where the first was stopped
        again = WorkFolder(out)
        assert "--feature-size" in again.begin(options, {"a": file_stamp(source)})
        assert all(path.read_bytes() == content for path, content in before.items())
        photos = again.photos
        again.images.joinpath("a.jpg").write_bytes(b"new copy")
        again.save(photos={"a.jpg": {"source": str(source), "stamp": file_stamp(source), **KNOWN}})
    assert list(photos) == ["a.jpg"]
    for name in ("transforms.json", "sparse_pc.ply", "colmap/database.db"):
        (again.out / name).write_bytes(b"new")
    (out / "colmap" / "database.db-wal").write_bytes(b"of the old one")
    again.publish(RESULT)
    assert (out / "images" / "a.jpg").read_bytes() == b"new copy" and (out / "mine.txt").read_bytes() == b"mine"
    assert {(out / name).read_bytes() for name in ("transforms.json", "colmap/database.db")} == {b"new"}
    assert not (out / "colmap" / "database.db-wal").exists() and not (out / NEXT).exists()
    assert WorkFolder(out).begin(options, {"a": file_stamp(source)}) == ""


def test_a_kill_while_the_new_capture_takes_its_place(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "out", OPTIONS | {"feature_size": 500}
    finished(out, source)
    again = WorkFolder(out)
    again.begin(options, {"a": file_stamp(source)})
    for name in ("transforms.json", "sparse_pc.ply", "colmap/database.db", "images/a.jpg"):
        (again.out / name).write_bytes(b"new")
    again.save(photos={"a.jpg": {"source": str(source), "stamp": file_stamp(source), **KNOWN}}, result=RESULT)
    moves = iter(range(2))

    def replace(one: Path, two: Path) -> None:
        if NEXT in one.parts and next(moves, None) is None:
            raise KeyboardInterrupt
        os.rename(one, two)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(work_folder.os, "replace", replace)
        again.publish(RESULT)
    assert WorkFolder(out).begin(options, {"a": file_stamp(source)}) == ""
    for name in ("transforms.json", "sparse_pc.ply", "colmap/database.db", "images/a.jpg"):
        assert (out / name).read_bytes() == b"new", name
    assert not (out / NEXT).exists()


def test_starting_over_keeps_the_capture_and_nothing_else(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    finished(out, source)
    again = WorkFolder(out)
    assert again.begin(OPTIONS, {"a": file_stamp(source)}, start_over=True)
    assert not again.photos and not again.database.exists()
    assert (out / "transforms.json").exists() and (out / "colmap" / "database.db").exists()


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"mine\.txt"):
        WorkFolder(tmp_path)
    (tmp_path / STATE).write_text('{"made_by": "something else"}')
    with pytest.raises(ConfigError, match=STATE):
        WorkFolder(tmp_path)
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"


def test_two_processes_do_not_share_a_folder(tmp_path: Path, source: Path) -> None:
    work = begun(tmp_path / "out", source)
    other = WorkFolder(tmp_path / "out")
    with work.hold():
        with pytest.raises(ConfigError, match="Another process"), other.hold():
            pass
        work.save(complete=True)
    with other.hold():
        assert other.state["complete"], "what the first one has written"


def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    work = WorkFolder(tmp_path / "out")

    fill_disk()
    with pytest.raises(ConfigError, match="No space left"):
        work.write(work.images / "a.jpg", b"data")
    assert not list(work.images.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"photos": {"a.jpg": 3}},
        {"photos": {"a.jpg": {"stamp": "1 2"}}},
        {"options": "text"},
        {"video": {"frames": [None], "wanted": {}}},
        {"result": {"key": {}}},
        {"made_by": None},
    ],
)
def test_a_state_of_another_shape_is_refused(tmp_path: Path, source: Path, change: dict[str, object]) -> None:
    state = json.loads((begun(tmp_path / "out", source).out / STATE).read_text())
    (tmp_path / "out" / STATE).write_text(json.dumps(state | change))
    with pytest.raises(ConfigError, match=STATE):
        WorkFolder(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": "out"}, "--output"),
        ({"images": "out/photos"}, "--output"),
        ({"video": "v.mp4", "num_frames": 1}, "--num-frames is 1"),
        ({"video": "v.mp4", "masks": "masks"}, "--masks"),
        ({"video": "v.mp4", "images": "photos"}, "--images and --video"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    (tmp_path / "out" / "photos").mkdir(parents=True)
    (tmp_path / "v.mp4").write_bytes(b"")
    given = {name: tmp_path / value if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=words):
        ProcessConfig(output=tmp_path / "out", **given).check()  # type: ignore[arg-type]
