"""``f3rm-ext scene`` as a user types it."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.integration

TINY = ["--num-images", "3", "--width", "48", "--height", "32", "--light-rays", "1"]


@pytest.fixture
def scene(run_command: Callable[..., Any]) -> Callable[..., Any]:
    """Types ``f3rm-ext scene ...``."""
    return partial(run_command, "f3rm-ext", "scene")


def test_same_seed_writes_the_same_bytes_in_another_process(scene: Callable[..., Any], tmp_path: Path) -> None:
    cases = (("a", 4, True), ("b", 4, False), ("c", 5, False))
    runs = [scene("synth", tmp_path / name, *TINY, "--seed", seed, fresh=fresh) for name, seed, fresh in cases]
    assert [run.code for run in runs] == [0, 0, 0], runs[0].stderr
    assert str(tmp_path / "a") in runs[0].stdout

    def content(name: str) -> dict[str, bytes]:
        return {
            str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()
        }

    a, b, c = map(content, "abc")
    assert a.keys() == b.keys() == c.keys() and len(a) == 4 * 3 + 6
    assert [name for name in a if a[name] != b[name]] == []
    assert all(a[name] != c[name] for name in a if not name.startswith("classes"))


def test_the_working_folder_may_be_the_capture(command_server: Any, tmp_path: Path) -> None:
    inode = tmp_path.stat().st_ino
    command_server.start("f3rm-ext", "scene", "synth", ".", *TINY, folder=tmp_path)
    done = command_server.finish(100).succeeds()
    assert "Wrote 3 views to ." in done.stdout and tmp_path.stat().st_ino == inode
    assert (tmp_path / "transforms.json").is_file() and len(list(tmp_path.iterdir())) == 10


def test_every_object_is_seen_in_a_third_of_the_views(scene: Callable[..., Any], tmp_path: Path) -> None:
    run = scene("synth", tmp_path / "room", "--num-images", 24, "--width", 160, "--height", 120, "--samples", 1,
                "--light-rays", 1, "--seed", 2)  # fmt: skip
    run.succeeds()
    objects = json.loads((tmp_path / "room" / "scene.json").read_text())["objects"]
    images = [np.asarray(Image.open(path)).ravel() for path in sorted((tmp_path / "room" / "labels").iterdir())]
    pixels = np.stack([np.bincount(image, minlength=len(objects) + 1) for image in images])
    on_show = [thing for thing in objects if thing["kind"] == "object"]
    assert len(on_show) >= 12
    share = {thing["name"]: float((pixels[:, thing["label"]] >= 8).mean()) for thing in on_show}
    assert min(share.values()) >= 1 / 3, share


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--num-images", "0"], "--num-images"),
        (["--num-images", "2"], "--num-images"),
        (["--width", "-3"], "--width"),
        (["--fov", "nan"], "--fov"),
        (["--samples", "99"], "--samples"),
    ],
)
def test_bad_options_end_in_one_sentence(
    scene: Callable[..., Any], tmp_path: Path, arguments: list[str], word: str
) -> None:
    run = scene("synth", tmp_path / "room", *arguments)
    assert run.code == 2 and word in run.stderr and len(run.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.release), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_interrupted_run_leaves_no_half_capture(
    command_server: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "room"
    options = ["--num-images", "5000", "--width", "48", "--height", "32", "--light-rays", "1"]
    process = command_server.start("f3rm-ext", "scene", "synth", out, *options)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob(".room.partial-*/labels/*.png")):
        assert time.monotonic() < deadline, command_server.said()
        time.sleep(0.01)
    os.kill(process, number)
    done = command_server.finish(60)
    assert done.code == code and not out.exists()
    if number == signal.SIGINT:
        assert done.stderr.strip() == f"Interrupted: {out} was not written." and list(tmp_path.iterdir()) == []


def test_picture(scene: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "room.jpg"
    scene("picture", out, "--width", 96, "--height", 64, "--samples", 1, "--light-rays", 1, "--maps").succeeds()
    assert Image.open(out).size == (96, 64 + 21)
    again = scene("picture", out)
    again.refuses("--overwrite")
