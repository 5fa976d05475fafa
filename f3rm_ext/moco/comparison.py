"""Accuracies as a table: Markdown or HTML."""

from collections.abc import Sequence
from pathlib import Path

from f3rm_ext.html.page import render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.moco.evaluation import Score, confidence_interval
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.provenance import sign_text

MADE_BY = "f3rm-ext moco eval"


def percent(values: Sequence[float]) -> str:
    """Returns the mean in % with half of the 95 % interval."""
    if not values:
        return "–"
    mean, half = confidence_interval(values)
    return f"{100 * mean:.1f} ± {100 * half:.1f}"


def table_rows(scores: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a table in %, each mean with half of its 95 % interval.

    >>> table_rows([Score("histograms", (0.5,), (0.6,))])
    (['features', 'k-NN', 'linear probe'], [['histograms', '50.0 ± 0.0', '60.0 ± 0.0']])
    """

    header, columns = ["features", "k-NN", "linear probe"], 2
    if any(score.fine_tuned for score in scores):
        header, columns = [*header, "fine-tuned"], 3
    rows = [[score.name, *map(percent, (score.knn, score.linear, score.fine_tuned)[:columns])] for score in scores]
    return header, rows


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    >>> print(markdown("Accuracy", ["features", "k-NN"], [["DAISY", "50.0"]]), end="")
    Accuracy
    <BLANKLINE>
    | features | k-NN |
    | --- | --: |
    | DAISY | 50.0 |
    """
    return f"{title}\n\n{Table(header, rows).markdown()}\n"


def write_table(path: Path, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table as HTML if the file ends in .html, otherwise as Markdown.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path.suffix == ".html":
        text = render_page("table.html", title=title, eyebrow=MADE_BY, table=Table(header, rows))
    else:
        text = markdown(title, header, rows)
    with replace_file(path, "--table") as stream:
        stream.write(sign_text(text, MADE_BY))
