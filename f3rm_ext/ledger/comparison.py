"""Comparison of an entry with a baseline: which figures changed, beyond noise, and whether that is a regression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from f3rm_ext.errors import LedgerError
from f3rm_ext.ledger.entry import CONDITIONS, METRICS, SPEED_CONDITIONS, Entry, Metric, Repeat
from f3rm_ext.ledger.intervals import Change, Quartiles, independent_change, paired_change, quartiles

MIN_REPEATS = 3
"""Number of repeats of both entries from which on speed is judged."""
TOLERANCE = 0.005
"""Relative change of a quality figure that does not count."""

Verdict = Literal["better", "no difference", "within tolerance", "undecided", "worse", "not judged"]


@dataclass(frozen=True)
class Row:
    """A figure of both entries and its change."""

    metric: Metric
    base: Quartiles | None
    """Quartiles over the repeats; None if it was not measured."""
    new: Quartiles | None
    change: Change | None
    """Relative change; None if it cannot be computed."""
    verdict: Verdict
    reason: str = ""
    """Reason for the verdict, where it is not plain."""


@dataclass(frozen=True)
class Comparison:
    """An entry beside its baseline."""

    base: Entry
    new: Entry
    rows: Sequence[Row]
    remarks: Sequence[str]
    """Sentences about the reliability of the figures."""

    @property
    def regressions(self) -> list[Row]:
        """Rows that are judged, and worse."""
        return [row for row in self.rows if row.verdict == "worse" and row.metric.judged != "no"]


def compare(base: Entry, new: Entry, tolerance: float = TOLERANCE) -> Comparison:
    """Compares an entry with a baseline.

    Speed is worse if the 95 % confidence interval of its change lies below zero. Quality is worse if its change exceeds
    the tolerance and the interval does not reach zero. Memory is shown, and not part of the judgement.

    Args:
        tolerance: relative change of a quality figure that does not count; 0.005 is 0.5 %.

    Raises:
        LedgerError: they were not measured alike, or have nothing in common that can be judged.
    """
    differences = [
        f"{name} ({base.conditions[key]} and {new.conditions[key]})"
        for key, name in CONDITIONS.items()
        if key in base.conditions and key in new.conditions and base.conditions[key] != new.conditions[key]
    ]
    if differences:
        raise LedgerError(
            f"{new.name} cannot be compared with {base.name}, because they differ in {', '.join(differences)}: measure "
            "both alike, for instance with `f3rm-ext bench run --against`."
        )
    unknown = {key for key in CONDITIONS for entry in (base, new) if key not in entry.conditions}
    sessions = {repeat.session for repeat in base.repeats} & {repeat.session for repeat in new.repeats}
    rows = [_row(metric, base, new, tolerance, unknown, sessions) for metric in METRICS]
    if not any(row.verdict != "not judged" for row in rows if row.metric.judged != "no"):
        raise LedgerError(
            f"{new.name} and {base.name} have no figure in common that can be judged: measure both with at least "
            f"{MIN_REPEATS} repeats, and evaluate them."
        )
    return Comparison(base, new, rows, _remarks(base, new, unknown, sessions))


def _remarks(base: Entry, new: Entry, unknown: set[str], sessions: set[str]) -> list[str]:
    remarks = []
    if not sessions:
        remarks.append(
            "The repeats were not run in turn, so changes of the machine in between affect the speed: measure with "
            "--against to rule that out."
        )
    if unknown:
        remarks.append(f"Not known of both: {', '.join(name for key, name in CONDITIONS.items() if key in unknown)}.")
    for entry in (base, new):
        if phrases := entry.anomalies():
            remarks.append(f"{entry.name} needs a second look: {'; '.join(phrases)}.")
    return remarks


def _row(metric: Metric, base: Entry, new: Entry, tolerance: float, unknown: set[str], sessions: set[str]) -> Row:
    samples = base.values(metric.key), new.values(metric.key)
    spreads = [quartiles(values) if values and all(map(math.isfinite, values)) else None for values in samples]

    def row(verdict: Verdict, reason: str = "", change: Change | None = None) -> Row:
        return Row(metric, spreads[0], spreads[1], change, verdict, reason)

    if not all(samples):
        names = " and ".join(entry.name for entry, values in zip((base, new), samples, strict=True) if not values)
        return row("not judged", f"not measured of {names}")
    if spreads[0] is not None and spreads[1] is None:
        return row("worse", "not finite")
    if spreads[0] is None or any(value <= 0 for values in samples for value in values):
        return row("not judged", "not a positive number")
    is_quality = metric.judged == "quality"
    change = _change(metric, base, new, by_seed=is_quality, sessions=sessions)
    if metric.judged == "speed":
        # Of two trainings that were no benchmarks, neither tells its warm-up and threads.
        told = {"device", "hardware", *base.conditions, *new.conditions}
        if names := ", ".join(CONDITIONS[key] for key in SPEED_CONDITIONS if key in unknown & told):
            return row("not judged", f"not known: {names}", change)
        if change.repeats < MIN_REPEATS:
            return row("not judged", f"fewer than {MIN_REPEATS} repeats", change)
    return row(*_judge(metric, change, tolerance if is_quality else 0.0), change=change)


def _change(metric: Metric, base: Entry, new: Entry, *, by_seed: bool, sessions: set[str]) -> Change:
    """The change of a figure, from pairs where repeats belong together: by their seed, or because they took turns."""

    def index_repeats(entry: Entry) -> dict[object, float]:
        keys: dict[object, Repeat]
        if by_seed:
            keys = {repeat.seed: repeat for repeat in entry.repeats if repeat.seed is not None}
        else:
            keys = {
                (session, turn): repeat
                for session in sessions
                for turn, repeat in enumerate(one for one in entry.repeats if one.session == session)
            }
        return {key: repeat.values[metric.key] for key, repeat in keys.items() if metric.key in repeat.values}

    before, after = index_repeats(base), index_repeats(new)
    pairs = [key for key in before if key in after]
    samples = base.values(metric.key), new.values(metric.key)
    if len(pairs) == min(map(len, samples)):
        return paired_change([before[key] for key in pairs], [after[key] for key in pairs])
    return independent_change(*samples)


def _judge(metric: Metric, change: Change, tolerance: float) -> tuple[Verdict, str]:
    if metric.better == "neither":
        return "not judged", ""
    sign = 1 if metric.better == "higher" else -1
    gain = sign * change.middle
    low, high = sorted((sign * change.low, sign * change.high))
    if abs(gain) <= tolerance:
        return ("within tolerance", "") if tolerance else ("no difference", "")
    if change.repeats == 1:
        return ("better" if gain > 0 else "worse"), "a single run"
    if low > 0:
        return "better", ""
    if high < 0:
        return "worse", ""
    return ("undecided", "more repeats would tell") if tolerance else ("no difference", "")
