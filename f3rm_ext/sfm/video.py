"""Frames of a video: the sharpest of each stretch, without those between which the camera hardly moves."""

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from f3rm_ext.errors import CaptureError, reason_of

SMALL_PX = 320
"""Longest side of the pictures in which sharpness and motion are measured."""
_STEP = 0.005
"""Motion between two frames that both add something, as a share of the picture's longer side."""
_LEAST_PX = 12
"""Shortest side that the search for motion takes."""
_FEW_FRAMES = 75
"""Number of frames below which smaller steps do. Splats of a slow video of 150 frames lose 0.3 dB with 75 of them, and
2.5 dB with 37."""
_SMALLEST_STEP = 1e-3
"""Motion that noise and compression make between frames of a camera that stands still."""


def measure_sharpness(grey: UInt8[np.ndarray, "h w"]) -> float:
    """Returns the variance of a picture's Laplacian: higher is sharper, among pictures of one scene."""
    values = grey.astype(np.float32)
    laplacian = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:] - 4 * values[1:-1, 1:-1]
    return float(laplacian.var())


def sharpest_frames(
    path: Path, num_frames: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Generator[Image.Image, None, None]:
    """Yields the sharpest frame of each of ``num_frames`` stretches of equal time; all frames of a short video.

    Phones write frames at a varying rate, so stretches go by the frames' time stamps, where the file has them. The file
    may be of any format of FFmpeg's libraries.

    Raises:
        CaptureError: the file is not a video, or is damaged before its first frame.
    """
    import av
    from av.error import FFmpegError

    best: Any = None
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise CaptureError(f"{path} has no video stream: give a video file with --video.")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            duration = _duration(container, stream)
            total = _frame_count(container, stream, duration)
            best_sharpness, stretch = -1.0, 0
            for number, frame in enumerate(_decode(container, stream)):
                part = Fraction(number, max(total, num_frames))  # each frame of a short video is a stretch of its own
                if duration and frame.pts is not None and stream.time_base:
                    part = (frame.pts - (stream.start_time or 0)) * stream.time_base / duration
                current = min(int(part * num_frames), num_frames - 1)
                if best is not None and current > stretch:
                    yield _turn_upright(best)
                    best, best_sharpness = None, -1.0
                stretch = max(current, stretch)
                scale = max(1.0, max(frame.width, frame.height) / SMALL_PX)
                small = frame.reformat(int(frame.width / scale), int(frame.height / scale), format="gray")
                sharpness = measure_sharpness(small.to_ndarray())
                if sharpness > best_sharpness:
                    best, best_sharpness = frame, sharpness
                progress(number + 1, max(total, number + 1))
    except (FFmpegError, ValueError, OSError) as error:
        if best is None:
            reason = reason_of(error)
            raise CaptureError(f"The video {path} cannot be read ({reason}): convert it to MP4 (H.264).") from error
    if best is not None:
        yield _turn_upright(best)


def _decode(container: Any, stream: Any) -> Generator[Any, None, None]:
    """Yields the frames of a video stream without those that are damaged. Raises the last error if no frame is left."""
    from av.error import InvalidDataError

    damage, is_empty = None, True
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except InvalidDataError as error:
            damage = error
            continue
        is_empty = is_empty and not frames
        yield from frames
    if is_empty and damage is not None:
        raise damage


def measure_motion(before: UInt8[np.ndarray, "h w"], after: UInt8[np.ndarray, "h w"]) -> float:
    """Returns how far a picture's parts move from one frame to another, as a share of its longer side.

    It is the distance that a tenth of the pixels exceeds, by dense inverse search (Kroeger et al., ECCV 2016): a thing
    before a plain wall counts, a passer-by in the distance does not.
    """
    import cv2

    if before.shape != after.shape or min(before.shape) < _LEAST_PX:  # a phone that was turned; a strip
        return 1.0
    search = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_ULTRAFAST)
    still = np.zeros((*before.shape, 2), np.float32)
    flow = search.calc(np.ascontiguousarray(before), np.ascontiguousarray(after), still)
    return float(np.percentile(np.linalg.norm(flow, axis=-1), 90)) / max(before.shape)


def select_frames(pictures: Sequence[UInt8[np.ndarray, "h w"]]) -> list[int]:
    """Returns the positions of the frames between which the camera moves enough for each to add something.

    Frames that show nearly the same add little, and take most of the time: a point that many frames see ties all their
    cameras together. If the whole video moves little, the steps become smaller, until there are 75 frames or only noise
    is left. Pictures are in the order of time, with a longest side of about 320 px.
    """
    step = _STEP
    while len(pictures) > _FEW_FRAMES and step > _SMALLEST_STEP:
        positions = [0]
        for number, picture in enumerate(pictures[1:], 1):
            if measure_motion(pictures[positions[-1]], picture) >= step:
                positions.append(number)
        if len(positions) >= _FEW_FRAMES:
            return positions
        step *= 0.8
    return list(range(len(pictures)))


def _duration(container: Any, stream: Any) -> Fraction | None:
    """The length of the video, s; None where the file does not tell."""
    if stream.duration and stream.time_base:
        return stream.duration * stream.time_base
    return Fraction(container.duration, 1_000_000) if container.duration else None


def _frame_count(container: Any, stream: Any, duration_s: Fraction | None) -> int:
    """The number of frames; estimated from duration and rate where the file does not tell."""
    if stream.frames:
        return stream.frames
    if duration_s and stream.average_rate:
        return max(1, int(duration_s * stream.average_rate))
    count = sum(packet.size > 0 for packet in container.demux(stream))
    container.seek(0)
    return max(1, count)


def _turn_upright(frame: Any) -> Image.Image:
    image = frame.to_image()
    turn = getattr(frame, "rotation", 0) or 0
    return image.rotate(turn, expand=True) if turn else image
