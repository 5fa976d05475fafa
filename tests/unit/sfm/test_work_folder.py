"""The folder of a capture belongs to one command, keeps finished work, and loses nobody's files."""

import errno
from pathlib import Path

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm import work_folder
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.work_folder import STATE, WorkFolder, stamp_of

OPTIONS = {"feature_size": 1000, "camera_model": "auto"}


def begun(out: Path, source: Path) -> WorkFolder:
    """A folder with one photo and a database."""
    work = WorkFolder(out)
    assert work.begin(OPTIONS, {"a": stamp_of(source)}) == ""
    (work.images / "a.jpg").write_bytes(b"copy")
    work.database.write_bytes(b"database")
    work.save(photos={"a.jpg": {"source": str(source), "stamp": stamp_of(source)}})
    return work


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"original")
    return path


def test_the_same_call_keeps_everything(tmp_path: Path, source: Path) -> None:
    begun(tmp_path / "out", source)
    again = WorkFolder(tmp_path / "out")
    assert (
        again.begin(OPTIONS, {"a": stamp_of(source)}) == ""
        and again.database.exists()
        and list(again.photos) == ["a.jpg"]
    )


def test_a_new_photo_keeps_the_others(tmp_path: Path, source: Path) -> None:
    begun(tmp_path / "out", source)
    other = tmp_path / "b.jpg"
    other.write_bytes(b"new")
    again = WorkFolder(tmp_path / "out")
    assert again.begin(OPTIONS, {"a": stamp_of(source), "b": stamp_of(other)}) == "" and list(again.photos) == ["a.jpg"]


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
    stamps = {"b" if change == "removed" else "a": stamp_of(source)}
    reason = again.begin(options, stamps)
    assert ("--feature-size" if change == "options" else str(tmp_path / "a.jpg")) in reason
    assert not again.database.exists() and not again.photos and (again.images / "a.jpg").read_bytes() == b"copy"


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="did not write"):
        WorkFolder(tmp_path)
    (tmp_path / STATE).write_text('{"made_by": "something else"}')
    with pytest.raises(ConfigError, match="is damaged or was not written"):
        WorkFolder(tmp_path)
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"


def test_two_processes_do_not_share_a_folder(tmp_path: Path, source: Path) -> None:
    work = begun(tmp_path / "out", source)
    with work.lock.hold(), pytest.raises(ConfigError, match="Another process works"):
        WorkFolder(tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkFolder(tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work_folder, "write_atomic", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*free some space; the same command goes on"):
        work.write(work.images / "a.jpg", b"data")
    assert not list(work.images.iterdir())


def test_photos_and_capture_may_not_lie_in_each_other(tmp_path: Path) -> None:
    for images, out in ((tmp_path, tmp_path / "out"), (tmp_path, tmp_path), (tmp_path, tmp_path.parent)):
        with pytest.raises(ConfigError, match="lie in each other"):
            ProcessConfig(output=out, images=images).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "neither"), ({"num_frames": 1}, "--num-frames is 1"), ({"masks": Path()}, "belongs to --images")],
)
def test_impossible_options_are_one_sentence(tmp_path: Path, options: dict[str, object], words: str) -> None:
    (tmp_path / "v.mp4").write_bytes(b"")
    video = {} if not options else {"video": tmp_path / "v.mp4"}
    with pytest.raises(ConfigError, match=words):
        ProcessConfig(output=tmp_path / "out", **video, **options).check()  # type: ignore[arg-type]
