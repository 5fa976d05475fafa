"""Tables in Markdown."""

from typing import Any

Report = dict[str, Any]
"""What a benchmark has written as JSON."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table whose columns are right-aligned, but for the first."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def quality(metrics: Report) -> list[str]:
    """Returns the cells of PSNR, SSIM and LPIPS; a dash for what was not measured."""
    shown = (("psnr", 2), ("ssim", 3), ("lpips", 3))
    return [f"{metrics[name]:.{digits}f}" if name in metrics else "–" for name, digits in shown]
