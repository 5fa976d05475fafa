"""Steps of a training that is driven from here: the memory of a step, its time, and what it asks of the device."""

import argparse
import contextlib
import gc
import itertools
import json
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from processes import read_report, report_result, require_result, write_report
from step_watch import SyncWarnings, tally

from f3rm_ext.engine.cost import device_time
from f3rm_ext.memory.shortage import is_out_of_memory

MIB = 1 << 20
MEASURED = "measured steps"
Row = dict[str, Any]
Result = TypeVar("Result")


def event_peaks(profile: torch.profiler.profile, names: Iterable[str]) -> dict[str, int]:
    """Returns the most bytes that torch held while events of some names were open, by its profiler's memory events.

    Args:
        profile: with ``profile_memory``. What was allocated before it began is not counted.
        names: of events of ``record_function``.
    """
    results: Any = profile.profiler
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for event in events:
        if event.name() in spans:
            spans[event.name()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    held, peaks = 0, dict.fromkeys(spans, 0)
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            for name, found in spans.items():
                if any(begin <= event.start_ns() <= end for begin, end in found):
                    peaks[name] = max(peaks[name], held)
    return peaks


class TensorMemory:
    """The most that torch hands out in measured steps: its allocator's peak on CUDA, its profiler's count on the CPU.

    Enter it before the model is built, and :meth:`measured` for the steps.
    """

    peak_bytes = 0
    """Peak of the measured steps, after the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0
        self._profile: torch.profiler.profile | None = None

    def __enter__(self) -> "TensorMemory":
        gc.collect()  # what an earlier training leaves would be freed in this one, and count
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
            if error[0] is None:
                self.peak_bytes = event_peaks(self._profile, [MEASURED])[MEASURED]
            self._profile = None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """While this is entered, the peak is sought."""
        if self._profile is not None:
            with torch.profiler.record_function(MEASURED):
                yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before

    def result(self, planned_bytes: int, with_allowances_bytes: int) -> Row:
        """Returns the figures, MiB.

        Args:
            planned_bytes: tensors of the plan.
            with_allowances_bytes: what the plan expects the device to hold.
        """
        reserved = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None
        return {
            "planned_mib": round(planned_bytes / MIB),
            "peak_mib": round(self.peak_bytes / MIB),
            "peak_to_plan": round(self.peak_bytes / planned_bytes, 3),
            "whole_planned_mib": round(with_allowances_bytes / MIB),
            "reserved_mib": reserved and round(reserved / MIB),
        }


def time_steps(step: Callable[[], float], device: torch.device, warm_up: int, steps: int, seconds: float) -> Row:
    """Times steps one by one; the device is waited for after each.

    Args:
        step: takes one, and returns the number of images that it saw.
        steps: timed steps at most, 2 or more.
        seconds: after which no further step is timed, but two are.
    """
    for _ in range(warm_up):
        step()
    marks, images = [device_time(device)], 0.0
    while len(marks) <= 2 or (len(marks) <= steps and marks[-1] - marks[0] < seconds):
        images += step()
        marks.append(device_time(device))
    times_ms = [1e3 * (end - begin) for begin, end in itertools.pairwise(marks)]
    q1, median, q3 = statistics.quantiles(times_ms, n=4, method="inclusive")
    whole_s = marks[-1] - marks[0]
    return {
        "timed_steps": len(times_ms),
        "step_ms": round(median, 3),
        "step_ms_q1": round(q1, 3),
        "step_ms_q3": round(q3, 3),
        "steps_per_s": round(len(times_ms) / whole_s, 5),
        "images_per_s": round(images / whole_s, 3),
    }


def count_step(step: Callable[[], object], device: torch.device) -> Row:
    """Returns what a step asks of a GPU: kernels that it launches, and waits of the host; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    counts: Counter[str] = tally(event.name for event in profile.events() or ())
    with SyncWarnings(device) as waits:
        step()
    return {
        "launches_per_step": counts["launches"],
        "synchronisations_per_step": counts["waits"],
        "sync_warnings_per_step": waits.found,
    }


def halved_until_it_fits(
    batch: int, measure: Callable[[int], Result], does_not_fit: Callable[[Exception], str]
) -> tuple[Result, list[str]]:
    """Measures with the largest batch that fits: this one, its half, and so on.

    Args:
        does_not_fit: returns the sentence of an exception that means that memory does not suffice, else nothing.

    Returns:
        What was measured, and a sentence for each batch that did not fit.
    """
    refused: list[str] = []
    while True:
        try:
            return measure(batch), refused
        except Exception as error:
            sentence = does_not_fit(error)
            if not sentence or batch == 1:
                raise
            refused.append(f"A batch of {batch} does not fit: {sentence}")
        # Out of the handler, whose traceback holds the tensors.
        batch //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def shortage_sentence(error: Exception) -> str:
    """Returns what an exception says first if it means that memory ran out, else nothing.

    >>> shortage_sentence(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"))
    'CUDA out of memory. Tried to allocate 2.00 GiB.'
    """
    if not is_out_of_memory(error):
        return ""
    return ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".") + "."


def make_parser(description: str | None, names: Sequence[str], result: str, seconds: float) -> argparse.ArgumentParser:
    """Returns the options of a program that measures rows.

    Args:
        result: name of its file of results.
        seconds: of timed steps.
    """
    out = Path(__file__).parent / "results" / result
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="rows to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each kind at most, 2 or more")
    parser.add_argument("--seconds", type=float, default=seconds, help="of timed steps")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    return parser


def run_rows(
    parser: argparse.ArgumentParser, run_one: Callable[[str, argparse.Namespace], Row], keys: Sequence[str]
) -> None:
    """Measures rows of the calling program, each in a process of its own, prints and writes them.

    Args:
        run_one: measures a row in this process.
        keys: what tells rows apart.
    """
    options, rows = parser.parse_args(), []
    if options.one:
        report_result(run_one(options.one, options))
        return
    for name in options.only:
        command = [sys.executable, sys.argv[0], *sys.argv[1:], "--one", name]
        rows.append({"label": name, **require_result(command)})
        print(json.dumps(rows[-1]), flush=True)
    write_rows(options.out, vars(options), rows, keys)


def write_rows(path: Path, options: Mapping[str, Any], rows: Sequence[Row], keys: Sequence[str]) -> None:
    """Writes a file of results. Rows that it has already stay, if they are of this device and of other sizes.

    Args:
        keys: what tells rows apart.
    """
    cuda = options["device"] == "cuda"
    found = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "options": {key: getattr(value, "name", value) for key, value in options.items() if key != "out"},
    }
    before = read_report(path)
    measured = [[row[key] for key in keys] for row in rows]
    kept: list[Row] = []
    if all(before.get(key) == found[key] for key in ("device", "versions")):
        kept = [row for row in before["rows"] if [row[key] for key in keys] not in measured]
    write_report({**found, "rows": [*kept, *rows]}, path)
