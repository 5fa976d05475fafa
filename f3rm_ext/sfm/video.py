"""Frames of a video: at even distances, and the sharpest of each stretch."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from f3rm_ext.errors import CaptureError, reason_of

_SHARPNESS_PX = 320


def measure_sharpness(grey: UInt8[np.ndarray, "h w"]) -> float:
    """Returns the variance of a picture's Laplacian: higher is sharper, among pictures of one scene."""
    values = grey.astype(np.float32)
    laplacian = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:] - 4 * values[1:-1, 1:-1]
    return float(laplacian.var())


def sharpest_frames(
    path: Path, num_frames: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Image.Image]:
    """Yields the sharpest frame of each of ``num_frames`` stretches of equal time; all frames of a short video.

    Phones write frames at a varying rate, so stretches go by the frames' time stamps, where the file has them.

    Args:
        path: the video, in any format of FFmpeg's libraries.

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
            for number, frame in enumerate(container.decode(stream)):
                part = Fraction(number, max(total, num_frames))  # each frame of a short video is a stretch of its own
                if duration and frame.pts is not None:
                    part = (frame.pts - (stream.start_time or 0)) * stream.time_base / duration
                current = min(int(part * num_frames), num_frames - 1)
                if best is not None and current > stretch:
                    yield _turn_upright(best)
                    best, best_sharpness = None, -1.0
                stretch = max(current, stretch)
                scale = max(1.0, max(frame.width, frame.height) / _SHARPNESS_PX)
                small = frame.reformat(int(frame.width / scale), int(frame.height / scale), format="gray")
                sharpness = measure_sharpness(small.to_ndarray())
                if sharpness > best_sharpness:
                    best, best_sharpness = frame, sharpness
                progress(number + 1, max(total, number + 1))
    except CaptureError:
        raise
    except (FFmpegError, ValueError, OSError) as error:
        if best is None:
            reason = reason_of(error)
            raise CaptureError(f"The video {path} cannot be read ({reason}): convert it to MP4 (H.264).") from error
    if best is not None:
        yield _turn_upright(best)


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
