"""Hash grid on this machine's CPU: numba and torch beside the readable reference and nerfstudio's torch encoding.

Also what would matter on a GPU, where the torch path is the last resort: the bytes that autograd keeps until the
backward pass, and the operators, each of which starts a kernel.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nerfstudio.field_components.encodings import HashEncoding
from processes import write_report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from f3rm_ext.nerf import hash_torch
from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.hash_kernels import hash_grid_numba
from f3rm_ext.nerf.hash_levels import LevelTensors

POINTS, REPEATS = 49_152, 9
SHAPES = {
    "8 × 4, to 1024, 2^17": (8, 4, 16, 1024, 17),
    "16 × 2, to 2048, 2^19": (16, 2, 16, 2048, 19),
    "12 × 8, to 128, 2^19": (12, 8, 16, 128, 19),
}


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


class Operators(TorchDispatchMode):
    """Counts operators, views apart."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and counts one."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def account(function: Callable[[Tensor], Tensor], points: Tensor, table: Tensor) -> dict[str, int]:
    """Bytes per point that autograd keeps beside points and table, and operators, with gradients of both.

    Chunks are as large as on a GPU.
    """
    hash_torch.CHUNK_VALUES_CPU = hash_torch.CHUNK_VALUES
    points = points.clone().requires_grad_(True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Operators() as ahead:
        out = function(points)
    for tensor in (points, table):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    with Operators() as back:
        torch.autograd.grad(out, (points, table), torch.ones_like(out))
    return {
        "kept_bytes_per_point": round(sum(kept.values()) / len(points)),
        "forward_operators": ahead.count,
        "backward_operators": back.count,
    }


def main() -> None:
    """Prints a Markdown table and writes results/hash_grid.json."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    # 24 samples on each of 2048 rays: neighbours in memory are neighbours in space, as in training.
    origins, directions = torch.rand(POINTS // 24, 1, 3) * 0.4 + 0.3, torch.randn(POINTS // 24, 1, 3) * 0.1
    points = (origins + directions * torch.linspace(0, 1, 24)[:, None]).clamp(0, 1).reshape(-1, 3)
    rows: list[dict[str, Any]] = []
    cpu_chunk = hash_torch.CHUNK_VALUES_CPU
    for label, (levels, width, base, top, log2) in SHAPES.items():
        grid = HashGrid(levels, width, base, top, log2)
        theirs = HashEncoding(levels, base, top, log2, width, implementation="torch")
        tensors = LevelTensors.from_levels(grid.levels)
        candidates: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
            "numba": (lambda x, grid=grid: hash_grid_numba(x, grid.table, grid.levels), grid.table),
            "torch": (
                lambda x, grid=grid, tensors=tensors: hash_torch.hash_grid_torch(x, grid.table, tensors),
                grid.table,
            ),
            "torch reference": (lambda x, grid=grid: hash_grid_reference(x, grid.table, grid.levels), grid.table),
            "nerfstudio, torch": (theirs, theirs.hash_table),
        }
        for name, (function, table) in candidates.items():
            upstream = torch.randn_like(function(points))

            def both(function=function, table=table, upstream=upstream) -> None:
                torch.autograd.grad(function(points), table, upstream)

            with torch.no_grad():
                ahead = quartiles(lambda function=function: function(points))
            times = {"forward_ms": ahead, "forward_backward_ms": quartiles(both)}
            rows.append({"grid": label, "backend": name, **times})
        for row, (function, table) in zip(rows[-len(candidates) :], candidates.values(), strict=True):
            row.update(account(function, points, table))
        hash_torch.CHUNK_VALUES_CPU = cpu_chunk
    print("| grid | backend | forward ms (quartiles) | forward + backward ms (quartiles) | kept | operators |")
    print("|---|---|--:|--:|--:|--:|")
    for row in rows:
        cells = [f"{m:.1f} ({a:.1f}–{b:.1f})" for a, m, b in (row["forward_ms"], row["forward_backward_ms"])]
        cells += [f"{row['kept_bytes_per_point']:,}", f"{row['forward_operators']} + {row['backward_operators']}"]
        print(f"| {row['grid']} | {row['backend']} | {' | '.join(cells)} |")
    report = {"points": POINTS, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
    write_report(report, Path(__file__).parent / "results" / "hash_grid.json")


if __name__ == "__main__":
    main()
