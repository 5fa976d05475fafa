"""``f3rm-ext features`` as a user types it, on a small capture, with the extractor that needs no weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.integration

COUNT = 6
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cameras on a circle that look at the middle; smooth pictures."""
    folder = tmp_path_factory.mktemp("capture")
    (folder / "images").mkdir()
    frames = []
    y, x = np.mgrid[0:48, 0:64] / 64
    for number in range(COUNT):
        angle = 2 * np.pi * number / COUNT
        picture = np.stack([np.sin(9 * x + number), np.cos(7 * y - number), np.sin(5 * (x + y) * (number + 1))], -1)
        Image.fromarray((picture * 127 + 128).astype(np.uint8)).save(folder / "images" / f"{number}.png")
        cos, sin = np.cos(angle), np.sin(angle)
        pose = [[-sin, 0, cos, 3 * cos], [cos, 0, sin, 3 * sin], [0, 1, 0, 0.5], [0, 0, 0, 1]]
        frames.append({"file_path": f"images/{number}.png", "transform_matrix": pose})
    intrinsics = {"fl_x": 60.0, "fl_y": 60.0, "cx": 32.0, "cy": 24.0, "w": 64, "h": 48, "camera_model": "OPENCV"}
    (folder / "transforms.json").write_text(json.dumps({**intrinsics, "frames": frames}))
    return folder


@pytest.fixture
def run(run_command: Callable[..., Any], tmp_path: Path) -> Run:
    """Runs ``f3rm-ext features ...`` with a cache of its own."""

    def call(*arguments: str | Path, first: str = "") -> Any:
        """``first``: Python that is run before."""
        command: tuple[str, ...] = ("f3rm-ext",)
        if first:
            command = ("python", "-c", f"import sys; from f3rm_ext.scripts.cli import main; {first}; sys.exit(main())")
        return run_command(*command, "features", *arguments, F3RM_EXT_CACHE=str(tmp_path / "cache"))

    return call


def extract(run: Run, capture: Path, *more: str) -> Any:
    return run("extract", "--data", capture, "--features.extractors", "dense-daisy", *more)


def shards(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "features").glob("dense-daisy-*/shards/*.npy"))


def test_extract_info_verify_and_mend(run: Run, capture: Path, tmp_path: Path) -> None:
    made = extract(run, capture, "--features.codes", "16").succeeds()
    assert f"dense-daisy: {COUNT} images, 16 PCA codes" in made.stdout and "images/s" in made.stdout
    assert len(shards(tmp_path)) == COUNT

    info = run("info")
    assert info.code == 0
    row = next(line for line in info.stdout.splitlines() if "dense-daisy" in line and "│" in line)
    assert re.search(rf"│ +{COUNT} │ +128 │", row), row
    codes = next(line for line in info.stdout.splitlines() if "codes, K = 16" in line)
    assert re.search(rf"│ +{COUNT} │ +16 │ +[\d.]+ │ +(9\d|100)\.\d% │", codes), codes

    run("verify").succeeds()
    flipped, cut = shards(tmp_path)[0], shards(tmp_path)[1]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-5])
    verify = run("verify")
    assert verify.code == 2
    assert str(flipped) in verify.stdout and f"{cut} is truncated" in verify.stdout
    assert "2 of 12 files are damaged" in verify.stdout and str(shards(tmp_path)[2]) not in verify.stdout

    mended = extract(run, capture, "--features.codes", "16")
    assert mended.code == 0 and flipped.name in mended.stdout and "2/2" in mended.stdout
    run("verify").succeeds()


def test_manifest_of_a_store_destroyed(run: Run, capture: Path, tmp_path: Path) -> None:
    extract(run, capture).succeeds()
    manifest = shards(tmp_path)[0].parents[1] / "manifest.json"
    manifest.write_bytes(b"\x80\x04K\x01.")
    message = extract(run, capture).refuses()
    assert str(manifest) in message and "delete it" in message
    for command in ("info", "verify"):
        result = run(command)
        assert result.code == 2 and str(manifest) in result.stdout and "Traceback" not in result.stderr
    assert "1 of 1 files are damaged" in result.stdout
    manifest.unlink()
    extract(run, capture).succeeds()
    run("verify").succeeds()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--extractors", "dense-dasy"), "dense-dasy"),
        (("--extractor", "dense-daisy", "--codes", "3"), "outside 8 to 512"),
        (("--features.extractors", "dense-daisy", "--features.codes", "128"), "128 dimensions"),
        (("--features.extractors", "dense-daisy", "--camera-res-scale-factor", "0"), "outside (0, 1]"),
        (("--features.extractors", "dense-daisy", "--device", "abacus"), "abacus"),
        (("--features.extractors",), "No extractor"),
    ],
)
def test_wrong_options_are_one_sentence(run: Run, capture: Path, arguments: tuple[str, ...], word: str) -> None:
    assert word in run("extract", "--data", capture, *arguments).refuses()


def test_missing_capture_is_one_sentence(run: Run, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in extract(run, tmp_path / "nowhere").refuses()


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    """A file system with room for about two of the six shards."""
    return mount_disk("48k")


def test_too_small_a_disk_is_refused_at_once(run: Run, capture: Path, small_disk: Path) -> None:
    message = extract(run, capture, "--features.cache-dir", str(small_disk)).refuses()
    assert "need about" in message and str(small_disk) in message and "--features.cache-dir" in message
    assert not list(small_disk.rglob("*.npy"))


def test_disk_that_fills_up_keeps_what_is_done(run: Run, capture: Path, small_disk: Path) -> None:
    """As when something else fills it after the check at the start."""
    arguments = ("--data", capture, "--features.extractors", "dense-daisy", "--features.cache-dir", small_disk)
    unchecked = "from f3rm_ext.features.store import extraction; extraction._check_space = lambda *a: None"
    message = run("extract", *arguments, first=unchecked).refuses()
    assert "disk is full" in message and str(small_disk) in message and "KiB more" in message, message
    assert len(list(small_disk.rglob("shards/*.npy"))) >= 1 and not list(small_disk.rglob("*.tmp"))
    run("verify", "--cache-dir", small_disk).succeeds()
