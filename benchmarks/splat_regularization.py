"""Memory that the losses at surfaces take within a step, beside what the account of memory says.

python benchmarks/splat_regularization.py    # writes results/splat_regularization.json

Each row is a process of its own on the CPU, working as CUDA does (torch, in chunks); bytes are the peak of resident
memory above what was there before the step.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from f3rm_ext.engine.cost import peak_mib, reset_peak
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.memory.accounting import Layout, account, total
from f3rm_ext.splat.regularization.density import density_loss, normal_loss
from f3rm_ext.splat.regularization.field import neighbour_field
from f3rm_ext.splat.regularization.sampling import sample_points
from f3rm_ext.splat.regularization.table import gaussian_table

RESULT = Path(__file__).parent / "results" / "splat_regularization.json"
SIZES = [(100_000, 1_000_000), (100_000, 3_000_000), (3_000_000, 10_000), (6_000_000, 1_000_000)]
CPU = torch.device("cpu")


def measure(count: int, points: int) -> float:
    """Peak of forward and backward pass above what was there before, MiB."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    leaves = {
        "means": torch.rand(count, 3, generator=generator),
        "scales": torch.full((count, 3), -5.0),
        "quats": torch.randn(count, 4, generator=generator),
        "opacities": torch.zeros(count, 1),
    }
    learnt = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    gaussians = Gaussians.of({**learnt, "features_dc": torch.zeros(1, 3), "features_rest": torch.zeros(1, 0, 3)})
    neighbours = torch.randint(count, (count, 16), dtype=torch.int32, generator=generator)
    visible = torch.ones(count, dtype=torch.bool)
    step(gaussians, neighbours, visible, 10)  # what torch loads when it is first used
    for leaf in leaves.values():
        leaf.grad = None
    reset_peak(CPU)
    before = peak_mib(CPU)
    step(gaussians, neighbours, visible, points)
    return peak_mib(CPU) - before


def step(gaussians: Gaussians, neighbours: torch.Tensor, visible: torch.Tensor, points: int) -> None:
    """The losses at some points, and their gradients."""
    losses_at(gaussians, neighbours, visible, points).backward()


def losses_at(gaussians: Gaussians, neighbours: torch.Tensor, visible: torch.Tensor, points: int) -> torch.Tensor:
    """Density and normals, as the regulariser has them; its tensors are gone when this returns."""
    table = gaussian_table(gaussians)
    places, owners = sample_points(gaussians, visible, points, generator=torch.Generator().manual_seed(1))
    field = neighbour_field(places, owners, table, neighbours, backend="torch")
    return density_loss(places, field) + normal_loss(field)


def main() -> None:
    """Measures all sizes, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, nargs=2, help="Gaussians and points of a single row: prints MiB")
    options = parser.parse_args()
    if options.one:
        print(measure(*options.one))
        return
    rows = []
    # The C library then gives back what is freed, as the peak of a later moment must not contain it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for count, points in SIZES:
        command = [sys.executable, __file__, "--one", str(count), str(points)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        said = total(account(Layout(count, points=points)), "regularization") / 2**20
        rows.append({"gaussians": count, "points": points, "measured_mib": float(found), "account_mib": said})
        print(*(f"{key} {value:,.0f}" for key, value in rows[-1].items()), sep="; ")
    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "machine": platform.machine()}
    RESULT.write_text(json.dumps({"rows": rows, **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
