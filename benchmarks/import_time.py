"""What our registration adds to the start of every ``ns-*`` command: medians beside nerfstudio alone.

``python benchmarks/import_time.py [--repeats 7]`` starts ``ns-train -h`` with and without our entry points, in turns,
and prints medians and quartiles in seconds, as JSON with ``--json``.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

CODE = """
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


def start_s(without: bool) -> float:
    """Wall time of one ``ns-train -h``, seconds."""
    began = time.perf_counter()
    code = CODE.format(without=without)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    elapsed = time.perf_counter() - began
    if ("f3rm-ext" in result.stdout) is without:
        raise RuntimeError("the entry points are not what this measurement needs")
    return elapsed


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="starts of each kind, after one to warm up")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"nerfstudio alone": [], "with f3rm_ext": []}
    for repeat in range(options.repeats + 1):
        for (_, measured), without in zip(times.items(), (True, False), strict=True):
            elapsed = start_s(without)
            if repeat:
                measured.append(elapsed)
    report = {name: statistics.quantiles(measured, n=4, method="inclusive") for name, measured in times.items()}
    added = report["with f3rm_ext"][1] - report["nerfstudio alone"][1]
    if options.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "repeats": options.repeats}
        print(json.dumps({"quartiles_s": report, "added_s": added, **facts}, indent=2))
        return
    for name, (low, median, high) in report.items():
        print(f"{name:<18} {median:6.2f} s  (quartiles {low:.2f} to {high:.2f})")
    print(f"{'added':<18} {added:6.2f} s")


if __name__ == "__main__":
    main()
