"""Tables in Markdown."""

from typing import Any

Report = dict[str, Any]
"""What a benchmark has written as JSON."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table whose columns are right-aligned, but for the first."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
