"""The ledger as a report: Markdown, and one HTML page with plots."""

import datetime
from collections.abc import Sequence
from math import isfinite

from f3rm_ext.errors import LedgerError
from f3rm_ext.html.charts import range_chart
from f3rm_ext.html.page import render_page
from f3rm_ext.ledger.comparison import TOLERANCE, Comparison, compare
from f3rm_ext.ledger.entry import CONDITIONS, Entry
from f3rm_ext.ledger.intervals import quartiles
from f3rm_ext.ledger.tables import (
    comparison_table,
    entry_table,
    how_text,
    measured,
    origin_text,
    verdict_sentence,
    what_text,
)

TITLE = "What was measured"
LEAD = "Medians over the repeats; quartiles are in brackets and, in plots, the ends of lines."
IDEAS = "Ideas that were not run yet"
PLOTTED = ("it_per_s", "psnr", "ssim", "lpips", "train_peak_mib", "eval_peak_mib")


def groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Returns entries that were measured alike, together, in the order of their first."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(repr([entry.conditions.get(key) for key in CONDITIONS]), []).append(entry)
    return list(found.values())


def comparisons(group: Sequence[Entry], baseline: Entry | None, tolerance: float) -> list[Comparison]:
    """Returns the comparisons with a baseline of the other entries of its group; none in another group."""
    found = []
    if baseline is None or baseline.name not in [entry.name for entry in group]:
        return []
    for entry in group:
        try:
            if entry.name != baseline.name:
                found.append(compare(baseline, entry, tolerance))
        except LedgerError:  # nothing that can be judged, as of an attempt that failed
            continue
    return found


def _made() -> str:
    return f"Made by f3rm-ext bench report on {datetime.date.today().isoformat()}."


def markdown_report(entries: Sequence[Entry], baseline: Entry | None = None, tolerance: float = TOLERANCE) -> str:
    """Returns the report as Markdown.

    Args:
        entries: to report on.
        baseline: with which the others of its group are compared.
        tolerance: see :func:`~f3rm_ext.ledger.comparison.compare`.
    """
    parts = [f"# {TITLE}", f"{LEAD} {_made()}"]
    for group in groups([entry for entry in entries if not entry.is_idea]):
        conditions = group[0].conditions
        parts += [f"## {what_text(conditions)}", how_text(conditions), entry_table(group).markdown()]
        for found in comparisons(group, baseline, tolerance):
            parts += [f"### {found.new.name} against {found.base.name}", comparison_table(found).markdown()]
            parts += [*found.remarks, f"**{verdict_sentence(found)}**"]
        parts += ["### Notes", "\n".join(line for entry in group for line in _book(entry))]
    ideas = [line for entry in entries if entry.is_idea for line in _book(entry)]
    parts += [f"## {IDEAS}", "\n".join(ideas)] if ideas else []
    return "\n\n".join(parts) + "\n"


def _book(entry: Entry) -> list[str]:
    """The lab book of an entry: its command, its versions, its notes, and what is suspect or missing."""
    lines = [f"- **{entry.name}**: {entry.status}"]
    lines += [f"    - `ns-train {' '.join(entry.command)}`"] if entry.command else []
    lines += [f"    - {origin_text(entry)}"] if entry.origin else []
    lines += [f"    - {date[:10]}: {text}" for date, text in entry.notes]
    return lines + [f"    - needs a second look: {phrase}" for phrase in entry.suspicions()]


def html_report(entries: Sequence[Entry], baseline: Entry | None = None, tolerance: float = TOLERANCE) -> str:
    """Returns the report as one HTML page with plots; arguments as for :func:`markdown_report`."""

    def notes(entry: Entry) -> dict[str, object]:
        return {"entry": entry, "origin": origin_text(entry) if entry.origin else ""}

    sections = []
    for group in groups([entry for entry in entries if not entry.is_idea]):
        sections.append(
            {
                "title": what_text(group[0].conditions),
                "conditions": how_text(group[0].conditions),
                "charts": _charts(group),
                "table": entry_table(group),
                "comparisons": [
                    (comparison, comparison_table(comparison), verdict_sentence(comparison))
                    for comparison in comparisons(group, baseline, tolerance)
                ],
                "entries": list(map(notes, group)),
            }
        )
    ideas = [notes(entry) for entry in entries if entry.is_idea]
    return render_page(
        "bench.html", title=TITLE, lead=LEAD, sections=sections, ideas_title=IDEAS, ideas=ideas, made=_made()
    )


def _charts(group: Sequence[Entry]) -> list[tuple[str, str]]:
    charts = []
    for metric in measured(group):
        having = [entry for entry in group if entry.values(metric.key) and all(map(isfinite, entry.values(metric.key)))]
        if metric.key in PLOTTED and len(having) > 1:
            ranges = [quartiles(entry.values(metric.key)) for entry in having]
            charts.append((metric.title, range_chart(ranges, [entry.name for entry in having], label=metric.title)))
    return charts
