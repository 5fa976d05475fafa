"""``f3rm-ext demo``: from photos, or from nothing, to a report."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.workflow.demo import DemoOptions, DemoRun

EXIT_INTERRUPTED = 130


@dataclass
class Demo(DemoOptions):
    """Trains, evaluates and queries a scene and writes a report, for a synthetic room or for your photos.

    The demo runs the commands you would type (ns-train, ns-eval and others) and lists them in OUT/report.html, a single
    file that needs no network. You can stop it at any time with Ctrl-C; the same command continues where it stopped.

    Typical calls:
      f3rm-ext demo
      f3rm-ext demo --images photos/room --out room-demo
      f3rm-ext demo --data capture/ --minutes 10 --steps 10000 --exemplar frame_00012.jpg:210,95
    """

    fresh: bool = False
    """Start over in a new folder (demo-2, demo-3 ...) instead of reusing finished stages."""

    def main(self) -> int:
        """Runs the demo and returns the exit code."""
        from rich.console import Console

        options = dataclasses.replace(self, out=new_folder(self.out)) if self.fresh else self
        out, console = options.out, Console()
        console.print(f"f3rm-ext demo in [bold]{out}[/]; logs in {out / 'logs'}", highlight=False, soft_wrap=True)
        try:
            report = DemoRun(options, console).run()
        except KeyboardInterrupt:
            print("\nStopped. The same command continues from here.", file=sys.stderr)
            return EXIT_INTERRUPTED
        console.print(f"Report: [bold]{report}[/]", highlight=False, soft_wrap=True)
        return 0


def new_folder(path: Path) -> Path:
    """Returns the first of ``path``, ``path-2``, ``path-3`` ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
