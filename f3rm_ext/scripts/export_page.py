"""``f3rm-ext export page``: splats as a web page that can be turned and asked, in one file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext.query.options import QueryInputs, parse_queries
from f3rm_ext.scripts.common import SplatBudgetOptions, check_suffix, require_own_file

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from f3rm_ext.export.budget import Form


@dataclass(kw_only=True)
class Page(SplatBudgetOptions, QueryInputs):
    """Writes the splats of a run as one HTML file that opens in a browser, without a network.

    The page shows what was trained: drag to turn, jump to the cameras of the capture, fly and walk, save pictures and
    the splats themselves. It answers the questions that you give here: heat with a threshold, colours of all questions
    together, only the matches or all but them, and a list of the places where matches lie together. A question needs a
    feature on the Gaussians, which `f3rm-ext features lift` adds to a finished run. An existing file is replaced only
    if this program wrote it.

    Typical calls:
      f3rm-ext export page --load-config .../config.yml --out room.html
      f3rm-ext export page --load-config .../config.yml --out room.html --text "blue mug" "plant" --threshold 0.6
      f3rm-ext export page --load-config .../config.yml --out room.html --exemplar "mug=0001.jpg:250,300,80,80"
    """

    load_config: Path
    """config.yml of a run of sugar-ext."""
    out: Annotated[Path, tyro.conf.arg(aliases=["--output"])]
    """The .html file to write."""
    title: str = ""
    """Headline of the page; by default the name of the capture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_suffix(self.out, ".html")
        self.check_budget()

    def main(self) -> int:
        """Exports. Returns the exit code."""
        import torch

        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.export.page import COMMAND, PageContent, page_size, write_page
        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.html.content import capture_name
        from f3rm_ext.html.page import plural
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.query.run import Run
        from f3rm_ext.utils.console import say

        require_own_file(self.out, COMMAND)
        run = load_splat_run(self.load_config)
        photos = Run(run.model, run.manager, run.config, run.checkpoint, run.step)
        content = PageContent.of_run(
            run,
            encode_queries(parse_queries(self), photos),
            self.threshold,
            title=self.title or capture_name(photos.data),
            frame=CaptureFrame.of_outputs(run.manager.train_dataparser_outputs, photos.data),
        )
        if self.sh_degree is not None:
            content = content.take(torch.arange(len(content.gaussians)), self.sh_degree)

        def part(rows: "Int[Tensor, ' kept']", form: "Form") -> PageContent:
            taken = content.take(rows, form.sh_degree)
            return replace(taken, gaussians=form.apply(taken.gaussians))

        # A page holds its splats as .spz.
        kept = self.reduce(run, lambda rows, form: page_size(part(rows, form)), self.out.with_suffix(".spz"))
        if kept is not None:
            content = part(kept.rows, kept.form)
        made = write_page(self.out, content)
        asked = f" and {plural(len(content.questions), 'question')}" if content.questions else ""
        say(
            f"{made.count} Gaussians (SH degree {made.sh_degree}){asked} are in {self.out} ({made.size_mib:.1f} MiB): "
            "open it in a browser."
        )
        return 0
