"""``f3rm-ext demo``: from photos (or from nothing) to a report one can look at."""

import sys
from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError
from f3rm_ext.report.demo import Demo as Workflow
from f3rm_ext.report.demo import DemoOptions, fresh_folder
from f3rm_ext.report.running import Interrupted

EXIT_INTERRUPTED = 130


@dataclass
class Demo:
    """Trains a feature field, evaluates it, asks it a question and reports, on a made-up room or on your photos.

    It runs the commands one would type (ns-train, ns-eval ...) and shows them in the report, DEMO/report.html: one
    file that needs no network. It may be stopped at any time (Ctrl-C); the same command goes on where it was.

    Typical calls:
      f3rm-ext demo
      f3rm-ext demo --data photos/room --out room-demo
      f3rm-ext demo --data photos/room --minutes 10 --steps 10000 --exemplar frame_00012.jpg:210,95
    """

    data: Path | None = None
    """Capture in nerfstudio's format (a folder with transforms.json); without it a room is made up."""
    out: Path = Path("demo")
    """Folder for everything the demo makes."""
    steps: int = 3000
    """Training steps of 512 rays, ≥ 1."""
    minutes: float = 3.0
    """Training is ended (and saved) after this many minutes, however many steps that were, > 0."""
    extractors: tuple[str, ...] = ()
    """2D features to distil, as for ns-train; by default those of f3rm-ext-lite, which need no weights."""
    scale: float = 0.0
    """Factor on the image size, (0, 1]; 0 takes the room as it is and reduces captures to about 400 px."""
    exemplar: str = ""
    """What to ask for: IMAGE:x,y (a training image and a place in it, in pixels at the scale used) or the name of a
    labelled object; by default something suitable."""
    fresh: bool = False
    """Start anew in a new folder (demo-2, demo-3 ...) instead of reusing what is finished."""

    def main(self) -> int:
        """Does it all. Returns the exit code."""
        from rich.console import Console

        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}, but has to be at least 1.")
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes:g}, but has to be more than 0.")
        if self.scale and not 0 < self.scale <= 1:
            raise ConfigError(f"--scale is {self.scale:g}, outside (0, 1]: give 0.5 for half the size, 0 to choose.")
        out = fresh_folder(self.out) if self.fresh else self.out
        options = DemoOptions(
            out=out,
            data=self.data,
            steps=self.steps,
            minutes=self.minutes,
            extractors=self.extractors,
            scale=self.scale,
            exemplar=self.exemplar,
        )
        console = Console()
        console.print(f"f3rm-ext demo in [bold]{out}[/]; logs in {out / 'logs'}", highlight=False, soft_wrap=True)
        try:
            report = Workflow(options, console).run()
        except Interrupted:
            print("\nStopped; the same command goes on from here.", file=sys.stderr)
            return EXIT_INTERRUPTED
        console.print(f"Report: [bold]{report}[/]", highlight=False, soft_wrap=True)
        return 0
