"""Hash grids in Triton's interpreter beside the reference: python interpreted_hash_grid.py < CASES > ERRORS.

In a process of its own, because the interpreter has to be asked for before triton is imported.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pretend.interpreter  # noqa: F401 - which it makes quick
import torch

from f3rm_ext.nerf.hash_grid import hash_grid_reference
from f3rm_ext.nerf.hash_levels import LevelTensors, grid_levels
from f3rm_ext.nerf.hash_triton import hash_grid_triton


def errors(shape: list[int], count: int, dtype: str = "float32", leaves: str = "points table") -> dict[str, Any]:
    """Compares value and gradients; errors are relative to the largest number.

    Args:
        shape: levels, features per level, base and finest resolution, binary logarithm of the table.
        count: number of points; the first two are corners of the cube.
        leaves: what has a gradient.
    """
    levels, width, base, top, log2 = shape
    made = LevelTensors.from_levels(grid_levels(levels, base, top, log2))
    generator = torch.Generator().manual_seed(1)
    rows = made.levels[-1].offset + made.levels[-1].size
    table = torch.randn(rows, width, generator=generator).requires_grad_("table" in leaves)
    points = torch.rand(count, 3, generator=generator)
    points[0], points[1:2] = 0.0, 1.0
    points.requires_grad_("points" in leaves)
    upstream = torch.randn(count, levels * width, generator=generator).to(getattr(torch, dtype))
    wanted = [tensor for name, tensor in (("points", points), ("table", table)) if name in leaves]
    # Each level by itself: a gradient of the whole table for each would take most of the time.
    parts = zip(table.split([level.size for level in made.levels]), made.levels, strict=True)
    expected = torch.cat([hash_grid_reference(points, part, (replace(level, offset=0),)) for part, level in parts], -1)
    found = hash_grid_triton(points, table, made, getattr(torch, dtype))
    pairs = {"value": (found.detach(), expected.detach())}
    gradients = torch.autograd.grad(found, wanted, upstream), torch.autograd.grad(expected, wanted, upstream.float())
    pairs.update(zip(leaves.split(), zip(*gradients, strict=True), strict=True))
    differences = {
        name: float(torch.dist(a.float(), b, torch.inf) / torch.linalg.vector_norm(b, torch.inf))
        for name, (a, b) in pairs.items()
    }
    return {**differences, "dtype": str(found.dtype).removeprefix("torch.")}


def main() -> None:
    """Answers every case."""
    print(json.dumps([errors(**case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
