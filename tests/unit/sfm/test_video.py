"""Frames of a video: as many as wanted, evenly spread, the sharpest of each stretch, none that show the same."""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter, laplace, shift

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.sources import write_frames
from f3rm_ext.sfm.video import measure_motion, measure_sharpness, select_frames, sharpest_frames
from f3rm_ext.sfm.work_folder import WorkFolder

av = pytest.importorskip("av")
FRAMES, SHARP = 40, 3
"""Frames of the video, of which every fifth, from the fourth on, is sharp."""


def write_movie(path: Path, pictures: Sequence[np.ndarray], times_ms: Sequence[int] | None = None) -> Path:
    """Writes grey pictures, ten a second or at some times."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=20 if times_ms else 10)
        stream.height, stream.width = pictures[0].shape
        stream.pix_fmt, stream.bit_rate = "yuv420p", 8_000_000
        if times_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, levels in enumerate(pictures):
            rgb = levels.astype(np.uint8)[..., None].repeat(3, axis=2)
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def with_bar(levels: np.ndarray, number: int) -> np.ndarray:
    """A picture with a bright bar that moves one step with each frame."""
    levels = levels.copy()
    levels[:, 4 * number : 4 * number + 4] = 255
    return levels


@pytest.fixture(scope="module")
def movie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texture in which the bar moves."""
    texture = np.random.default_rng(0).uniform(0, 120, (120, 160))
    blurred = gaussian_filter(texture, 3)
    pictures = [with_bar(texture if number % 5 == SHARP else blurred, number) for number in range(FRAMES)]
    return write_movie(tmp_path_factory.mktemp("movie") / "clip.mp4", pictures)


def shown(image: object) -> int:
    """The number of a frame, from the place of its bar."""
    return int(np.asarray(image).mean(axis=(0, 2)).argmax()) // 4


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (40, 30)).astype(np.uint8)
    assert measure_sharpness(grey) == pytest.approx(laplace(grey.astype(float))[1:-1, 1:-1].var())


def test_the_sharpest_frame_of_each_stretch_is_taken(movie: Path) -> None:
    seen: list[tuple[int, int]] = []
    frames = [shown(image) for image in sharpest_frames(movie, 8, lambda *counts: seen.append(counts))]
    assert frames == [SHARP + 5 * number for number in range(8)]
    assert seen[-1] == (FRAMES, FRAMES)


def test_a_short_video_gives_all_its_frames(movie: Path) -> None:
    assert [shown(image) for image in sharpest_frames(movie, 500)] == list(range(FRAMES))


def test_frames_after_a_damaged_part_are_used(movie: Path, tmp_path: Path) -> None:
    data = bytearray(movie.read_bytes())
    data[len(data) // 4 : len(data) // 3] = bytes(len(data) // 3 - len(data) // 4)
    (tmp_path / "damaged.mp4").write_bytes(data)
    assert [shown(image) for image in sharpest_frames(tmp_path / "damaged.mp4", FRAMES)][-1] == FRAMES - 1


def test_what_is_no_video_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(CaptureError, match="MP4"):
        list(sharpest_frames(tmp_path / "a.mp4", 5))


def test_a_video_of_a_phone_that_was_held_upright(movie: Path, tmp_path: Path) -> None:
    """The file says that it is to be shown a quarter turn to the right."""
    data = bytearray(movie.read_bytes())
    matrix = data.index(b"tkhd") + 44
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 120 << 16, 0, 1 << 30)
    (tmp_path / "phone.mp4").write_bytes(data)
    (frame,) = sharpest_frames(tmp_path / "phone.mp4", 1)
    assert frame.size == (120, 160)
    bar = int(np.asarray(frame).mean(axis=(1, 2)).argmax()) // 4  # as far from the top as it was from the left
    assert bar % 5 == SHARP


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_frames_at_a_varying_rate_are_spread_over_time(tmp_path: Path, suffix: str) -> None:
    """Half of the frames are in the first of eight seconds, as in a video that a phone takes in the dark."""
    times_ms = [*range(0, 1000, 50), *range(1000, 8000, 350)]
    pictures = [with_bar(np.zeros((120, 160)), number) for number in range(len(times_ms))]
    path = write_movie(tmp_path / f"clip{suffix}", pictures, times_ms)
    found = [times_ms[shown(image)] for image in sharpest_frames(path, 8)]
    assert len(found) == 8 and max(np.diff(found)) < 2000 and sum(time_ms < 1000 for time_ms in found) <= 2


WALL = gaussian_filter(np.random.default_rng(1).uniform(0, 255, (180, 1600)), 2)
WALL = ((WALL - WALL.min()) / np.ptp(WALL) * 255).astype(np.uint8)


def frames_at(places_px: list[float]) -> list[np.ndarray]:
    """What a camera of 320 x 180 px sees that moves along a wall."""
    parts = ((WALL[:, int(place) : int(place) + 330], place % 1) for place in places_px)
    return [shift(part, (0, -rest), order=1, mode="nearest")[:, :320] for part, rest in parts]


def test_motion_is_a_share_of_the_longer_side() -> None:
    before, after = frames_at([100, 108])
    assert measure_motion(before, after) == pytest.approx(8 / 320, rel=0.1)
    assert measure_motion(before, before) < 1e-3


def test_a_thing_that_moves_before_a_plain_wall_counts() -> None:
    before, after = np.full((180, 320), 90, np.uint8), np.full((180, 320), 90, np.uint8)
    before[40:140, 100:190], after[40:140, 108:198] = WALL[40:140, 100:190], WALL[40:140, 100:190]
    assert measure_motion(before, after) > 6 / 320


def test_frames_of_a_camera_that_moves_stay() -> None:
    assert select_frames(frames_at([3.0 * number for number in range(90)])) == list(range(90))


def test_frames_while_a_camera_stands_still_are_left_out() -> None:
    walk = [3.0 * number for number in range(90)]
    positions = select_frames(frames_at([*walk[:40], *[walk[39]] * 30, *walk[40:]]))
    assert positions == [*range(40), *range(70, 120)]


def test_a_slow_camera_gives_enough_frames_evenly_spread() -> None:
    positions = select_frames(frames_at([0.6 * number for number in range(150)]))
    assert 75 <= len(positions) <= 100 and max(np.diff(positions)) <= 3 and positions[-1] > 145


@pytest.mark.parametrize("places_px", [[0.0] * 100, [0.6 * number for number in range(75)]], ids=["still", "few"])
def test_all_frames_stay_if_the_rest_is_too_few(places_px: list[float]) -> None:
    """Poses of the first fail with a reason of their own."""
    assert len(select_frames(frames_at(places_px))) == len(places_px)


def test_only_frames_that_are_used_are_written(tmp_path: Path) -> None:
    path, said = write_movie(tmp_path / "slow.mp4", frames_at([0.8 * number for number in range(170)])), []
    config = ProcessConfig(output=tmp_path / "out", images=path, num_frames=170)
    assert config.video == path and config.images is None

    def write(work: WorkFolder) -> list[str]:
        sources = write_frames(work, path, config, lambda *counts: None, said.append)
        assert sorted(source.path for source in sources.values()) == sorted(work.images.iterdir())
        return sorted(sources)

    work = WorkFolder(tmp_path / "out")
    names = write(work)
    assert 75 <= len(names) < 120 and len(said) == 1 and f"{len(names)} of 170" in said[0]
    assert write(work) == names and len(said) == 1
