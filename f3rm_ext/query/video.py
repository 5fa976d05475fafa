"""Videos along a camera path, written frame by frame."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from f3rm_ext.compat import provide_ffmpeg
from f3rm_ext.utils.output_folder import OutputFolder


def can_write_videos() -> bool:
    """Whether there is an ffmpeg to write videos with."""
    return provide_ffmpeg() is not None


class Videos:
    """Several videos written side by side, each under a temporary name until it is complete.

    Used as a context: on an exception nothing is left.

    Args:
        out: the folder.
        names: of the files, by key.
        fps: frames per second.
        comment: goes into the files' metadata.
    """

    def __init__(self, out: OutputFolder, names: Mapping[str, str], fps: float, comment: str) -> None:
        self.out, self.names, self.fps, self.comment = out, dict(names), fps, comment

    def __enter__(self) -> "Videos":
        provide_ffmpeg()
        self._writers: dict[str, object] = {}
        self._stack = contextlib.ExitStack()
        return self

    def add(self, frames: Mapping[str, UInt8[np.ndarray, "h w 3"]]) -> None:
        """Adds one frame to each video; odd rows and columns are left out, which many players cannot show.

        Args:
            frames: by key.
        """
        import mediapy

        for key, frame in frames.items():
            even = np.ascontiguousarray(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])
            if key not in self._writers:
                path = self._temporary(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = mediapy.VideoWriter(
                    path,
                    (even.shape[0], even.shape[1]),
                    fps=self.fps,
                    crf=20,
                    ffmpeg_args=["-metadata", f"comment={self.comment}"],
                )
                self._writers[key] = self._stack.enter_context(writer)
            self._writers[key].add_image(even)  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._stack.close()
            if kind is None:
                for key in self._writers:
                    self.out.take(self.names[key], self._temporary(key))
        finally:
            for key in self.names:
                self._temporary(key).unlink(missing_ok=True)

    def _temporary(self, key: str) -> Path:
        path = self.out.folder / self.names[key]
        return path.with_name(f".{path.stem}.tmp{path.suffix}")
