"""The report of the GPU day: its file, its time budgets, the targets, and its tables. Nothing here needs a GPU."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Section = dict[str, Any]
Report = dict[str, Any]

CALLS: dict[str, dict[str, int]] = {
    "build": {"kernels": 570},
    "speed": {"features": 45, "fields": 240, "splats": 200, "splat-features": 85},
    "checks": {"tests": 170, "plan": 90, "poses": 170, "moco": 140},
}
"""Seconds that each section may take, in their order, by call; a call takes ten minutes at most, start-up included."""
BUDGETS_S = {name: seconds for sections in CALLS.values() for name, seconds in sections.items()}
VANILLA, PEER, REGULARIZED = "sugar-ext without regularisation", "splatfacto", "sugar-ext, dn-consistency"
PLANAR = "sugar-ext, planar"
F3RM_PEER = "nerfacto + F3RM's features"
QUERY_MS, LIFTING_S = 50.0, 15.0


def write_report(report: Report, path: Path) -> None:
    """Writes the file under a temporary name and renames it, so that it is whole whenever the program ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


@dataclass
class Day:
    """Runs sections one after the other within a time, and keeps the report on disk up to date.

    Args:
        report: to fill; ``sections`` is added.
        path: where it is written.
        seconds: that all sections may take together.
        clock: returns seconds.
    """

    report: Report
    path: Path
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()
        self.report.setdefault("sections", {})

    @property
    def left_s(self) -> float:
        """Seconds that are left of the whole."""
        return self.seconds - (self.clock() - self._begin)

    def run(self, name: str, budget_s: float, work: Callable[["Part"], None]) -> Section:
        """Runs a section; whatever happens in it is recorded and does not stop the rest.

        Args:
            name: of the section.
            budget_s: seconds that it may take.
            work: does it; see :class:`Part`.
        """
        section: Section = {"state": "running", "budget_s": budget_s, "rows": []}
        self.report["sections"][name] = section
        begin = self.clock()
        if self.left_s < 5:
            section |= {"state": "left out", "problem": f"The {self.seconds:.0f} s of the whole were over."}
        else:
            write_report(self.report, self.path)
            try:
                work(Part(self, section, begin + min(budget_s, self.left_s)))
                section["state"] = "done"
            except Exception as error:
                section |= {"state": "failed", "problem": f"{type(error).__name__}: {error}".strip(": ")}
        section["seconds"] = round(self.clock() - begin, 1)
        write_report(self.report, self.path)
        return section


@dataclass
class Part:
    """What a section's work is given.

    Args:
        day: the whole.
        section: its record.
        end: time at which it has to be over.
    """

    day: Day
    section: Section
    end: float

    @property
    def left_s(self) -> float:
        """Seconds that are left of this section."""
        return self.end - self.day.clock()

    def row(self, label: str, measure: Callable[[float], dict[str, Any]], share: float = 1.0) -> None:
        """Adds a row, and writes the report.

        Args:
            label: of the row.
            measure: returns its figures; is given the seconds it may take.
            share: of the time that is left, which this row may take at most.
        """
        begin, limit = self.day.clock(), self.left_s * share
        found = measure(limit) if limit > 3 else {"problem": "The time of this section was over."}
        self.section["rows"].append({"label": label, **found, "seconds": round(self.day.clock() - begin, 1)})
        write_report(self.day.report, self.day.path)


# --- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A figure that was promised.

    Args:
        name: what is compared.
        wanted: the promise.
        found: the figure; None if it was not measured.
        met: whether the promise holds; None if it was not measured.
        why: why there is no figure.
    """

    name: str
    wanted: str
    found: float | None
    met: bool | None
    why: str = ""

    def cells(self, digits: int = 2) -> list[str]:
        """Returns a row of the table."""
        figure = "–" if self.found is None else f"{self.found:,.{digits}f}"
        verdict = {None: f"not measured{': ' + self.why if self.why else ''}", True: "met", False: "missed"}[self.met]
        return [self.name, self.wanted, figure, verdict]


def rows_of(report: Report, section: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a section by label."""
    return {row["label"]: row for row in report.get("sections", {}).get(section, {}).get("rows", ())}


def _figure(report: Report, section: str, label: str, *keys: str) -> tuple[float | None, str]:
    """Returns a figure, or None and why it is missing."""
    entry = report.get("sections", {}).get(section)
    if entry is None:
        return None, f"the section {section} was not asked for"
    row: Any = rows_of(report, section).get(label)
    if row is None:
        return None, entry.get("problem", f"there is no row {label}")
    for key in keys:
        row = row.get(key) if isinstance(row, dict) and "problem" not in row else row
    return (float(row), "") if isinstance(row, int | float) else (None, (row or {}).get("problem", "no figure"))


def _ratio(report: Report, name: str, wanted: float, section: str, key: str, labels: tuple[str, str]) -> Target:
    (ours, why), (theirs, other) = (_figure(report, section, label, key) for label in labels)
    if ours is None or not theirs:
        return Target(name, f"≥ {wanted:g} ×", None, None, why or other)
    return Target(name, f"≥ {wanted:g} ×", ours / theirs, ours / theirs >= wanted)


def _limit(report: Report, name: str, wanted: float, unit: str, section: str, label: str, *keys: str) -> Target:
    found, why = _figure(report, section, label, *keys)
    return Target(name, f"≤ {wanted:g} {unit}", found, None if found is None else found <= wanted, why)


def targets(report: Report) -> list[Target]:
    """Compares what was promised with what was measured."""
    fast = "f3rm-ext, triton"
    views = rows_of(report, "splat-features").get("sugar-ext", {}).get("views")
    lifted = "features lifted" if views is None else f"features lifted from {views} views"  # time is in proportion
    found = [
        _ratio(
            report, "f3rm-ext: Triton ÷ tiny-cuda-nn, rays/s", 0.8, "fields", "rays_per_s", (fast, "f3rm-ext, tcnn")
        ),
        _ratio(report, f"f3rm-ext, Triton ÷ {F3RM_PEER}, rays/s", 2.0, "fields", "rays_per_s", (fast, F3RM_PEER)),
        _ratio(report, "sugar-ext, vanilla stage ÷ splatfacto, it/s", 1.0, "splats", "steps_per_s", (VANILLA, PEER)),
        _ratio(report, "sugar-ext, regularised ÷ splatfacto, it/s", 0.5, "splats", "steps_per_s", (REGULARIZED, PEER)),
        _limit(report, "text query at 1080p, splats", QUERY_MS, "ms", "splat-features", "sugar-ext", "query", "ms"),
        _limit(report, "text query at 1080p, field", QUERY_MS, "ms", "fields", fast, "query", "ms"),
        _limit(report, lifted, LIFTING_S, "s", "splat-features", "sugar-ext", "lifting_s"),
    ]
    if report.get("rehearsal"):  # Sizes are tiny and the device is another.
        return [Target(target.name, target.wanted, None, None, "this is a rehearsal") for target in found]
    return found


# --- tables ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns but the first are aligned to the right."""
    lines = [list(head), ["---"] + ["--:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: dict[str, Any], key: str, digits: int = 0) -> str:
    value = row.get(key)
    return "–" if value is None else f"{value:,.{digits}f}"


def _problems(section: Section) -> list[str]:
    rows = section.get("rows", ())
    # A row with the second has figures all the same.
    found = [f"{row['label']}: {row[key]}" for key in ("problem", "problem_of_all") for row in rows if key in row]
    found += [f"{row['label']}: {sentence}" for row in rows for sentence in row.get("refused", ())]
    found += [f"{row['label']}: {name} failed" for row in rows for name in row.get("failures", ())]
    return [*([section["problem"]] if "problem" in section else []), *found]


def _fields(rows: Sequence[dict[str, Any]]) -> str:
    head = ["field", "steps × rays", "rays/s", "ms/step", "PSNR", "SSIM", "peak MiB"]
    head += ["launches/step", "waits/step", "picture, ms", "text query, ms"]
    body = [
        [
            row["label"],
            f"{row['steps']} × {row['rays_per_step']}",
            _cell(row, "rays_per_s"),
            _cell(row, "step_ms", 1),
            _cell(row, "psnr", 2),
            _cell(row, "ssim", 3),
            _cell(row, "peak_mib"),
            _cell(row, "launches_per_step"),
            _cell(row, "synchronisations_per_step", 1),
            _cell(row, "picture_ms"),
            _cell(row.get("query", {}), "ms"),
        ]
        for row in rows
    ]
    return table(head, body)


def _splats(rows: Sequence[dict[str, Any]]) -> str:
    head = ["splats", "Gaussians", "it/s", "ms/step", "peak MiB", "account, MiB", "launches/step", "waits/step"]
    keys = (("gaussians", 0), ("steps_per_s", 1), ("step_ms", 2), ("peak_mib", 0), ("accounted_mib", 0))
    keys += (("launches_per_step", 0), ("synchronisations_per_step", 1))
    return table(head, [[row["label"], *(_cell(row, key, digits) for key, digits in keys)] for row in rows])


def _lifted(rows: Sequence[dict[str, Any]]) -> str:
    head = ["features on splats", "Gaussians", "views", "dimensions", "lifting, s", "peak MiB", "text query, ms"]
    keys = (("gaussians", 0), ("views", 0), ("dimensions", 0), ("lifting_s", 1), ("lifting_peak_mib", 0))
    body = [
        [row["label"], *(_cell(row, key, digits) for key, digits in keys), _cell(row.get("query", {}), "ms", 1)]
        for row in rows
    ]
    return table(head, body)


def _plan(rows: Sequence[dict[str, Any]]) -> str:
    head = ["memory, MiB", "step, planned", "allocated", "picture, planned", "allocated", "card, planned", "reserved"]
    keys = ("train_planned_mib", "train_mib", "evaluation_planned_mib", "evaluation_mib", "whole_planned_mib")
    return table(head, [[row["label"], *(_cell(row, key) for key in (*keys, "reserved_mib"))] for row in rows])


def _spread(row: dict[str, Any], key: str) -> str:
    return f"{_cell(row, key, 1)} ({_cell(row, key + '_q1', 1)}–{_cell(row, key + '_q3', 1)})"


MEMORY = ("planned, MiB", "allocated, MiB", "allocated ÷ planned", "card, planned, MiB", "reserved, MiB", "waits/step")
"""Columns of a training beside its plan, see :func:`_memory`."""


def _memory(row: dict[str, Any]) -> list[str]:
    keys = (("planned_mib", 0), ("peak_mib", 0), ("peak_to_plan", 2), ("whole_planned_mib", 0), ("reserved_mib", 0))
    return [_cell(row, key, digits) for key, digits in (*keys, ("synchronisations_per_step", 0))]


def _poses(rows: Sequence[dict[str, Any]]) -> str:
    head = ["pose training", "scenes × images", "ms/step, all images (quartiles)", "ms/step, as trained (quartiles)"]
    head += ["steps/s", "images/s", *MEMORY, "steps of the stage", "days"]
    body = [
        [
            row["label"],
            f"{row['batch']} × {row['images']}",
            _spread(row, "full_step_ms"),
            _spread(row, "step_ms"),
            _cell(row, "steps_per_s", 2),
            _cell(row, "images_per_s"),
            *_memory(row),
            _cell(row, "stage_steps"),
            _cell(row, "stage_days", 1),
        ]
        for row in rows
    ]
    return table(head, body)


def _moco(rows: Sequence[dict[str, Any]]) -> str:
    head = ["MoCo", "network", "batch × accumulated", "queue", "ms/step (quartiles)", "steps/s", "images/s"]
    head += [*MEMORY, "steps of the run", "hours", "views made, images/s"]
    body = [
        [
            row["label"],
            f"{row['architecture']}, {row['image_size']} px, {row['precision']}",
            f"{row['batch']} × {row['accumulation']}",
            _cell(row, "queue"),
            _spread(row, "step_ms"),
            _cell(row, "steps_per_s", 2),
            _cell(row, "images_per_s"),
            *_memory(row),
            _cell(row, "run_steps"),
            _cell(row, "run_hours", 2),
            _cell(row, "views_images_per_s"),
        ]
        for row in rows
    ]
    return table(head, body)


def _tests(rows: Sequence[dict[str, Any]]) -> str:
    keys = ("passed", "failed", "skipped", "seconds")
    return table(
        ["tests", "passed", "failed", "skipped", "s"], [[row["label"], *(_cell(row, k) for k in keys)] for row in rows]
    )


def _seconds(rows: Sequence[dict[str, Any]]) -> str:
    return table(["preparation", "s"], [[row["label"], _cell(row, "seconds", 1)] for row in rows])


SHOWN: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "kernels": _seconds,
    "tests": _tests,
    "features": _seconds,
    "fields": _fields,
    "splats": _splats,
    "splat-features": _lifted,
    "plan": _plan,
    "poses": _poses,
    "moco": _moco,
}


def tables(report: Report) -> str:
    """Returns the report as Markdown: its machine, the targets, and each section with what failed in it."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    parts = [f"{report['date']}, {machine['device']}, capture {report['capture']}; {versions}."]
    if report.get("rehearsal"):
        parts.insert(0, "**A rehearsal on the CPU with tiny sizes: it shows that the programs run, and no speed.**")
    parts.append(table(["target", "wanted", "found", ""], [target.cells() for target in targets(report)]))
    for name, section in report["sections"].items():
        good = [row for row in section["rows"] if "problem" not in row]
        if good:
            parts.append(SHOWN[name](good))
        if section["state"] not in ("done", "running") or _problems(section):
            said = " ".join(f"{problem.rstrip('.')}." for problem in _problems(section)).replace("|", "/")
            parts.append(f"{name} ({section['state']}): {said}")
    return "\n\n".join(parts)
