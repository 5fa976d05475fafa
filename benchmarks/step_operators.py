"""Kernels that a step launches on a GPU, and places where it makes the host wait, counted without a GPU.

python benchmarks/step_operators.py               # writes the column "now" of results/step_operators.json
python benchmarks/step_operators.py --column before
python benchmarks/step_operators.py --only sugar-ext --places    # prints where they come from; writes nothing

Tensors pretend to be on CUDA (tests/cuda_contract/pretend): whole steps run, with the backward pass and the optimisers,
and large tensors have a shape only. An operator of torch, a kernel of gsplat or a kernel of Triton counts as one; views
and empty tensors do not count. On a GPU some operators are several kernels (a sort, the intersections of gsplat), and
autocast adds conversions; both are left out. Nothing is timed.
"""

# pyright: reportMissingImports=false

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cuda_contract"))

import torch

RESULT = Path(__file__).parent / "results" / "step_operators.json"
GAUSSIANS = 1_000_000
MOST_VALUES = 100_000
"""Larger tensors have a shape only."""
QUERY_RAYS = (256, 128)
"""A picture of as many rays as a field renders at once on a GPU, 32,768."""
WITHOUT = "planar, losses in torch"
QUERY_PX = (1920, 1080)
FEATURE_DIM = 768
Row = dict[str, Any]


def field_rows(method: str, capture: Path, folder: Path) -> Iterator[Row]:
    """A field with each implementation of its hash grid that runs without a GPU: a step, and a picture with a query."""
    from pretend.steps import make_run

    from f3rm_ext.nerf.hash_grid import Backend

    for backend in get_args(Backend):
        if backend not in ("torch", "triton"):
            continue

        def change(config: Any, backend: str = backend) -> None:
            config.pipeline.model.backend = backend

        run = make_run(method, capture, folder, change)
        run.step(0)
        yield row(f"{method}, {backend} grid", "training", run.step(1))
        yield row(f"{method}, {backend} grid", f"query, {QUERY_RAYS[0] * QUERY_RAYS[1]:,} rays", run.query(*QUERY_RAYS))


def nerfacto_rows(capture: Path, folder: Path) -> Iterator[Row]:
    """Nerfacto with its torch grid, which is what it has without tiny-cuda-nn."""
    from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManagerConfig
    from pretend.steps import make_peer

    def change(config: Any) -> None:
        config.pipeline.model.implementation = "torch"
        old = config.pipeline.datamanager
        config.pipeline.datamanager = VanillaDataManagerConfig(
            dataparser=old.dataparser, train_num_rays_per_batch=4096, data=capture
        )

    run = make_peer("nerfacto", capture, folder, change)
    run.step(0)
    yield row("nerfacto, torch grid", "training", run.step(1))


def splat_rows(method: str, capture: Path, folder: Path) -> Iterator[Row]:
    """Splats in each stage, at a step without densification, and a picture with a query."""
    from pretend.steps import lift_made_up_features, make_run

    from f3rm_ext.splat import triton_kernels

    stages = {"vanilla": ("none", 4001), "entropy": ("density", 7901)}
    stages |= {mode: (mode, 9601) for mode in ("density", "sdf", "dn-consistency", "planar")}
    stages[WITHOUT] = ("planar", 9601)
    for stage, (mode, step) in stages.items():

        def change(config: Any, mode: str = mode) -> None:
            config.pipeline.model.regularization = mode
            config.pipeline.model.num_random = 200
            config.pipeline.datamanager.num_downscales = 0
            config.pipeline.datamanager.stereo_points = "never"

        run = make_run(method, capture, folder, change)
        surface = run.model.regularizer.options
        fitting = surface.samples, surface.patches
        surface.samples, surface.patches = 200, 16
        with ExitStack() as stack:
            if stage == WITHOUT:
                stack.enter_context(mock.patch.object(triton_kernels, "find_kernels", lambda *_: None))
            run.step(step)
            surface.samples, surface.patches = fitting
            grow(run)
            yield row(method, stage, run.step(step + 1))
        if stage == "vanilla":
            lift_made_up_features(run, FEATURE_DIM)
            run.query(64, 48)  # kernels are tried out once
            yield row(method, f"query, {QUERY_PX[0]} × {QUERY_PX[1]}", run.query(*QUERY_PX))


def splatfacto_rows(capture: Path, folder: Path) -> Iterator[Row]:
    """Splatfacto, at a step without densification."""
    from pretend.steps import make_peer

    def change(config: Any) -> None:
        config.pipeline.model.num_random, config.pipeline.model.random_init = 200, True
        config.pipeline.model.num_downscales = 0

    run = make_peer("splatfacto", capture, folder, change)
    run.step(4001)
    grow(run)
    yield row("splatfacto", "vanilla", run.step(4002))


def grow(run: Any) -> None:
    """Gives splats their million Gaussians, as shapes, and everything that has a row for each."""
    count = run.model.num_gaussians if hasattr(run.model, "num_gaussians") else len(run.model.gauss_params["means"])
    for name, old in list(run.model.gauss_params.items()):
        optimizer = run.optimizers.optimizers[name]
        optimizer.zero_grad()
        new = torch.nn.Parameter(grown(old.detach(), count))
        run.model.gauss_params[name] = new
        optimizer.param_groups[0]["params"] = run.optimizers.parameters[name] = [new]
        optimizer.state[new] = optimizer.state.pop(old)
    tables = [state for item in run.optimizers.optimizers.values() for state in item.state.values()]
    owners = [run.model, getattr(run.model, "densifier", None), getattr(run.model, "regularizer", None)]
    tables += [vars(owner) for owner in owners if owner is not None]
    tables += [
        getattr(owner, name)
        for owner in owners
        for name in ("_buffers", "statistics", "strategy_state")
        if hasattr(owner, name)
    ]
    if hasattr(owners[2], "neighbours"):
        tables.append(vars(owners[2].neighbours))
    for table in tables:
        for name, value in list(table.items()):
            if isinstance(value, torch.Tensor):
                table[name] = grown(value, count)


def grown(value: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor with a row for each of a million Gaussians, where it had one for each of ``count``."""
    if value.dim() == 0 or len(value) != count:
        return value
    return torch.zeros(GAUSSIANS, *value.shape[1:], dtype=value.dtype, device=value.device)


def row(method: str, stage: str, counts: Any) -> Row:
    """A row of the result."""
    from pretend.steps import total

    whole = total(counts)
    return {
        "method": method,
        "stage": stage,
        "kernels": {phase: ledger.total for phase, ledger in counts.items() if ledger.total},
        "waits": whole.waited,
        "places": {f"{place} ({kind})": count for (place, kind), count in whole.waits.most_common()},
        "modules": dict(whole.modules.most_common(8)),
    }


PARTS: dict[str, Callable[[Path, Path], Iterator[Row]]] = {
    "f3rm-ext": lambda capture, folder: field_rows("f3rm-ext", capture, folder),
    "nerfacto": nerfacto_rows,
    "sugar-ext": lambda capture, folder: splat_rows("sugar-ext", capture, folder),
    "splatfacto": splatfacto_rows,
}


def count(parts: list[str]) -> list[Row]:
    """Counts the steps of some methods. What cannot run any more is said, and left out."""
    from pretend.gsplat_kernels import gsplat_kernels
    from pretend.steps import write_capture
    from pretend.tensors import pretended
    from pretend.triton_kernels import triton_kernels

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        capture = write_capture(Path(folder, "capture"))
        stack.enter_context(pretended("backward", most_values=MOST_VALUES))
        stack.enter_context(gsplat_kernels())
        stack.enter_context(triton_kernels())
        for part in parts:
            began = time.monotonic()
            try:
                for found in PARTS[part](capture, Path(folder)):
                    rows.append(found)
                    print_row(found)
            except Exception as error:
                import traceback

                traceback.print_exc()
                print(f"{part} could not be counted: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"({part}: {time.monotonic() - began:.0f} s)", file=sys.stderr)
    return rows


def print_row(found: Row) -> None:
    """Prints a row as Markdown."""
    kernels = found["kernels"]
    parts = ", ".join(f"{phase} {number}" for phase, number in kernels.items())
    print(
        f"| {found['method']} | {found['stage']} | {sum(kernels.values())} ({parts}) | {found['waits']} |", flush=True
    )


def commit() -> str:
    """The commit that was counted; empty outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Prints a table and writes results/step_operators.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--column", choices=("before", "now"), default="now", help="column of the result to write")
    parser.add_argument("--only", choices=tuple(PARTS), help="count one method and write nothing")
    parser.add_argument("--places", action="store_true", help="print where kernels and waits come from")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| method | stage | kernels | waits |\n|---|---|--:|--:|")
    rows = count([options.only] if options.only else list(PARTS))
    if options.places:
        print(
            json.dumps(
                [{key: found[key] for key in ("method", "stage", "modules", "places")} for found in rows], indent=1
            )
        )
    if options.only:
        return
    report = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    import gsplat

    report[options.column] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "gsplat": gsplat.__version__,
        "gaussians": GAUSSIANS,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
