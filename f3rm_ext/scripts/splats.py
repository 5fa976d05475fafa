"""``f3rm-ext splats``: what can be done to a finished run of splats."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from f3rm_ext.errors import ConfigError


@dataclass(kw_only=True)
class SplatsCommand:
    """Removes floaters from a finished run of sugar-ext, and says why each of them went.

    The evidence comes from the training views and from the other Gaussians; docs/splats-clean.md explains it. If more
    than 0.05 dB would be lost on held-out photos (on training photos where the run holds out none), reasons are
    withdrawn, costliest first. The run itself stays as it is. What remains is a run of its own, with the features of
    the Gaussians, for every command that takes --load-config; beside its config.yml are removed.ply, the splats that
    went with their reasons, and report.html, with pictures before and after. To train on, start a run from it with
    --pipeline.model.start-from.

    Typical calls:
      f3rm-ext splats clean --load-config .../config.yml
      f3rm-ext splats clean --load-config .../config.yml --dry-run
      f3rm-ext splats clean --load-config .../config.yml --out .../sugar-ext/clean
    """

    load_config: Path
    """config.yml of the run."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["--output"])] = None
    """Folder of the new run; by default beside the old one, with -clean at the end of its name. It must be new or of
    this command."""
    dry_run: bool = False
    """Only say what would be removed, and what it costs."""

    @classmethod
    def parse(cls, arguments: Sequence[str], prog: str) -> "SplatsCommand":
        """Returns the command of a command line: ``clean`` and its options.

        Raises:
            ConfigError: it begins with another word.
            SystemExit: from tyro, after help (0) or wrong options (2).
        """
        from f3rm_ext.scripts.switches import parse_command

        if not arguments or arguments[0] in ("-h", "--help"):
            arguments = ["clean", "--help"]
        if arguments[0] != "clean":
            raise ConfigError(f"There is no command `{prog} {arguments[0]}`: type `{prog} clean`.")
        return parse_command(cls, f"{prog} clean", arguments[1:])

    def main(self) -> int:
        """Cleans. Returns the exit code."""
        from f3rm_ext.export.clean import clean_splats, require_cleanable, require_own_run, write_cleaned
        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.utils.console import note, say

        run_folder = self.load_config.resolve().parent
        out = self.out or run_folder.with_name(f"{run_folder.name}-clean")
        if not self.dry_run:
            require_own_run(out, run_folder)
        run = load_splat_run(self.load_config)
        require_cleanable(run)
        cleaning = clean_splats(run)
        note(str(cleaning))
        if self.dry_run:
            return 0
        write_cleaned(run, self.load_config, out, cleaning)
        say(f"The run without them is {out / 'config.yml'}; {out / 'report.html'} shows the difference.")
        return 0
