"""What ``--profile-tensors True`` costs: the same run, whose steps are profiled and not profiled in turns.

``python benchmarks/profiler_overhead.py --data CAPTURE [--steps 200]`` trains each method in this process. Half of the
steps run without the profiler, so that both kinds meet the same model and the same load of the machine. Prints medians
and quartiles of wall and CPU time per step, what a snapshot adds to its step, and the overhead at the default interval,
as Markdown; with ``--json`` it writes them to a file too. The peer is the run without the profiler.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.engine.callbacks import TrainingCallbackLocation

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config

METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
WARM_UP = 12
TURNS = ("without", "with", "with", "without")
"""Both kinds meet as many even steps as odd ones, since proposal networks are trained at every other step only."""
BEFORE, AFTER = TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION


def make_trainer(method: str, data: Path, folder: Path, steps: int, scale: float, device: str) -> Any:
    """Builds the trainer of a method as ns-train would, with the profiler."""
    config: F3rmTrainerConfig = (make_splat_config if method.startswith("sugar") else make_config)(method)
    config.data = config.pipeline.datamanager.data = data
    config.output_dir, config.experiment_name, config.timestamp = folder, "e", method
    config.machine.device_type, config.vis = device, "tensorboard"  # type: ignore[assignment]
    config.max_num_iterations = steps
    config.logging.local_writer.enable = False
    config.profile_tensors, config.profile_tensors_every = True, 10**9
    manager: Any = config.pipeline.datamanager
    manager.camera_res_scale_factor = scale
    manager.features.cache_dir = folder / "features"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    trainer._end_step = steps  # what train() would set before its loop
    return trainer


def run_step(trainer: Any, step: int) -> tuple[float, float]:
    """One step of nerfstudio's loop; returns wall and CPU time, ms."""
    device = torch.device(trainer.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began, began_cpu = time.perf_counter(), time.process_time()
    trainer.pipeline.train()
    for location in (BEFORE, AFTER):
        for callback in trainer.callbacks:
            callback.run_callback_at_location(step, location=location)
        if location is BEFORE:
            trainer.train_iteration(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - began_cpu)


def measure(trainer: Any, steps: int) -> dict[str, Any]:
    """Runs steps with the profiler, without it, and with a snapshot, in turns."""
    profiler, profiled, plain = trainer.profiler, trainer.callbacks, trainer.callbacks[1:-1]
    times: dict[str, list[tuple[float, float]]] = {"without": [], "with": [], "snapshot": []}
    for step in range(steps):
        kind = TURNS[step % len(TURNS)]
        if step % 20 == 11:
            kind = "snapshot"
        trainer.profiler, trainer.callbacks = (None, plain) if kind == "without" else (profiler, profiled)
        profiler.every = 1 if kind == "snapshot" else 10**9
        taken = run_step(trainer, step)
        if step >= WARM_UP:
            times[kind].append(taken)
    marks = _marks(profiler)
    profiler.close("finished")
    every = F3rmTrainerConfig().profile_tensors_every
    wall = {kind: [one[0] for one in values] for kind, values in times.items()}
    cpu = {kind: [one[1] for one in values] for kind, values in times.items()}
    result: dict[str, Any] = {"steps": {kind: len(values) for kind, values in times.items()}, "every": every}
    for name, found in (("wall", wall), ("cpu", cpu)):
        middle = {kind: statistics.median(values) for kind, values in found.items()}
        per_step = middle["with"] - middle["without"]
        snapshot = middle["snapshot"] - middle["without"]
        result[name] = {
            **{f"{kind}_ms": _spread(values) for kind, values in found.items()},
            "per_step_ms": round(per_step, 3),
            "per_snapshot_ms": round(snapshot, 1),
            "overhead_percent": round(100 * (per_step + snapshot / every) / middle["without"], 2),
        }
    own = profiler.snapshots[1:] or profiler.snapshots
    result["snapshot_alone_ms"] = _spread([one.cost_ms for one in own])
    result["marks_alone_ms"] = _spread(marks)
    return result


def _marks(profiler: Any, repeats: int = 200) -> list[float]:
    """Time of what the profiler does in a step without a snapshot: three readings and resets of the peak, ms."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for phase in ("between steps", "train", "densify"):
            profiler.ends(phase)
        found.append(1000 * (time.perf_counter() - began))
    return found


def _spread(values: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile."""
    return [round(float(value), 3) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| method | step without, CPU ms | step with, CPU ms | peaks of a step alone, ms | a snapshot alone, ms "
        "| overhead at the default interval |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for method, row in rows.items():
        without, with_, marks, snapshot = (
            f"{middle:.4g} ({low:.4g}–{high:.4g})"
            for low, middle, high in (
                row["cpu"]["without_ms"],
                row["cpu"]["with_ms"],
                row["marks_alone_ms"],
                row["snapshot_alone_ms"],
            )
        )
        alone = 100 * (row["marks_alone_ms"][1] + row["snapshot_alone_ms"][1] / row["every"])
        alone /= row["wall"]["without_ms"][1]
        lines.append(f"| {method} | {without} | {with_} | {marks} | {snapshot} | {alone:.2f} % |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="capture")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.5, help="of the images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(method, options.data, Path(folder), options.steps, options.scale, options.device)
            rows[method] = measure(trainer, options.steps)
    print(table(rows))
    if options.json:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "data": options.data.name,
            "steps": options.steps,
            "scale": options.scale,
            "device": options.device,
        }
        options.json.write_text(json.dumps({**about, "methods": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
