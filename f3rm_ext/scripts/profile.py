"""``f3rm-ext profile``: what the memory of a training run consisted of, and which options lower it."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from f3rm_ext.scripts.common import require_own_file


@dataclass
class Profile:
    """Explain the memory of a run that was trained with --profile-tensors True.

    Prints the peaks and what they consist of, warns of leaks and fragmentation, and lists options that lower the
    memory, the least harmful first. Writes charts to RUN/tensor_profile.png and a page to RUN/tensor_profile.html.

    Typical calls:
      f3rm-ext profile latest
      f3rm-ext profile outputs/room/sugar-ext/2026-01-01_120000
      f3rm-ext profile latest --compare outputs/room/sugar-ext/2026-01-01_120000
    """

    run: tyro.conf.Positional[str]
    """Run folder, its config.yml, or latest for the newest run with a profile."""
    compare: str = ""
    """Folder of another run to compare with, or latest."""
    outputs: Path = Path("outputs")
    """Folder in which latest looks for runs."""
    out: Path | None = None
    """Folder for the charts and the page; by default the run folder."""

    def main(self) -> None:
        """Prints the report and writes the charts."""
        from rich.console import Console

        from f3rm_ext.html.profile_charts import COMMAND, write_picture
        from f3rm_ext.html.profile_page import build_page, print_profile
        from f3rm_ext.profiling.profile_file import find_profile, read_profile
        from f3rm_ext.utils.output_file import replace_file, write_file
        from f3rm_ext.utils.provenance import sign_text

        path = find_profile(self.run, self.outputs)
        page = (self.out or path.parent) / "tensor_profile.html"
        picture = page.with_suffix(".png")
        if self.out is not None:  # those in a run folder are this command's
            for file in (page, picture):
                require_own_file(file, COMMAND)
        profile = read_profile(path)
        other = read_profile(find_profile(self.compare, self.outputs)) if self.compare else None
        console = Console()
        print_profile(profile, other, console)
        with replace_file(picture) as stream:
            write_picture(profile, other, stream)
        write_file(page, sign_text(build_page(profile, other), COMMAND))
        console.print(f"Charts: {page} and .png", highlight=False, soft_wrap=True)
