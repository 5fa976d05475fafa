"""Tables of plain text, for pages, Markdown and the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells of a table.

    >>> print(Table(["method", "PSNR"], [["a|b", "20.1"]]).markdown())
    | method | PSNR |
    | --- | --: |
    | a\\|b | 20.1 |
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    columns: str = "l"
    """How columns are aligned, a letter each: left, right, or note (left, in small type). Further ones are ``r``."""

    @property
    def alignments(self) -> str:
        """A letter for every column."""
        return self.columns.ljust(len(self.header), "r")

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        rule = ["--:" if letter == "r" else "---" for letter in self.alignments]
        lines = [
            [cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (self.header, rule, *self.rows)
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def text(self) -> str:
        """Returns the table for a terminal: padded by spaces, and never wrapped, so that other programs can read it."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if letter == "r" else cell.ljust(width)
                for cell, width, letter in zip(line, widths, self.alignments, strict=True)
            ).rstrip()
            for line in lines
        )
