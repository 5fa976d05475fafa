"""Hash grid on this machine's CPU: numba kernels beside the torch reference and nerfstudio's torch encoding."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nerfstudio.field_components.encodings import HashEncoding

from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.hash_kernels import hash_grid_numba

POINTS, REPEATS = 49_152, 9
SHAPES = {"8 × 4, to 1024, 2^17": (8, 4, 16, 1024, 17), "16 × 2, to 2048, 2^19": (16, 2, 16, 2048, 19)}


def quartiles(run: Callable[[], object]) -> tuple[float, float, float]:
    """Quartiles of the time of a call, ms, after two warm-ups."""
    times = []
    for repeat in range(REPEATS + 2):
        start = time.perf_counter()
        run()
        if repeat > 1:
            times.append(1e3 * (time.perf_counter() - start))
    q1, median, q3 = statistics.quantiles(times, n=4)
    return round(q1, 2), round(median, 2), round(q3, 2)


def main() -> None:
    """Prints a Markdown table and writes results/hash_grid.json."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    # 24 samples on each of 2048 rays: neighbours in memory are neighbours in space, as in training.
    origins, directions = torch.rand(POINTS // 24, 1, 3) * 0.4 + 0.3, torch.randn(POINTS // 24, 1, 3) * 0.1
    points = (origins + directions * torch.linspace(0, 1, 24)[:, None]).clamp(0, 1).reshape(-1, 3)
    rows = []
    for label, (levels, width, base, top, log2) in SHAPES.items():
        grid = HashGrid(levels, width, base, top, log2)
        theirs = HashEncoding(levels, base, top, log2, width, implementation="torch")
        candidates = {
            "numba": (lambda grid=grid: hash_grid_numba(points, grid.table, grid.levels), grid.table),
            "torch reference": (lambda grid=grid: hash_grid_reference(points, grid.table, grid.levels), grid.table),
            "nerfstudio, torch": (lambda theirs=theirs: theirs(points), theirs.hash_table),
        }
        for name, (forward, table) in candidates.items():
            upstream = torch.randn_like(forward())

            def both(forward=forward, table=table, upstream=upstream) -> None:
                torch.autograd.grad(forward(), table, upstream)

            with torch.no_grad():
                ahead = quartiles(forward)
            rows.append({"grid": label, "backend": name, "forward_ms": ahead, "forward_backward_ms": quartiles(both)})
    print("| grid | backend | forward ms (quartiles) | forward + backward ms (quartiles) |\n|---|---|--:|--:|")
    for row in rows:
        cells = [f"{m:.1f} ({a:.1f}–{b:.1f})" for a, m, b in (row["forward_ms"], row["forward_backward_ms"])]
        print(f"| {row['grid']} | {row['backend']} | {' | '.join(cells)} |")
    out = Path(__file__).parent / "results" / "hash_grid.json"
    out.parent.mkdir(exist_ok=True)
    report = {"points": POINTS, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
