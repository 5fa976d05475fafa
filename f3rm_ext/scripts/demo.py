"""``f3rm-ext demo``: from photos, or from nothing, to a report."""

import dataclasses
import shlex
from dataclasses import dataclass

from f3rm_ext.workflow.options import DemoOptions


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
        from rich.console import Console

        from f3rm_ext.utils.output_folder import new_folder
        from f3rm_ext.workflow.demo import DemoRun

        if not self.fresh:
            return DemoRun(self, Console()).main("type the same command again.")
        out = new_folder(self.out)
        run = DemoRun(dataclasses.replace(self, out=out), Console())
        return run.main(f"type the same command with --out {shlex.quote(str(out))} in place of --fresh.")
