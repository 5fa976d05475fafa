"""``f3rm-ext demo``: from photos, or from nothing, to a report."""

import sys
from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError
from f3rm_ext.workflow.demo import DemoOptions, DemoRun, Method, fresh_folder

EXIT_INTERRUPTED = 130


@dataclass
class Demo:
    """Trains, evaluates and queries a scene and writes a report, for a synthetic room or for your photos.

    The demo runs the commands you would type (ns-train, ns-eval and others) and lists them in OUT/report.html, a single
    file that needs no network. You can stop it at any time with Ctrl-C; the same command continues where it stopped.

    Typical calls:
      f3rm-ext demo
      f3rm-ext demo --images photos/room --out room-demo
      f3rm-ext demo --data capture/ --minutes 10 --steps 10000 --exemplar frame_00012.jpg:210,95
    """

    data: Path | None = None
    """Capture: a folder with transforms.json or COLMAP's sparse/0. By default the demo makes a synthetic room."""
    images: Path | None = None
    """Folder of photos without poses, which `f3rm-ext sfm process` finds first."""
    out: Path = Path("demo")
    """Folder for all files of the demo."""
    method: Method = "auto"
    """f3rm-ext-lite trains a field, sugar-ext-lite splats, onto which features are lifted. auto: splats for few photos,
    else a field."""
    steps: int = 0
    """Training steps, 1 or more; 0: 3000 (of 512 rays) for a field, 1200 (of one photo) for splats."""
    minutes: float = 3.0
    """Minutes after which training is saved and stopped, even if steps are left, above 0."""
    extractors: tuple[str, ...] = ()
    """2D features to query, as for ns-train. The default is that of f3rm-ext-lite, which needs no weights."""
    scale: float = 0.0
    """Factor on the image size, (0, 1]. The default 0 keeps the room as it is and reduces captures to about 400 px."""
    exemplar: str = ""
    """Query: IMAGE:x,y (a training image and a position in it, in pixels at the scale in use) or the name of a labelled
    object. By default the demo chooses one."""
    fresh: bool = False
    """Start over in a new folder (demo-2, demo-3 ...) instead of reusing finished stages."""

    def main(self) -> int:
        """Runs the demo and returns the exit code."""
        from rich.console import Console

        if self.images is not None and self.data is not None:
            raise ConfigError("--images (photos without poses) and --data (a capture with poses) exclude each other.")
        if self.images is not None and not self.images.is_dir():
            raise ConfigError(f"There is no folder {self.images}: check the path given with --images.")
        if self.steps < 0:
            raise ConfigError(f"--steps is {self.steps}, but must be at least 1, or 0 for those of the method.")
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes:g}, but must be above 0.")
        if self.scale and not 0 < self.scale <= 1:
            raise ConfigError(f"--scale is {self.scale:g}, outside (0, 1]: give 0.5 for half the size, 0 to choose.")
        out = fresh_folder(self.out) if self.fresh else self.out
        options = DemoOptions(
            out=out,
            data=self.data,
            images=self.images,
            method=self.method,
            steps=self.steps,
            minutes=self.minutes,
            extractors=self.extractors,
            scale=self.scale,
            exemplar=self.exemplar,
        )
        console = Console()
        console.print(f"f3rm-ext demo in [bold]{out}[/]; logs in {out / 'logs'}", highlight=False, soft_wrap=True)
        try:
            report = DemoRun(options, console).run()
        except KeyboardInterrupt:
            print("\nStopped. The same command continues from here.", file=sys.stderr)
            return EXIT_INTERRUPTED
        console.print(f"Report: [bold]{report}[/]", highlight=False, soft_wrap=True)
        return 0
