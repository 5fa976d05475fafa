"""The manifest: whose folder it is, what has changed, and that it is never half written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.workflow.manifest import NAME, Manifest, Record, identify


def read(folder: Path, capture: dict[str, Any] | None) -> Manifest:
    return Manifest.open(folder, "f3rm-ext sugar run", "--output", capture)


def test_a_capture_is_known_by_its_content(capture: Path, tmp_path: Path) -> None:
    first = identify(capture)
    assert first["photos"] == 2 and identify(capture / "transforms.json")["digest"] == first["digest"]
    moved = capture.rename(tmp_path / "moved")
    assert identify(moved)["digest"] == first["digest"]
    (moved / "0.png").write_bytes(b"another photo")
    assert identify(moved)["digest"] != first["digest"]
    with pytest.raises(CaptureError, match="There is no"):
        identify(capture)


def test_a_manifest_is_read_as_it_was_written(capture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    manifest = read(folder, identify(capture))
    (folder / "mesh.ply").write_bytes(b"mesh")
    outputs = {"mesh": manifest.output(folder / "mesh.ply")}
    options, inputs = {"--vertices": "9"}, {"capture": "a"}
    manifest.stages["mesh"] = Record("finished", "Mesh", options, inputs, outputs, "type this", 1.5)
    manifest.save()
    again = read(folder, identify(capture))
    assert again.stages == manifest.stages
    assert again.reason_to_run("mesh", {"--vertices": "9"}, {"capture": "a"}) is None
    assert again.reason_to_run("refine", {}, {}) == ""
    assert again.reason_to_run("mesh", {}, {"capture": "a"}) == "--vertices was 9 and is now left out"
    assert again.reason_to_run("mesh", {"--vertices": "8"}, {"capture": "b"}) == "--vertices was 9 and is now 8"
    assert again.reason_to_run("mesh", {"--vertices": "9"}, {"capture": "b"}) == "its input (capture) has changed"


def test_manifests_of_other_captures_are_refused(capture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    read(folder, identify(capture)).save()
    before = (folder / NAME).read_bytes()
    other = {**identify(capture), "path": "/elsewhere", "digest": "other"}
    with pytest.raises(ConfigError, match="/elsewhere"):
        read(folder, other)
    (capture / "transforms.json").write_text(json.dumps({"frames": []}))
    with pytest.raises(ConfigError, match="changed"):
        read(folder, identify(capture))
    assert (folder / NAME).read_bytes() == before
    assert read(folder, None).stages == {}, "a demo may change its capture"


@pytest.mark.parametrize("content", [b"", b"{", b'{"made_by": "another"}', b"[]"])
def test_what_is_not_ours_is_left_alone(capture: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=NAME):
        read(folder, identify(capture))
    assert (folder / NAME).read_bytes() == content
    (folder / NAME).rename(folder / "holiday.jpg")
    with pytest.raises(ConfigError, match=r"holiday\.jpg"):
        read(folder, identify(capture))


@pytest.mark.parametrize(
    "change",
    [
        {"capture": {"path": "/here"}},
        {"stages": {"mesh": 3}},
        {"stages": {"mesh": {"outputs": {"mesh": {"path": "mesh.ply"}}}}},
        {"stages": {"mesh": {"options": ["--vertices"]}}},
        {"stages": {"mesh": {"state": "unknown"}}},
        {"defaults": {"vertices": "many"}},
        {"made_by": "another"},
        {"format": 99},
    ],
)
def test_manifests_of_another_shape_are_refused(capture: Path, tmp_path: Path, change: dict[str, object]) -> None:
    manifest = read(tmp_path / "out", identify(capture))
    manifest.save()
    path = tmp_path / "out" / NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=NAME):
        read(tmp_path / "out", identify(capture))


def test_a_full_disk_leaves_the_old_manifest(capture: Path, tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    manifest = read(tmp_path / "out", identify(capture))
    manifest.save()
    before = (tmp_path / "out" / NAME).read_bytes()

    fill_disk()
    manifest.stages["mesh"] = Record()
    with pytest.raises(ConfigError, match="No space left"):
        manifest.save()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [NAME]
    assert (tmp_path / "out" / NAME).read_bytes() == before
