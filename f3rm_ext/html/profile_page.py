"""The report of `f3rm-ext profile`: in the terminal, and as a page."""

import time
from collections.abc import Mapping

from rich.console import Console

from f3rm_ext.html.page import render_page
from f3rm_ext.html.profile_charts import COLORS, svg_charts, used_categories
from f3rm_ext.html.tables import Table
from f3rm_ext.profiling.conclusions import comparison_sentence, conclude, highest
from f3rm_ext.profiling.memory import readable
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.profiling.snapshot import Snapshot

MAX_TENSORS = 12
"""Number of largest tensors that are listed."""
PARTS = ("parameters", "gradients", "optimizer")

Rows = list[list[str]]


def print_profile(profile: Profile, other: Profile | None, console: Console) -> None:
    """Prints the report."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(describe(profile), "bold")
    if other is not None:
        say(f"compared with {describe(other)}")
    for title, table in tables(profile, other):
        say(title, "bold")
        say(f"{table.text()}\n")
    conclusion = conclude(profile)
    for sentence in conclusion.sentences:
        say(sentence)
    if other is not None:
        say(comparison_sentence(profile, other))
    for warning in conclusion.warnings:
        say(f"Warning: {warning.text}", "yellow")
    say(conclusion.verdict, "bold")
    for number, item in enumerate(conclusion.advice, 1):
        say(f"  {number}. {item.command}  (now {item.now}; {item.loss}; lowers {item.lowers})")
    say(f"{cost_sentence(profile)} Step {profile.snapshots[-1].step} is the last record.", "dim")


def build_page(profile: Profile, other: Profile | None = None) -> str:
    """Returns the page."""
    conclusion = conclude(profile)
    comparison = [] if other is None else [comparison_sentence(profile, other)]
    last = profile.snapshots[-1]
    sizes = {name: last.categories[name] for name in used_categories(profile)} | {"activations": last.activations}
    return render_page(
        "profile.html",
        title=f"Memory of {profile.start.get('method', 'run')}",
        lead=" ".join([*conclusion.sentences, *comparison]),
        keys=_key_figures(profile),
        warnings=conclusion.warnings,
        step=last.step,
        stack=[(name, size, readable(size), COLORS[name]) for name, size in sizes.items() if size],
        charts=svg_charts(profile),
        verdict=conclusion.verdict,
        advice=conclusion.advice,
        tables=tables(profile, other),
        costs=cost_sentence(profile),
    )


def tables(profile: Profile, other: Profile | None = None) -> list[tuple[str, Table]]:
    """Returns the tables of a report with their titles."""
    last = profile.snapshots[-1]
    step = f"step {last.step}"
    categories = [
        *_sizes(last.categories),
        ["all", readable(last.total), "100 %"],
        ["activations, within a step", readable(last.activations), ""],
    ]
    largest = [
        [one["name"], one["category"], f"{one['dtype']} {'×'.join(map(str, one['shape']))}", readable(one["bytes"])]
        for one in last.largest[:MAX_TENSORS]
    ]
    of_device = "of the GPU" if profile.device == "cuda" else "of the machine"
    titled = {
        "Tensors by category": Table(["category", step, "share"], categories),
        "In main memory": Table(["category", step, "share"], _sizes(last.host)),
        "Parameters by name": Table(["name", *PARTS, "all"], _named_rows(last)),
        "Peaks by phase": _phases(profile),
        "By dtype": Table(["dtype", step, "share"], _sizes(last.dtypes)),
        "Memory": Table(["", step, of_device], _memory(profile)),
        f"Largest tensors ({last.large} of 10 MiB or more)": Table(["tensor", "category", "shape", "size"], largest),
    }
    if other is not None:
        titled["Compared"] = Table(["", "this run", "other run", "change"], _comparison(profile, other))
    return [(title, table) for title, table in titled.items() if table.rows]


def describe(profile: Profile) -> str:
    """Names a run: its folder, method, device, when it began and how it ended."""
    start = profile.start
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(start.get("began", 0))))
    end = profile.end or "no end recorded: it is still running, or was killed"
    return f"{profile.path.parent}: {start.get('method', 'run')} on {start.get('device', '?')}, {began}, {end}"


def cost_sentence(profile: Profile) -> str:
    """Says what the snapshots cost, and how many lines of the file were damaged."""
    costs = [one.cost_ms for one in profile.snapshots]
    total_s = max(1e-9, profile.snapshots[-1].seconds)
    share = sum(costs) / total_s / 10  # milliseconds per second are tenths of a per cent
    damage = f" {profile.damaged} damaged line(s) of the profile were skipped." if profile.damaged else ""
    return f"{len(costs)} records took {sum(costs) / len(costs):.0f} ms each, {share:.2g} % of the run.{damage}"


def _sizes(sizes: Mapping[str, int]) -> Rows:
    total = max(1, sum(sizes.values()))
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [[name, readable(size), f"{100 * size / total:.1f} %"] for name, size in ordered if size]


def _named_rows(last: Snapshot) -> Rows:
    ordered = sorted(last.named.items(), key=lambda item: -sum(item[1].values()))
    return [
        [name, *(readable(parts.get(part, 0)) for part in PARTS), readable(sum(parts.values()))]
        for name, parts in ordered
    ]


def _phases(profile: Profile) -> Table:
    tensors, device = profile.peaks(), profile.peaks("device")
    header = ["phase", "tensors" if profile.device == "cuda" else "process", *["whole GPU"] * bool(device)]
    rows = []
    for name, size in sorted(tensors.items(), key=lambda item: -item[1]):
        of_gpu = [readable(device[name]) if name in device else "–"] if device else []
        rows.append([name, readable(size), *of_gpu])
    return Table(header, rows)


def _memory(profile: Profile) -> Rows:
    last, total = profile.snapshots[-1], profile.device_total

    def row(name: str, size: int, on_device: bool = True) -> list[str]:
        return [name, readable(size), f"{100 * size / total:.1f} %" if total and on_device else "–"]

    rows = []
    if last.reserved is not None:
        rows += [
            row("allocated by torch", last.allocated or 0),
            row("reserved by torch", last.reserved),
            row("… cache in it, used again", last.cache),
            row("… gaps in it, the fragmentation", last.gaps or 0),
        ]
    if last.device_used is not None:
        rows.append(row("whole GPU, by NVML", last.device_used))
    return [*rows, row("resident memory of the process", last.resident, profile.device == "cpu")]


def _comparison(profile: Profile, other: Profile) -> Rows:
    def sizes(one: Profile) -> dict[str, int]:
        last = one.snapshots[-1]
        peaks = {f"peak, {name}": size for name, size in one.peaks().items()}
        return peaks | last.categories | {"activations": last.activations}

    ours, theirs = sizes(profile), sizes(other)
    rows = []
    for name in dict.fromkeys([*ours, *theirs]):
        now, before = ours.get(name, 0), theirs.get(name, 0)
        if now or before:
            change = f"{100 * (now - before) / before:+.1f} %" if before else "–"
            rows.append([name, readable(now), readable(before), change])
    return rows


def _key_figures(profile: Profile) -> list[tuple[str, str]]:
    last, (phase, peak) = profile.snapshots[-1], highest(profile)
    keys = [
        (readable(peak), f"peak of {'tensors' if profile.device == 'cuda' else 'the process'}, {phase}"),
        (readable(last.total), "tensors between steps"),
        (readable(last.activations), "activations within a step"),
        (str(last.large), "tensors of 10 MiB or more"),
    ]
    if last.reserved is not None:
        keys.append((f"{last.fragmentation_percent:.0f} %", "fragmentation: gaps in reserved memory"))
    return keys
