"""Entries and comparisons as tables and sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from f3rm_ext.html.tables import Table
from f3rm_ext.ledger.comparison import Comparison, Row
from f3rm_ext.ledger.entry import CONDITIONS, METRICS, Entry, Metric
from f3rm_ext.ledger.intervals import CONFIDENCE, Quartiles, quartiles

MISSING = "–"


def figure(metric: Metric, found: Quartiles | None) -> str:
    """Returns a median and, where repeats differ, the quartiles: ``11.06 (10.9–11.2)``."""
    if found is None:
        return MISSING
    low, middle, high = (format(value, metric.form) for value in found)
    return middle if low == high else f"{middle} ({low}–{high})"


def figure_of(metric: Metric, entry: Entry) -> str:
    """Returns a figure of an entry, see :func:`figure`."""
    values = entry.values(metric.key)
    return figure(metric, quartiles(values) if values else None)


def percent(share: float) -> str:
    """Returns a relative change.

    >>> percent(-0.0312), percent(0.0)
    ('-3.12 %', '+0.00 %')
    """
    return f"{100 * share:+.2f} %"


def measured(entries: Sequence[Entry]) -> list[Metric]:
    """Returns the metrics that at least one of the entries has."""
    return [metric for metric in METRICS if any(entry.values(metric.key) for entry in entries)]


def entry_table(entries: Sequence[Entry]) -> Table:
    """Returns a table with one row per metric and one column per entry."""
    rows = [
        ["method", *(entry.method for entry in entries)],
        ["status", *(entry.status for entry in entries)],
        ["begun", *(entry.date[:10] for entry in entries)],
        ["commit", *(commit_of(entry) for entry in entries)],
        ["repeats", *(str(len(entry.repeats)) for entry in entries)],
    ]
    rows += [[metric.title, *(figure_of(metric, entry) for entry in entries)] for metric in measured(entries)]
    return Table(["", *(entry.name for entry in entries)], rows)


def commit_of(entry: Entry) -> str:
    """Returns the commit of an entry's code, with a plus sign if files differed from it."""
    commit = entry.origin.get("commit")
    return MISSING if commit is None else f"{commit}{'+' if entry.origin.get('changed') else ''}"


def what_text(conditions: Mapping[str, Any]) -> str:
    """Returns what was trained, as a headline.

    >>> what_text({"capture": "fox", "width_px": 64, "height_px": 48, "first_step": 0, "last_step": 300})
    'fox, 64 × 48 px, steps 0 to 300'
    """
    parts = [str(conditions["capture"])] if "capture" in conditions else []
    if {"width_px", "height_px"} <= conditions.keys():
        parts.append(f"{conditions['width_px']} × {conditions['height_px']} px")
    if {"first_step", "last_step"} <= conditions.keys():
        parts.append(f"steps {conditions['first_step']} to {conditions['last_step']}")
    return ", ".join(parts) or "Conditions not known"


def how_text(conditions: Mapping[str, Any]) -> str:
    """Returns the other conditions of a measurement.

    >>> how_text({"capture": "fox", "eval_images": 5, "device": "cpu"})
    'held-out images: 5; device: cpu'
    """
    said = ("capture", "width_px", "height_px", "first_step", "last_step")
    known = [key for key in CONDITIONS if key in conditions and key not in said]
    return "; ".join(f"{CONDITIONS[key]}: {conditions[key]}" for key in known)


def origin_text(entry: Entry) -> str:
    """Returns what an entry was measured with, as one line."""
    known: Mapping[str, Any] = entry.origin
    parts = [f"commit {commit_of(entry)}"] if "commit" in known else []
    parts += [f"configuration {known['config']}"] if known.get("config") else []
    parts += [f"schedule of {known['schedule_steps']} steps"] if "schedule_steps" in known else []
    parts += [f"{name} {version}" for name, version in known.get("versions", {}).items()]
    return ", ".join(parts)


def comparison_table(found: Comparison) -> Table:
    """Returns a table with one row per metric: both entries, the change, its interval, the verdict."""
    header = ["", found.base.name, found.new.name, "change", f"{100 * CONFIDENCE:.0f} % interval", "verdict"]
    rows = [
        [
            row.metric.title,
            figure(row.metric, row.base),
            figure(row.metric, row.new),
            MISSING if row.change is None else percent(row.change.middle),
            _interval(row),
            _verdict(row),
        ]
        for row in found.rows
        if row.base is not None or row.new is not None or row.metric.judged != "no"
    ]
    return Table(header, rows)


def _interval(row: Row) -> str:
    if row.change is None or math.isinf(row.change.band):
        return MISSING
    return f"{percent(row.change.low)} to {percent(row.change.high)}"


def _verdict(row: Row) -> str:
    if row.metric.better == "neither":
        return ""
    better, worse = row.metric.words
    said = {"better": better, "worse": worse}.get(row.verdict, row.verdict)
    return f"{said} ({row.reason})" if row.reason else said


def verdict_sentence(found: Comparison) -> str:
    """Returns whether the new entry is worse than its baseline, and how small a change of speed could be seen."""
    speed = next(row for row in found.rows if row.metric.judged == "speed")
    band = ""
    if speed.change is not None and speed.verdict != "not judged":
        band = f" Changes of speed within ±{100 * speed.change.band:.1f} % are noise here."
    worse = ", ".join(row.metric.title.partition(",")[0] for row in found.regressions)
    if worse:
        return f"Regression of {found.new.name} against {found.base.name}: {worse}.{band}"
    return f"No regression of {found.new.name} against {found.base.name}.{band}"
