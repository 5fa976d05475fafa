"""SOG files of a run: size, time, and what they lose on photos, beside splat-transform's of the same PLY.

python benchmarks/splat_sog.py --load-config RUN/config.yml [--splat-transform PROGRAM] [--limit-s 300]

Writes results/splat_sog.json. A loss is the PSNR of the PLY less that of the file, both rendered by this package and
held against the same photos. Seconds are those of all cores (CPU time) of the whole command.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from f3rm_ext.export.budget import SplatBudget
from f3rm_ext.export.splats import load_splat_run
from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats

RESULT = Path(__file__).parent / "results" / "splat_sog.json"


def cpu_seconds(command: list[object], limit_s: float) -> float | None:
    """Runs a program and returns its CPU time, s; None if it takes longer than the limit, which is wall time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each SH degree and each program."""
    budget, rows = SplatBudget(load_splat_run(options.load_config)), []
    for degree in range(budget.gaussians.sh_degree + 1):
        ply = folder / f"{degree}.ply"
        write_splats(ply, budget.gaussians.to_sh_degree(degree), SplatInfo(render_mode="mip"))
        programs: dict[str, list[object]] = {
            "f3rm_ext": [Path(sys.executable).with_name("f3rm-ext"), "export", "convert"]
        }
        if options.splat_transform:
            programs["splat-transform"] = [options.splat_transform, "-g", "cpu"]
        psnr = budget.psnr(read_splats(ply)[0])
        for name, command in programs.items():
            sog = folder / f"{name}-{degree}.sog"
            seconds = cpu_seconds([*command, ply, sog], options.limit_s)
            row: dict[str, Any] = {"program": name, "sh_degree": degree, "seconds": seconds}
            if seconds is not None:
                row |= {"bytes": sog.stat().st_size, "loss_db": psnr - budget.psnr(read_splats(sog)[0])}
            print({**row, "psnr": psnr, "ply_bytes": ply.stat().st_size}, flush=True)
            rows.append({**row, "psnr": psnr, "ply_bytes": ply.stat().st_size, "gaussians": len(budget.gaussians)})
    return rows


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load-config", type=Path, required=True, help="config.yml of a run of sugar-ext")
    parser.add_argument("--splat-transform", help="the program of PlayCanvas, version 2.7.1")
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest time of a conversion")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    facts = {"rows": rows, "limit_s": options.limit_s, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    facts |= {"machine": platform.machine(), "threads": torch.get_num_threads()}
    RESULT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
