"""What our registration adds to the start of every ``ns-*`` command: medians beside nerfstudio alone.

``python benchmarks/import_time.py [--repeats 7]`` starts ``ns-train -h`` with and without our entry points, in turns,
and prints medians and quartiles of wall and CPU time in seconds, as JSON with ``--json``. What is added there is the
import of our registration, measured by itself too, and tyro's work on the options of our methods.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

HELP = """
import importlib.metadata as metadata, sys
if {without}:
    found = metadata.entry_points
    def entry_points(**options):
        points = found(**options)
        if str(options.get("group", "")).startswith("nerfstudio."):
            return metadata.EntryPoints(point for point in points if not point.value.startswith("f3rm_ext"))
        return points
    metadata.entry_points = entry_points
sys.argv = ["ns-train", "-h"]
from nerfstudio.scripts.train import entrypoint
entrypoint()
"""

REGISTRATION = """
import importlib.metadata as metadata, time
found = metadata.entry_points
def entry_points(**options):
    return metadata.EntryPoints() if str(options.get("group", "")).startswith("nerfstudio.") else found(**options)
metadata.entry_points = entry_points
import nerfstudio.scripts.train
began, began_cpu = time.perf_counter(), time.process_time()
import f3rm_ext.capture.dataparser, f3rm_ext.method_configs.nerf, f3rm_ext.method_configs.splat
print(time.perf_counter() - began, time.process_time() - began_cpu)
"""


def measure(code: str) -> tuple[float, float, str]:
    """Wall time and CPU time of a process that runs `code`, in seconds, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result.stdout


def start(without: bool) -> dict[str, float]:
    """Times of one ``ns-train -h``."""
    wall, cpu, printed = measure(HELP.format(without=without))
    if ("f3rm-ext" in printed) is without:
        raise RuntimeError("the entry points are not what this measurement needs")
    return {"wall_s": wall, "cpu_s": cpu}


def registration() -> dict[str, float]:
    """Times of importing our two registration modules, once nerfstudio is there."""
    wall, cpu = map(float, measure(REGISTRATION)[2].split()[-2:])
    return {"wall_s": wall, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="starts of each kind, after one to warm up")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "ns-train -h, nerfstudio alone": lambda: start(without=True),
        "ns-train -h, with f3rm_ext": lambda: start(without=False),
        "importing the registration": registration,
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for repeat in range(options.repeats + 1):
        for name, run in kinds.items():
            measured = run()
            if repeat:
                times[name].append(measured)
    report = {
        name: {
            clock: statistics.quantiles([one[clock] for one in measured], n=4, method="inclusive")
            for clock in ("wall_s", "cpu_s")
        }
        for name, measured in times.items()
    }
    if options.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "repeats": options.repeats}
        print(json.dumps({"quartiles": report, **facts}, indent=2))
        return
    for name, clocks in report.items():
        for clock, (low, median, high) in clocks.items():
            print(f"{name:<30} {clock:<7} {median:6.2f}  (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
