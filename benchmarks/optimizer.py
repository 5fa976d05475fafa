"""A step of Adam on hash tables on the CPU: torch's default, torch's fused kernel, and skipping untouched rows.

The question is whether dense gradients over tables are worth avoiding. `rows skipped` is what sparse updates could save
at best: it finds the rows with gradient and updates only those (its moments then lag, as in tiny-cuda-nn's optimiser).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

REPEATS = 15
SIZES = {"2^17 rows × 8 levels × 4": (2**20, 4), "2^19 rows × 16 levels × 2": (2**23, 2)}
TOUCHED = 0.3
"""Fraction of rows that a batch of 49 152 samples touches (measured on the lite grid: 0.2 to 0.4)."""


def median_ms(run) -> float:
    """Median time of a call, ms, after two warm-ups."""
    times = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 2)


def main() -> None:
    """Prints a Markdown table and writes results/optimizer.json."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    rows = []
    for label, shape in SIZES.items():
        gradient = torch.randn(shape) * (torch.rand(shape[0], 1) < TOUCHED)
        for name, options in {"default": {}, "fused": {"fused": True}}.items():
            table = torch.nn.Parameter(torch.randn(shape))
            table.grad = gradient.clone()
            rows.append(
                {"table": label, "adam": name, "ms": median_ms(torch.optim.Adam([table], lr=1e-2, **options).step)}
            )
        table, first, second = torch.randn(shape), torch.zeros(shape), torch.zeros(shape)

        def skipping(table=table, first=first, second=second, gradient=gradient) -> None:
            touched = gradient.any(dim=1).nonzero()[:, 0]
            g = gradient[touched]
            m, v = first[touched].lerp_(g, 0.1), second[touched].mul_(0.999).addcmul_(g, g, value=0.001)
            first[touched], second[touched] = m, v
            table[touched] -= 1e-2 * m / (v.sqrt() + 1e-15)

        rows.append({"table": label, "adam": "rows skipped", "ms": median_ms(skipping)})
    print("| table | Adam | ms/step |\n|---|---|--:|")
    for row in rows:
        print(f"| {row['table']} | {row['adam']} | {row['ms']:.1f} |")
    out = Path(__file__).parent / "results" / "optimizer.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"rows": rows, "touched": TOUCHED}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
