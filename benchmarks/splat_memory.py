"""Memory of six million Gaussians before and after, and what the smaller forms cost in precision and in time.

python benchmarks/splat_memory.py  # writes splat_memory.json, splat_sizes.json and splat_precision.json to results/

The first two are planned: traces of a training step without values (see docs/planning.md). The third fits the spherical
harmonics of Gaussians to noisy colours from random directions, half of the Gaussians visible in each step: a toy, but
one in which the truth is known.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import write_report
from torch import Tensor
from torch.nn import Parameter, functional

from f3rm_ext.memory.devices import Device
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.planning.estimator import estimate_splats
from f3rm_ext.planning.request import CaptureSizes, PlanRequest
from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases, sh_colors

RESULTS = Path(__file__).parent / "results"
MILLIONS = 6_000_000
REFLECTIVE = 0.2
SUGAR = {"regularization": "dn-consistency"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dn-consistency": SUGAR,
    "+ float16 harmonics": {**SUGAR, "sh_storage": "float16"},
    "+ bfloat16 moments (optimize-memory)": {**SUGAR, "optimize_memory": True},
    "+ int8 moments": {**SUGAR, "optimize_memory": True, "sh_moments": "int8"},
    "selective, 20 % reflective, bfloat16 moments": {**SUGAR, "sh_storage": "selective", "sh_moments": "bfloat16"},
    "planar (the default)": {},
    "planar, optimize-memory": {"optimize_memory": True},
    "no regularisation": {"regularization": "none"},
    "no regularisation, optimize-memory": {"regularization": "none", "optimize_memory": True},
}
SIZES = (1_000_000, 2_000_000, 4_000_000, 6_000_000)

COUNT, RATE, NOISE = 1000, 5e-4, 0.05
PEERS = ("torch's Adam, float32", "torch's Adam, float16")
VARIANTS: dict[str, dict[str, Any]] = {
    PEERS[0]: {},
    "ours, float32": {"storage": torch.float32, "moments": "float32"},
    "float16 to the nearest, float32 moments": {"storage": torch.float32, "moments": "float32", "nearest": True},
    "float16 at random, float32 moments": {"storage": torch.float16, "moments": "float32"},
    "float16 at random, bfloat16 moments": {"storage": torch.float16, "moments": "bfloat16"},
    "float16 at random, int8 moments": {"storage": torch.float16, "moments": "int8"},
    "selective, float32 moments": {"storage": torch.float16, "moments": "float32", "reflective_above": 0.05},
    PEERS[1]: {"storage": torch.float16},
}


def training_bytes(
    gaussians: int, sh_degree: int = 3, regularization: str = "planar", samples: int | None = None, **memory: Any
) -> dict[str, int]:
    """Planned bytes by category at the peak of a training step on CUDA, with a picture of 64 × 64 pixels.

    Args:
        gaussians: number of Gaussians, all of them visible.
        samples: points per step of the regularisation; None for the default.
    """
    config: Any = make_splat_config("sugar-ext")
    config.pipeline.datamanager.cache_images = "cpu"
    model = config.pipeline.model
    model.regularization, model.sh_degree = regularization, sh_degree
    if samples is not None:
        model.surface.samples = samples
    for name, value in memory.items():
        setattr(model.memory, name, value)
    capture = CaptureSizes(train_images=4, eval_images=0, width_px=64, height_px=64)
    request = PlanRequest(config, capture, Device("cuda", 80 << 30), gaussians=gaussians, pictures=False)
    return {str(name): size for name, size in estimate_splats(request).device["train"].items()}


def memory() -> list[dict[str, Any]]:
    """Bytes by options and category."""
    rows = []
    for name, options in LAYOUTS.items():
        held = training_bytes(MILLIONS, **options)
        rows.append({"layout": name, "held": held, "peak": sum(held.values())})
    return rows


def sizes() -> list[dict[str, Any]]:
    """Peaks of the default run, by number of Gaussians, SH degree and ``optimize-memory``."""
    rows = []
    for gaussians in SIZES:
        row: dict[str, Any] = {"gaussians": gaussians}
        for degree in (3, 2):
            row[f"degree {degree}"] = sum(training_bytes(gaussians, degree).values())
            row[f"degree {degree}, optimize-memory"] = sum(
                training_bytes(gaussians, degree, optimize_memory=True).values()
            )
        rows.append(row)
    return rows


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def truth() -> tuple[Tensor, Tensor]:
    """Coefficients of Gaussians, and which of them are reflective."""
    generator = _seeded(0)
    reflective = torch.rand(COUNT, generator=generator) < REFLECTIVE
    spread = torch.where(reflective, 0.2, 0.01)
    return torch.randn(COUNT, sh_rest_count(3), 3, generator=generator) * spread[:, None, None], reflective


def make(variant: dict[str, Any], count: int) -> tuple[Parameter, torch.optim.Optimizer, Callable[..., Tensor]]:
    """Coefficients that are zero, their optimiser, and what makes colours of them."""
    rest = Parameter(torch.zeros(count, sh_rest_count(3), 3, dtype=variant.get("storage", torch.float32)))
    if "moments" not in variant:
        return rest, torch.optim.Adam([rest], lr=RATE, eps=1e-15), sh_colors
    options = {name: variant[name] for name in ("moments", "reflective_above") if name in variant}
    return rest, PackedAdam([rest], lr=RATE, **options), packed_sh_colors


def fit(variant: dict[str, Any], steps: int) -> Tensor:
    """Coefficients after training, all variants with the same data."""
    wanted, _ = truth()
    rest, optimizer, colors = make(variant, COUNT)
    dc = torch.full((COUNT, 3), 2.0)  # bright enough never to be clamped
    for step in range(steps):
        generator = _seeded(1 + step)
        directions = torch.randn(COUNT, 3, generator=generator)
        target = sh_colors(3, directions, dc, wanted) + NOISE * torch.randn(COUNT, 3, generator=generator)
        visible = torch.rand(COUNT, generator=generator) < 0.5
        loss = (colors(3, directions, dc, rest) - target)[visible].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if variant.get("nearest"):
            rest.data = rest.data.half().float()
    return rest.detach().float()


def precision(steps: int) -> list[dict[str, Any]]:
    """Errors of colours over random directions, for all and for reflective Gaussians, and distance from float32."""
    wanted, reflective = truth()
    bases = sh_bases(3, functional.normalize(torch.randn(2000, 3, generator=_seeded(99)), dim=-1))

    def rms(difference: Tensor) -> float | None:
        value = torch.einsum("dk,nkc->dnc", bases, difference).square().mean().sqrt().item()
        return value if value == value and value != float("inf") else None

    results = {name: fit(variant, steps) for name, variant in VARIANTS.items()}
    reference = results["ours, float32"]
    return [
        {
            "variant": name,
            "error": rms(result - wanted),
            "error_reflective": rms((result - wanted)[reflective]),
            "from_float32": rms(result - reference),
            "ms": step_ms(VARIANTS[name]),
        }
        for name, result in results.items()
    ]


def step_ms(variant: dict[str, Any], count: int = 100_000, repeats: int = 7) -> list[float]:
    """Quartiles of the time of forward, backward and step of harmonics, half of the Gaussians visible."""
    rest, optimizer, colors = make(variant, count)
    directions, dc = torch.randn(count, 3, generator=_seeded(3)), torch.full((count, 3), 2.0)
    weights = torch.randn(count, 3, generator=_seeded(4))
    weights[torch.rand(count, generator=_seeded(5)) < 0.5] = 0
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        (colors(3, directions, dc, rest) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - start))
    return [round(value, 1) for value in statistics.quantiles(times[2:], n=4, method="inclusive")]


def main() -> None:
    """Writes both results and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of the fit; 0 leaves its result as it is")
    options = parser.parse_args()
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    reports: dict[str, dict[str, Any]] = {
        "splat_memory": {"rows": memory(), "gaussians": MILLIONS, "sh_degree": 3},
        "splat_sizes": {"rows": sizes()},
    }
    if options.steps:
        rows = precision(options.steps)
        reports["splat_precision"] = {"rows": rows, "steps": options.steps, "gaussians": COUNT, "noise": NOISE}
    for name, report in reports.items():
        for row in report["rows"]:
            print(*(f"{key} {value}" for key, value in row.items() if key != "held"), sep="; ")
        write_report({**report, **facts}, RESULTS / f"{name}.json")


if __name__ == "__main__":
    main()
