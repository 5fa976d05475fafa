"""``f3rm-ext sfm process`` and ``view``: make a capture from photos, and view it."""

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext import events
from f3rm_ext.errors import DoubtfulPosesError
from f3rm_ext.scripts.common import print_training, serve_until_interrupt
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.utils.console import image_progress

if TYPE_CHECKING:
    from rich.progress import Progress

_UNITS = {"Matching photos": "pairs", "Reading the video": "frames"}
_LINE_EVERY_S = 5.0


class StageBars:
    """Progress bars of the stages in turn; printed lines if the output is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        # A duplicate of stderr, since COLMAP's messages are redirected from file descriptor 2 meanwhile.
        self._console = Console(file=open(os.dup(2), "w", encoding="utf-8"))
        self._stage, self._line_s = "", 0.0
        self._bar: Progress | None = None

    def show(self, stage: str, done: int, total: int) -> None:
        """Shows the progress of a stage."""
        events.progress(stage, done, total)
        if self._console.is_terminal:
            if stage != self._stage:
                self.close()
                self._bar = image_progress(_UNITS.get(stage, "images"), self._console)
                self._bar.start()
                self._task = self._bar.add_task(stage, total=total)
            assert self._bar is not None
            self._bar.update(self._task, completed=done, total=total)
        elif stage != self._stage or done == total or time.monotonic() - self._line_s > _LINE_EVERY_S:
            self._line_s = time.monotonic()
            print(f"{stage}: {done} of {total}", flush=True)
        self._stage = stage

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._console.file.flush()


@dataclass
class Process:
    """Estimate the camera pose of each photo and write a capture for training.

    Photos are copied upright to OUTPUT/images, and COLMAP estimates cameras and points. OUTPUT then holds
    transforms.json, sparse_pc.ply (the initial points of splats), COLMAP's own files and sfm_report.html, which lists
    photos that are blurred, duplicates, or without a pose, with the reason. You can stop the command at any time and
    repeat it to continue.

    The exit code is 0 if the photos confirm the poses, 3 if a capture was written but its poses are doubtful, and 2 if
    none was written. Doubtful poses replace an earlier capture whose poses are not doubtful only with --start-over.

    Typical calls:
      f3rm-ext sfm process --images photos/ --output capture/
      f3rm-ext sfm process --video clip.mp4 --output capture/ --num-frames 200
      f3rm-ext sfm process --images photos/ --masks masks/ --output capture/ --undistort
    """

    config: Annotated[ProcessConfig, tyro.conf.arg(name="")]
    """Options of the command."""

    def main(self) -> int:
        from f3rm_ext.sfm.process import Processing
        from f3rm_ext.sfm.report import summarize
        from f3rm_ext.sfm.work_folder import REPORT

        def say(sentence: str) -> None:
            events.note(sentence)
            print(sentence, flush=True)

        bars = StageBars()
        try:
            result = Processing(self.config, bars.show, say).run()
        finally:
            bars.close()
        summary, *remarks = summarize(result)
        print(summary)
        for remark in remarks:
            say(remark)
        capture = shlex.quote(str(self.config.output))
        print(f"Report: {self.config.output / REPORT}; viewer: f3rm-ext sfm view --capture {capture}")
        if result["doubt"]:
            raise DoubtfulPosesError(
                f"These poses are doubtful: {result['doubt']}. The capture was written anyway; to use it, give "
                f"--data {shlex.quote(str(self.config.output.absolute()))}."
            )
        print_training(self.config.output, "f3rm-ext", "sugar-ext")
        return 0


@dataclass
class View:
    """View the cameras, points and matches of a capture in the browser.

    The page can be opened on this machine only. Ctrl-C stops the server.
    """

    capture: Path
    """Folder written by `f3rm-ext sfm process`."""
    port: int = 7008
    """Port of the page, 1 to 65535. If it is in use, the next free port is taken."""

    def main(self) -> int:
        from f3rm_ext.sfm.view import serve

        return serve_until_interrupt(serve(self.capture, self.port))
