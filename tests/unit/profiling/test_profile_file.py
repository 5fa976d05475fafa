"""The file of a profile survives a kill, and is found by its run."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.profiling.profile_file import NAME, ProfileWriter, find_profile, read_profile
from f3rm_ext.profiling.snapshot import Snapshot


def write(path: Path, *records: tuple[str, dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ProfileWriter(path)
    for kind, content in records:
        writer.write(kind, content)
    writer.close()
    return path


@pytest.fixture
def snapshot(made: Callable[..., Snapshot]) -> Callable[..., tuple[str, dict[str, Any]]]:
    """A record of a snapshot."""
    return lambda step, **options: ("snapshot", asdict(made(step, **options)))


def test_what_was_written_is_read(tmp_path: Path, snapshot: Any, made: Any) -> None:
    start = ("start", {"device": "cuda", "device_total": 100, "method": "sugar-ext"})
    peaks = {"train": {"tensors": 7, "device": 9}, "viewer": {"tensors": 3}}
    path = write(tmp_path / NAME, start, snapshot(0, phases=peaks), snapshot(5), ("end", {"reason": "finished"}))
    profile = read_profile(path)
    assert profile.snapshots == [made(0, phases=peaks), made(5)]
    assert (profile.device, profile.device_total, profile.end, profile.damaged) == ("cuda", 100, "finished", 0)
    assert profile.peaks() == {"train": 7, "viewer": 3} and profile.peaks("device") == {"train": 9}


def test_a_record_is_on_its_way_to_the_disk_at_once(tmp_path: Path, snapshot: Any) -> None:
    writer = ProfileWriter(tmp_path / NAME)
    writer.write(*snapshot(3))
    assert [one.step for one in read_profile(tmp_path / NAME).snapshots] == [3], "before the file is closed"


def test_a_torn_last_line_is_skipped_and_the_next_run_goes_on_behind_it(tmp_path: Path, snapshot: Any) -> None:
    path = write(tmp_path / NAME, ("start", {}), snapshot(1), snapshot(2))
    os.truncate(path, path.stat().st_size - 20)
    profile = read_profile(path)
    assert [one.step for one in profile.snapshots] == [1] and profile.damaged == 1 and profile.end == ""
    resumed = read_profile(write(path, ("start", {"method": "again"}), snapshot(2), snapshot(3)))
    assert [one.step for one in resumed.snapshots] == [2, 3], "those of the last start"
    assert resumed.damaged == 1 and resumed.start == {"method": "again"}


def test_entries_of_later_versions_are_ignored_and_missing_ones_make_a_damaged_line(
    tmp_path: Path, snapshot: Any, made: Any
) -> None:
    later = {**asdict(made(1)), "colour": "red"}
    assert Snapshot.from_json(later) == made(1)
    path = write(tmp_path / NAME, snapshot(1), ("snapshot", {"step": 2}), ("remark", {}))
    assert read_profile(path).damaged == 1


def test_runs_are_found_by_folder_by_config_and_as_the_latest(tmp_path: Path, snapshot: Any) -> None:
    old, new = (write(tmp_path / "outputs" / name / "m" / "t" / NAME, snapshot(1)) for name in ("old", "new"))
    os.utime(old, (1, 1))
    (old.parent / "config.yml").touch()
    assert find_profile("latest", tmp_path / "outputs") == new
    assert find_profile(str(old.parent), tmp_path) == find_profile(str(old.parent / "config.yml"), tmp_path) == old
    assert find_profile(str(old), tmp_path) == old


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("latest", "There is no profile below"),
        ("nowhere", "There is no run nowhere"),
        (".", "has no profile: train it with --profile-tensors True"),
    ],
)
def test_a_run_without_a_profile_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_profile(run, tmp_path / "outputs")


def test_a_profile_without_a_snapshot_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no snapshot"):
        read_profile(write(tmp_path / NAME, ("start", {})))
