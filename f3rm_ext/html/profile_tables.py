"""The report of a tensor profile as tables for the terminal."""

import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from f3rm_ext.profiling.conclusions import comparison_sentence, conclude
from f3rm_ext.profiling.memory import readable
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.profiling.snapshot import Snapshot

MOST_TENSORS = 12
"""Largest tensors that are listed."""
PARTS = ("parameters", "gradients", "optimizer")


def print_profile(profile: Profile, other: Profile | None, console: Console) -> None:
    """Prints the report.

    Args:
        profile: of the run.
        other: of a run to compare with.
        console: to print on.
    """
    last = profile.snapshots[-1]
    console.print(f"[bold]{describe(profile)}[/]", highlight=False, soft_wrap=True)
    if other is not None:
        console.print(f"compared with {describe(other)}", highlight=False, soft_wrap=True)
    for title, head, rows in tables(profile, other):
        console.print(_table(title, head, rows))
    found = conclude(profile)
    for sentence in found.sentences:
        console.print(sentence, highlight=False)
    if other is not None:
        console.print(comparison_sentence(profile, other), highlight=False)
    for finding in found.warnings:
        console.print(f"[yellow]Warning: {finding.text}[/]", highlight=False)
    console.print(f"[bold]{found.verdict}[/]", highlight=False)
    for number, advice in enumerate(found.advice, 1):
        text = f"  {number}. {advice.command}  (now {advice.now}; {advice.loss}; lowers {advice.lowers})"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"[dim]{cost_sentence(profile)}{damage_sentence(profile)} Step {last.step} is the last record.[/]",
        highlight=False,
    )


Rows = list[tuple[str, ...]]


def tables(profile: Profile, other: Profile | None = None) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Returns the tables of a report: title, head and rows. Columns after the first are right-aligned.

    Args:
        profile: of the run.
        other: of a run to compare with.
    """
    last, before = profile.snapshots[-1], None if other is None else other.snapshots[-1]
    step = f"step {last.step}"
    found: list[tuple[str, tuple[str, ...], Rows]] = []
    found.append(("Tensors by category", ("category", step, "share"), _categories(last)))
    if last.host:
        found.append(("In main memory", ("category", step, "share"), _sizes(last.host)))
    found.append(("Parameters by name", ("name", *PARTS, "all"), _named(last)))
    found.append(("Peaks by phase", ("phase", *_measured(profile)), _phases(profile)))
    found.append(("By dtype", ("dtype", step, "share"), _sizes(last.dtypes)))
    found.append(
        ("Memory", ("", step, "of the GPU" if profile.device == "cuda" else "of the machine"), _memory(profile))
    )
    rows: Rows = [
        (one["name"], one["category"], f"{one['dtype']} {'×'.join(map(str, one['shape']))}", readable(one["bytes"]))
        for one in last.largest[:MOST_TENSORS]
    ]
    found.append((f"Largest tensors ({last.large} of 10 MiB or more)", ("tensor", "category", "shape", "size"), rows))
    if before is not None and other is not None:
        found.append(("Compared", ("", "this run", "other run", "change"), _compared(profile, other)))
    return [(title, head, rows) for title, head, rows in found if rows]


def describe(profile: Profile) -> str:
    """Names a run: method, device, when and how it ended."""
    start = profile.start
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(start.get("began", 0))))
    end = profile.end or "no end recorded: it goes on, or was killed"
    return f"{profile.path.parent}: {start.get('method', 'run')} on {start.get('device', '?')}, {began}, {end}"


def cost_sentence(profile: Profile) -> str:
    """Says what the snapshots have cost."""
    costs = [one.cost_ms for one in profile.snapshots]
    total_s = max(1e-9, profile.snapshots[-1].seconds)
    share = sum(costs) / total_s / 10
    return f"{len(costs)} records took {sum(costs) / len(costs):.0f} ms each, {share:.2g} % of the run."


def damage_sentence(profile: Profile) -> str:
    """Says how many lines of the file were skipped; empty for none."""
    return f" {profile.damaged} damaged line(s) of the profile were skipped." if profile.damaged else ""


def _categories(last: Snapshot) -> Rows:
    rows = _sizes(last.categories)
    rows.append(("all", readable(last.total), "100 %"))
    rows.append(("activations, within a step", readable(last.activations), ""))
    return rows


def _sizes(sizes: Mapping[str, int]) -> Rows:
    total = max(1, sum(sizes.values()))
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [(name, readable(size), f"{100 * size / total:.1f} %") for name, size in ordered if size]


def _named(last: Snapshot) -> Rows:
    ordered = sorted(last.named.items(), key=lambda item: -sum(item[1].values()))
    return [
        (name, *(readable(parts.get(part, 0)) for part in PARTS), readable(sum(parts.values())))
        for name, parts in ordered
    ]


def _phases(profile: Profile) -> Rows:
    tensors, device = profile.peaks(), profile.peaks("device")
    ordered = sorted(tensors.items(), key=lambda item: -item[1])
    if not device:
        return [(name, readable(size)) for name, size in ordered]
    return [(name, readable(size), readable(device[name]) if name in device else "–") for name, size in ordered]


def _memory(profile: Profile) -> Rows:
    last, total = profile.snapshots[-1], profile.device_total

    def of_device(size: int) -> str:
        return f"{100 * size / total:.1f} %" if total else "–"

    rows: Rows = []
    if last.reserved is not None:
        parts = {
            "allocated by torch": last.allocated or 0,
            "reserved by torch": last.reserved,
            "… cache in it, used again": last.cache,
            "… gaps in it, the fragmentation": last.gaps or 0,
        }
        rows += [(name, readable(size), of_device(size)) for name, size in parts.items()]
    if last.device_used is not None:
        rows.append(("whole GPU, by NVML", readable(last.device_used), of_device(last.device_used)))
    share = of_device(last.resident) if profile.device == "cpu" else "–"
    return [*rows, ("resident memory of the process", readable(last.resident), share)]


def _compared(profile: Profile, other: Profile) -> Rows:
    mine, theirs = profile.snapshots[-1], other.snapshots[-1]
    ours: dict[str, int] = {f"peak, {name}": size for name, size in profile.peaks().items()}
    others: dict[str, int] = {f"peak, {name}": size for name, size in other.peaks().items()}
    ours |= {**mine.categories, "activations": mine.activations}
    others |= {**theirs.categories, "activations": theirs.activations}
    return [
        (
            name,
            readable(ours.get(name, 0)),
            readable(others.get(name, 0)),
            _change(ours.get(name, 0), others.get(name, 0)),
        )
        for name in dict.fromkeys([*ours, *others])
        if ours.get(name) or others.get(name)
    ]


def _change(now: int, before: int) -> str:
    return "–" if not before else f"{100 * (now - before) / before:+.1f} %"


def _measured(profile: Profile) -> list[str]:
    return ["tensors" if profile.device == "cuda" else "process", *(["whole GPU"] if profile.peaks("device") else [])]


def _table(title: str, head: Iterable[str], rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
