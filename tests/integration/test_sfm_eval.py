"""``f3rm-ext sfm eval`` as a user types it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

Typed = Callable[..., Any]


@pytest.fixture
def moved_capture(tiny_capture: Path, tmp_path: Path) -> Path:
    """The room in another frame and unit, its images under another folder and without two of them."""
    out = tmp_path / "moved"
    shutil.copytree(tiny_capture, out)
    meta = json.loads((out / "transforms.json").read_text())
    turn = Rotation.from_euler("xyz", [30, 40, 50], degrees=True).as_matrix()
    for frame in meta["frames"]:
        pose = np.array(frame["transform_matrix"])
        pose[:3, :3] = turn @ pose[:3, :3]
        pose[:3, 3] = 2.5 * turn @ pose[:3, 3] + [1, 2, 3]
        frame["transform_matrix"] = pose.tolist()
        frame["file_path"] = "photos/" + Path(frame["file_path"]).name
    meta["depth_unit_scale_factor"] *= 2.5
    del meta["frames"][4:6]
    (out / "transforms.json").write_text(json.dumps(meta))
    return out


def test_the_same_poses_in_another_frame_are_right(
    f3rm_ext: Typed, tiny_capture: Path, moved_capture: Path, tmp_path: Path
) -> None:
    out = tmp_path / "poses.json"
    done = f3rm_ext("sfm", "eval", "--predicted", moved_capture, "--truth", tiny_capture, "--out", out).succeeds()
    found = json.loads(out.read_text())
    pairs = (10 * 9 / 2) / (12 * 11 / 2)
    assert found["cameras"] == 10 and found["missing"] == 2 and len(found["missing_images"]) == 2
    assert found["rra"]["5"] == pytest.approx(pairs) and found["rta"]["15"] == pytest.approx(pairs)
    assert found["rotation_error_deg"] < 1e-6 and found["center_error"] < 1e-6
    assert found["chamfer"] < 1e-9 and found["made_by"] == "f3rm-ext sfm eval"
    assert "RRA@5 / 15 / 30" in done.stdout and "10 of 12" in done.stdout and "chamfer" in done.stdout
    done = f3rm_ext("sfm", "eval", "--predicted", moved_capture, "--truth", tiny_capture, "--missing", "ignore")
    assert "1.000 / 1.000 / 1.000" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--predicted", "none", "--truth", "{room}"), "none"),
        (("--predicted", "{room}", "--truth", "other"), "other"),
        (("--predicted", "{room}", "--truth", "{room}", "--out", "poses.txt"), ".json"),
        (("--predicted", "{room}", "--truth", "twice"), "images/frame_00003.png"),
    ],
)
def test_mistakes(
    f3rm_ext: Typed,
    tiny_capture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    meta = json.loads((tiny_capture / "transforms.json").read_text())
    others = [{**frame, "file_path": f"images/other_{number}.png"} for number, frame in enumerate(meta["frames"])]
    for name, frames in (("other", others), ("twice", [*meta["frames"], meta["frames"][3]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "transforms.json").write_text(json.dumps({**meta, "frames": frames}))
    typed = [argument.format(room=tiny_capture) for argument in arguments]
    says = says.replace("images/frame_00003.png", meta["frames"][3]["file_path"])
    assert says in f3rm_ext("sfm", "eval", *typed).refuses()
