"""Entries and comparisons as tables and sentences, and the ledger's report as Markdown and as a page."""

import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from f3rm_ext.errors import LedgerError
from f3rm_ext.html.charts import range_chart
from f3rm_ext.html.page import render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.ledger.comparison import TOLERANCE, Comparison, Row, compare
from f3rm_ext.ledger.entry import CONDITIONS, METRICS, SPEED_CONDITIONS, Entry, Metric
from f3rm_ext.ledger.intervals import CONFIDENCE, Quartiles, quartiles

MISSING = "–"
TITLE = "What was measured"
LEAD = "Medians over the repeats; quartiles are in brackets and, in plots, the ends of lines."
IDEAS = "Ideas that were not run yet"
PLOTTED = ("it_per_s", "psnr", "ssim", "lpips", "train_peak_mib", "eval_peak_mib")


def markdown_report(entries: Sequence[Entry], baseline: Entry | None = None, tolerance: float = TOLERANCE) -> str:
    """Returns the report as Markdown; entries that were measured like the baseline are compared with it."""
    parts = [f"# {TITLE}", f"{LEAD} {_signature()}"]
    for group in _groups(entries):
        parts += [f"## {conditions_title(group[0])}", conditions_text(group[0]), entry_table(group).markdown()]
        for comparison in _comparisons(group, baseline, tolerance):
            parts.append(f"### {comparison.new.name} against {comparison.base.name}")
            parts += [comparison_table(comparison).markdown(), *comparison.remarks]
            parts.append(f"**{verdict_sentence(comparison)}**")
        parts += ["### Notes", "\n".join(line for entry in group for line in _notes(entry))]
    ideas = [line for entry in entries if entry.is_idea for line in _notes(entry)]
    parts += [f"## {IDEAS}", "\n".join(ideas)] if ideas else []
    return "\n\n".join(parts) + "\n"


def html_report(entries: Sequence[Entry], baseline: Entry | None = None, tolerance: float = TOLERANCE) -> str:
    """Returns the report as one HTML page with plots; arguments as for :func:`markdown_report`."""
    sections = [
        {
            "entries": group,
            "charts": _charts(group),
            "table": entry_table(group),
            "comparisons": [
                (comparison, comparison_table(comparison), verdict_sentence(comparison))
                for comparison in _comparisons(group, baseline, tolerance)
            ],
        }
        for group in _groups(entries)
    ]
    return render_page(
        "bench.html",
        title=TITLE,
        lead=LEAD,
        sections=sections,
        ideas_title=IDEAS,
        ideas=[entry for entry in entries if entry.is_idea],
        conditions_title=conditions_title,
        conditions_text=conditions_text,
        origin_text=origin_text,
        command_text=command_text,
        signature=_signature(),
    )


def entry_table(entries: Sequence[Entry]) -> Table:
    """Returns a table with one row per metric and one column per entry."""
    rows = [
        ["method", *(entry.method for entry in entries)],
        ["status", *(entry.status for entry in entries)],
        ["begun", *(entry.date[:10] for entry in entries)],
        ["commit", *(commit_text(entry) for entry in entries)],
        ["repeats", *(str(len(entry.repeats)) for entry in entries)],
    ]
    rows += [[metric.title, *(figure_text(metric, entry) for entry in entries)] for metric in _metrics(entries)]
    return Table(["", *(entry.name for entry in entries)], rows)


def comparison_table(comparison: Comparison) -> Table:
    """Returns a table with one row per metric: both entries, the change, its interval, the verdict."""
    names = comparison.base.name, comparison.new.name
    header = ["", *names, "change", f"{100 * CONFIDENCE:.0f} % interval", "verdict"]
    rows = [
        [
            row.metric.title,
            quartiles_text(row.metric, row.base),
            quartiles_text(row.metric, row.new),
            MISSING if row.change is None else percent(row.change.middle),
            MISSING
            if row.change is None or math.isinf(row.change.band)
            else f"{percent(row.change.low)} to {percent(row.change.high)}",
            _verdict(row),
        ]
        for row in comparison.rows
        if row.base is not None or row.new is not None or row.metric.judged != "no"
    ]
    return Table(header, rows)


def verdict_sentence(comparison: Comparison) -> str:
    """Returns whether the new entry is worse than its baseline, and how small a change of speed could be seen."""
    speed = next(row for row in comparison.rows if row.metric.judged == "speed")
    band = ""
    if speed.change is not None and speed.verdict != "not judged":
        band = f" Changes of speed within ±{100 * speed.change.band:.1f} % are noise here."
    names = f"of {comparison.new.name} against {comparison.base.name}"
    worse = ", ".join(row.metric.title.partition(",")[0] for row in comparison.regressions)
    return f"Regression {names}: {worse}.{band}" if worse else f"No regression {names}.{band}"


def quartiles_text(metric: Metric, values: Quartiles | None) -> str:
    """Returns a median and, where repeats differ, the quartiles: ``11.06 (10.9–11.2)``."""
    if values is None:
        return MISSING
    low, middle, high = (format(value, metric.form) for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"


def figure_text(metric: Metric, entry: Entry) -> str:
    """Returns a figure of an entry, see :func:`quartiles_text`."""
    values = entry.values(metric.key)
    return quartiles_text(metric, quartiles(values) if values else None)


def percent(share: float) -> str:
    """Returns a relative change.

    >>> percent(-0.0312), percent(0.0)
    ('-3.12 %', '+0.00 %')
    """
    return f"{100 * share:+.2f} %"


def commit_text(entry: Entry) -> str:
    """Returns the commit of an entry's code, with a plus sign if files differed from it."""
    commit = entry.origin.get("commit")
    return MISSING if commit is None else f"{commit}{'+' if entry.origin.get('changed') else ''}"


def command_text(entry: Entry) -> str:
    """Returns the command of an entry, as it can be typed.

    >>> command_text(Entry("a", "", "nerfacto", command=("nerfacto", "--data", "my room")))
    "ns-train nerfacto --data 'my room'"
    """
    return shlex.join(["ns-train", *entry.command])


def conditions_title(entry: Entry) -> str:
    """Returns capture, image size and steps of an entry as a headline.

    >>> known = {"capture": "fox", "width_px": 64, "height_px": 48, "first_step": 0, "last_step": 300}
    >>> conditions_title(Entry("a", "", "nerfacto", conditions=known))
    'fox, 64 × 48 px, steps 0 to 300'
    """
    known = entry.conditions
    parts = [str(known["capture"])] if "capture" in known else []
    if {"width_px", "height_px"} <= known.keys():
        parts.append(f"{known['width_px']} × {known['height_px']} px")
    if {"first_step", "last_step"} <= known.keys():
        parts.append(f"steps {known['first_step']} to {known['last_step']}")
    return ", ".join(parts) or "Conditions not known"


def conditions_text(entry: Entry) -> str:
    """Returns the conditions of an entry that its headline does not tell.

    >>> conditions_text(Entry("a", "", "nerfacto", conditions={"capture": "fox", "eval_images": 5, "device": "cpu"}))
    'held-out images: 5; device: cpu'
    """
    in_title = ("capture", "width_px", "height_px", "first_step", "last_step")
    keys = [key for key in CONDITIONS if key in entry.conditions and key not in in_title]
    return "; ".join(f"{CONDITIONS[key]}: {entry.conditions[key]}" for key in keys)


def origin_text(entry: Entry) -> str:
    """Returns commit, configuration, schedule and versions of an entry as one line."""
    known: Mapping[str, Any] = entry.origin
    parts = [f"commit {commit_text(entry)}"] if "commit" in known else []
    parts += [f"configuration {known['config']}"] if known.get("config") else []
    parts += [f"schedule of {known['schedule_steps']} steps"] if "schedule_steps" in known else []
    parts += [f"{name} {version}" for name, version in known.get("versions", {}).items()]
    return ", ".join(parts)


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that were measured alike, together, without ideas, in the order of their first."""
    groups: list[list[Entry]] = []
    for entry in entries:
        if entry.is_idea:
            continue
        for group in groups:
            if all(_are_alike(other, entry) for other in group):
                group.append(entry)
                break
        else:
            groups.append([entry])
    return groups


def _are_alike(one: Entry, other: Entry) -> bool:
    """Returns whether conditions are equal; those of speed may be unknown, as of trainings that were no benchmarks."""
    values = {key: {entry.conditions.get(key) for entry in (one, other)} for key in CONDITIONS}
    return all(len(both - {None} if key in SPEED_CONDITIONS else both) <= 1 for key, both in values.items())


def _comparisons(group: Sequence[Entry], baseline: Entry | None, tolerance: float) -> list[Comparison]:
    """The comparisons with a baseline of the other entries of its group; none in another group."""
    if baseline is None or baseline.name not in [entry.name for entry in group]:
        return []
    comparisons = []
    for entry in group:
        try:
            if entry.name != baseline.name:
                comparisons.append(compare(baseline, entry, tolerance))
        except LedgerError:  # it has no figures that can be judged, as after a failure
            continue
    return comparisons


def _metrics(entries: Sequence[Entry]) -> list[Metric]:
    """The metrics that at least one of the entries has."""
    return [metric for metric in METRICS if any(entry.values(metric.key) for entry in entries)]


def _charts(group: Sequence[Entry]) -> list[tuple[str, str]]:
    charts = []
    for metric in _metrics(group):
        samples = {entry.name: values for entry in group if (values := entry.values(metric.key))}
        samples = {name: values for name, values in samples.items() if all(map(math.isfinite, values))}
        if metric.key in PLOTTED and len(samples) > 1:
            chart = range_chart(list(map(quartiles, samples.values())), list(samples), label=metric.title)
            charts.append((metric.title, chart))
    return charts


def _verdict(row: Row) -> str:
    if row.metric.better == "neither":
        return ""
    better, worse = row.metric.words
    verdict = {"better": better, "worse": worse}.get(row.verdict, row.verdict)
    return f"{verdict} ({row.reason})" if row.reason else verdict


def _notes(entry: Entry) -> list[str]:
    """Lines about an entry: its command, versions and notes, and what is suspect or missing."""
    lines = [f"- **{entry.name}**: {entry.status}"]
    lines += [f"    - `{command_text(entry)}`"] if entry.command else []
    lines += [f"    - {origin_text(entry)}"] if entry.origin else []
    lines += [f"    - {date[:10]}: {text}" for date, text in entry.notes]
    return lines + [f"    - needs a second look: {phrase}" for phrase in entry.anomalies()]


def _signature() -> str:
    return f"Made by f3rm-ext bench report on {datetime.date.today().isoformat()}."
