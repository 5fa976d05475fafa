"""Tables in Markdown."""

from typing import Any

from f3rm_ext.html.tables import Table

Report = dict[str, Any]
"""What a benchmark has written as JSON."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table whose columns are right-aligned, but for the first."""
    return Table(head, rows).markdown()


def quality(metrics: Report) -> list[str]:
    """Returns the cells of PSNR, SSIM and LPIPS; a dash for what was not measured."""
    shown = (("psnr", 2), ("ssim", 3), ("lpips", 3))
    return [f"{metrics[name]:.{digits}f}" if name in metrics else "–" for name, digits in shown]
