"""Photos as people bring them, from the folder to the capture: several groups, copies, huge photos, and a full disk."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm import process, solution
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.database import FeatureDatabase

pycolmap = pytest.importorskip("pycolmap")
Make = Callable[..., dict[str, Any]]
NAMES = [f"camera000001_frame{number:06d}.png" for number in range(12)]
"""As COLMAP names the photos of a made-up scene."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve photos of noise, all different."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in NAMES:
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(folder / name)
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a capture."""

    def run(images: Path, **options: Any) -> dict[str, Any]:
        config = ProcessConfig(output=tmp_path / "out", images=images, **options)
        return process.Processing(config, lambda *_: None, lambda _: None).run()

    return run


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and matches of a made-up scene, without those between the first eight photos and the last four."""

    def add_photos(self: FeatureDatabase, *_: object) -> None:
        if self.path.exists():
            return
        pycolmap.set_random_seed(0)
        settings = pycolmap.SyntheticDatasetOptions(
            num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=len(NAMES), num_points3D=100
        )
        with pycolmap.Database.open(self.path) as opened:
            pycolmap.synthesize_dataset(settings, opened)
        ids = self.ids()
        rng = np.random.default_rng(0)
        with self.open() as opened:
            known = {name: opened.read_descriptors(number) for name, number in ids.items()}
            opened.clear_descriptors()
            for name, descriptors in known.items():
                if name in NAMES[8:]:
                    descriptors.data = rng.integers(0, 256, descriptors.data.shape).astype(np.uint8)
                opened.write_descriptors(ids[name], descriptors)
            for first in NAMES[:8]:
                for second in NAMES[8:]:
                    opened.delete_matches(ids[first], ids[second])
                    opened.delete_two_view_geometry(ids[first], ids[second])

    def match(self: FeatureDatabase, pairs: list[Any], _: object) -> None:
        """Adds wrong matches for other features or pairs than by default."""
        if self.feature_size == 2000 and len(pairs) == 66:
            return
        with self.open() as opened:
            for number, geometry in zip(*opened.read_two_view_geometries(), strict=True):
                wrong = geometry.inlier_matches[::5] + np.array([[0, 7]], np.uint32)
                geometry.inlier_matches = np.concatenate([geometry.inlier_matches, wrong % 100])
                opened.update_two_view_geometry(*pycolmap.pair_id_to_image_pair(number), geometry)

    monkeypatch.setattr(FeatureDatabase, "add_photos", add_photos)
    monkeypatch.setattr(FeatureDatabase, "match", match)


@pytest.mark.usefixtures("two_places")
def test_two_places_give_the_larger_one_and_name_the_photos_of_the_other(photos: Path, make: Make) -> None:
    result = make(photos)
    assert result["groups"] == [8, 4] and result["registered"] == 8
    assert list(result["without_pose"]) == NAMES[8:]
    assert all("overlap" in reason and NAMES[8] in reason for reason in result["without_pose"].values())


@pytest.mark.usefixtures("two_places")
def test_a_capture_stays_where_other_options_or_photos_find_none(
    photos: Path, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(photos)
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(solution, "solve", lambda *_, **__: [])
    with pytest.raises(CaptureError, match="12 photos"):
        make(photos, feature_size=500)
    with pytest.raises(CaptureError):
        make(photos, start_over=True)
    (tmp_path / "none").mkdir()
    with pytest.raises(CaptureError):
        make(tmp_path / "none", start_over=True)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert make(photos) == first
    for name in ("transforms.json", f"images/{NAMES[0]}"):
        (out / name).unlink()
    with pytest.raises(CaptureError):  # it is made again
        make(photos)
    assert (out / "images" / NAMES[0]).is_file()


@pytest.mark.usefixtures("two_places")
@pytest.mark.parametrize("options", [{"feature_size": 500}, {"matching": "sequential"}])
def test_a_doubtful_capture_does_not_replace_a_good_one_unless_asked(
    photos: Path, make: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    def content() -> list[bytes]:
        return [(tmp_path / "out" / name).read_bytes() for name in ("transforms.json", "sparse_pc.ply")]

    first = make(photos)
    before = content()
    assert not first["doubt"]
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"doubtful.*--start-over"):
            make(photos, **options)
    assert content() == before and make(photos) == first
    assert make(photos, **options, start_over=True)["doubt"] and content() != before
    assert make(photos, **options, max_features=600)["doubt"], "one doubtful capture replaces another"


def test_photos_that_make_no_scene(photos: Path, make: Make) -> None:
    for name in NAMES[1:]:
        shutil.copy(photos / NAMES[0], photos / name)
    with pytest.raises(CaptureError, match=r"12 photos.*same picture"):
        make(photos)
    Image.new("RGB", (48, 64)).save(photos / NAMES[3])
    with pytest.raises(CaptureError, match=r"--cameras one.*2 sizes"):
        make(photos, cameras="one")


def test_huge_photos_are_reduced(photos: Path, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns of the 200 megapixels of some phones, and refuses more."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 // 4)
    with pytest.raises(CaptureError, match="fit together"):
        make(photos, max_size=32)
    assert Image.MAX_IMAGE_PIXELS == 64 * 48 // 4
    monkeypatch.undo()
    with Image.open(tmp_path / "out" / "images" / NAMES[0]) as image:
        assert image.size == (32, 24)


@pytest.mark.usefixtures("two_places")
def test_huge_photos_may_keep_their_size(photos: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 // 4)
    assert make(photos)["registered"] == 8


def test_a_disk_that_is_nearly_full_is_one_sentence_before_colmap_aborts(
    photos: Path, make: Make, tmp_path: Path, set_free_space: Callable[[int], None]
) -> None:
    set_free_space(7 << 20)
    with pytest.raises(CaptureError, match=r"7 MiB.*256 MiB"):
        make(photos)
    assert len(list((tmp_path / "out" / "images").iterdir())) == len(NAMES)


def test_colmap_writes_no_files_of_messages_and_no_trace_when_it_is_stopped(tmp_path: Path) -> None:
    program = (
        "from f3rm_ext.sfm.database import colmap; pycolmap = colmap(); options = pycolmap.SyntheticDatasetOptions("
        "num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=4, num_points3D=30); "
        "pycolmap.bundle_adjustment(pycolmap.synthesize_dataset(options), pycolmap.BundleAdjustmentOptions()); "
        "pycolmap.logging.warning('said'); import signal; signal.raise_signal(signal.SIGTERM)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGTERM and "said" in done.stderr and "trace" not in done.stderr
    assert list(tmp_path.iterdir()) == []
