"""Steps per second and peak memory of sugar-ext beside splatfacto: the same Gaussians, images and number of steps.

python benchmarks/splat_speed.py --data CAPTURE     # needs CUDA; writes results/splat_speed.json
python benchmarks/splat_speed.py --data CAPTURE --count 20000 --steps 40 --scale 0.2 --only "sugar-ext, planar" \
    "sugar-ext without reg" --out benchmarks/results/splat_steps.json  # on the CPU

Every run is a process of its own, and the variants take turns. Nothing is added or removed (the count stays what it
is), all images are at full size from the first step, colours have degree 3 from the third. Steps include what the
trainer does around them; evaluation, viewer and checkpoints are off.
"""

import argparse
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers import tolerate_missing_lpips
from processes import report_result, require_result, write_report
from step_watch import StepWatch
from train_once import measured_config

RESULTS = Path(__file__).parent / "results"
VARIANTS: dict[str, dict[str, Any]] = {
    "splatfacto": {"method": "splatfacto"},
    "sugar-ext without filters": {"regularization": "none", "filters": False},
    "sugar-ext without regularisation": {"regularization": "none"},
    "sugar-ext, optimize-memory": {"regularization": "none", "optimize_memory": True},
    "sugar-ext, cache cleared every 10 steps": {"regularization": "none", "fragmentation": "aggressive"},
    "sugar-ext, density": {"regularization": "density"},
    "sugar-ext, dn-consistency": {"regularization": "dn-consistency"},
    "sugar-ext, planar": {"regularization": "planar"},
    "sugar-ext, planar, losses in torch": {"regularization": "planar", "torch": True},
}
"""Regularisation is at work from the first step, unlike in a real run, where it begins after 60 % of the steps."""
WARM_UP = 0.2
"""Share of the steps that are not timed."""
COUNTED = 6
"""Steps at the end whose launches and waits are counted, on CUDA."""


def make_config(variant: dict[str, Any], options: argparse.Namespace, folder: Path) -> Any:
    """The trainer's configuration of a variant."""
    from nerfstudio.configs.method_configs import all_methods

    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    method = all_methods[variant.get("method", "sugar-ext")]
    config = measured_config(
        method, options.data, folder, steps=options.steps, scale=options.scale, device=options.device
    )
    ours = config.method_name != "splatfacto"
    manager, model = config.pipeline.datamanager, config.pipeline.model
    manager.dataparser = CaptureDataParserConfig(data=options.data)
    model.num_random, model.sh_degree = options.count, 3
    if not ours:
        model.num_downscales, model.sh_degree_interval, model.stop_split_at = 0, 1, 0
        model.random_init = True
        return config
    manager.num_downscales, manager.stereo_points, model.sh_steps_per_degree = 0, "never", 1
    model.densify.strategy = "none"
    model.regularization = variant["regularization"]
    model.memory.optimize_memory = variant.get("optimize_memory", False)
    model.memory.fragmentation = variant.get("fragmentation", model.memory.fragmentation)
    model.mip.filter_2d = model.mip.filter_3d = variant.get("filters", True)
    surface = model.surface
    surface.start = surface.planar_start = surface.entropy_start = surface.entropy_end = 0
    surface.neighbours_start, surface.prune_opacity, surface.planar_prune_opacity = 0, 0.0, 0.0
    surface.samples = options.samples
    return config


def start_run(name: str, options: argparse.Namespace, folder: Path, **changes: Any) -> Any:
    """Returns the trainer of a variant, ready to train, with Gaussians that are the same for all variants.

    Args:
        changes: options of the datamanager by name, for our methods.
    """
    from nerfstudio.scripts.train import _set_random_seed

    from f3rm_ext.data.pinhole_cameras import PinholeCameras
    from f3rm_ext.splat.initialization import initial_gaussians, random_points

    if VARIANTS[name].get("torch"):
        turn_off_kernels()
    config = make_config(VARIANTS[name], options, folder)
    for key, value in changes.items():
        setattr(config.pipeline.datamanager, key, value)
    config.save_config()
    _set_random_seed(42)
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    model = trainer.pipeline.model
    views = PinholeCameras.of(trainer.pipeline.datamanager.train_dataset.cameras).to("cpu")
    generator = torch.Generator().manual_seed(0)
    means = random_points(views, options.count, generator)
    begin = initial_gaussians(means, None, 3, 0.1 * views.extent(), generator)
    for key, value in begin.tensors().items():
        parameter = model.gauss_params[key]
        parameter.data = value.to(parameter.device, parameter.dtype)
    if hasattr(model, "filter_3d"):
        model.filter_3d = torch.zeros(len(means), device=model.device)
    return trainer


def turn_off_kernels() -> None:
    """Has losses computed by their definitions in torch for the rest of this process."""
    from f3rm_ext.splat import losses
    from f3rm_ext.splat.regularization import multiview, normals, patches, planar

    for module in (losses, multiview, normals, patches, planar):
        module.choose_kernels = lambda *_: None  # type: ignore[attr-defined]


def run_one(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains one variant in this process."""
    from f3rm_ext.engine.cost import peak_mib

    tolerate_missing_lpips()
    trainer = start_run(name, options, folder)
    model = trainer.pipeline.model
    device, cuda = torch.device(model.device), torch.device(model.device).type == "cuda"
    counted = COUNTED if cuda else 0
    warm_up = int(WARM_UP * options.steps) if options.warm_up is None else options.warm_up
    watch = StepWatch(device, options.steps - counted - 1, warm_up, options.seconds, counted)
    watch.attach(trainer)
    watch.run(trainer.train)
    if len(model.gauss_params["means"]) != options.count:
        raise SystemExit(f"{name} changed the number of Gaussians, so it cannot be compared.")
    cameras = trainer.pipeline.datamanager.train_dataset.cameras
    found = watch.result()
    return {
        "variant": name,
        "steps_per_s": found.pop("it_per_s"),
        "gaussians": options.count,
        "pixels": int(cameras.height[0]) * int(cameras.width[0]),
        # Our methods take the counter back before every step, and remember.
        "peak_mib": max(peak_mib(device), model.cost.peak_mib if hasattr(model, "cost") else 0) if cuda else None,
        "accounted_mib": accounted_mib(name, options.count, options.samples),
        # Lost to gaps too small for reuse; reserved − allocated also counts the cache, which is not lost.
        "gaps_mib": torch.cuda.memory_stats(device)["inactive_split_bytes.all.current"] / 2**20 if cuda else 0.0,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        **found,
    }


def accounted_mib(name: str, count: int, samples: int) -> float | None:
    """Planned memory of a variant, MiB, without images and with a tiny picture."""
    from splat_memory import training_bytes

    variant = VARIANTS[name]
    if variant.get("method"):
        return None
    small = {"optimize_memory": True} if variant.get("optimize_memory") else {}
    return sum(training_bytes(count, 3, variant["regularization"], samples, **small).values()) / 2**20


def in_process(name: str, arguments: list[str]) -> dict[str, Any]:
    """The result of :func:`run_one` in a process of its own."""
    return require_result([sys.executable, __file__, *arguments, "--one", name])


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a capture with a transforms.json")
    parser.add_argument("--count", type=int, default=200_000, help="Gaussians")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, help="steps that are not timed; a fifth by default")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training at most; 0 for no limit")
    parser.add_argument("--scale", type=float, default=1.0, help="ratio of the images' sides to those of the files")
    parser.add_argument("--samples", type=int, default=1_000_000, help="points of the regularisation per step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[""], help="variants whose names begin so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "splat_speed.json")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Prints the table and writes results/splat_speed.json."""
    options = make_parser().parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            report_result(run_one(options.one, options, Path(folder)))
        return
    names = [name for name in VARIANTS if name.startswith(tuple(options.only))]
    if options.device == "cpu" and "splatfacto" in names:
        raise SystemExit("splatfacto draws on CUDA only: give --only sugar-ext for a try on the CPU.")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            found[name].append(in_process(name, sys.argv[1:]))
            print(f"{name}: {found[name][-1]['steps_per_s']:.2f} steps per second", flush=True)
    rows = []
    for results in found.values():
        speeds = [result["steps_per_s"] for result in results]
        rows.append(
            {
                **results[0],
                "steps_per_s": statistics.median(speeds),
                "steps_per_s_all": speeds,
                "peak_mib": max((result["peak_mib"] or 0.0) for result in results) or None,
            }
        )
    first = rows[0]["steps_per_s"]
    for row in rows:
        memory = f"{row['peak_mib']:.0f} MiB" if row["peak_mib"] else "-"
        print(f"{row['variant']:<40} {row['steps_per_s']:8.2f} it/s  {row['steps_per_s'] / first:5.2f}x  {memory}")
    record = {
        "device": rows[0]["device"],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()},
        "rows": rows,
    }
    write_report(record, options.out)


if __name__ == "__main__":
    main()
