"""Planned memory beside what training really allocates on the CPU, and beside what its process takes.

python benchmarks/plan_memory.py            # writes results/plan_memory.json

Nine runs, fields and splats, that differ in rays, window, dimensions, number of Gaussians, SH degree, storage and
regularisation. Each is built and trained for some steps by its real trainer on photos of noise, twice: once under
torch's profiler, whose memory events are what torch allocated, and once without, for the memory of the process.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import gc
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from processes import report_result, write_report
from training_steps import event_peaks

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
STEPS = 3
"""Steps of each run. The first one makes moments and is left out."""
PHASES: tuple[Any, ...] = ("train", "evaluation")
FIELD_PX, SPLAT_PX = (160, 90), (640, 360)
LPIPS_SHAPES = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
MODEL, MANAGER = "pipeline.model.", "pipeline.datamanager."
RAYS, WINDOW = MANAGER + "train_num_rays_per_batch", MANAGER + "train_num_images_to_sample_from"
COUNT, DEGREE, REGULARIZATION = MODEL + "num_random", MODEL + "sh_degree", MODEL + "regularization"
VANILLA = {REGULARIZATION: "none"}
STARTS = "start", "entropy_start", "entropy_end", "neighbours_start", "planar_start"
AT_ONCE = {MODEL + "surface." + name: 0 for name in STARTS}
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "f3rm-ext-lite, 1024 rays, 16 dimensions, all images": ("f3rm-ext-lite", 16, {}),
    "f3rm-ext-lite, 4096 rays, 64 dimensions, 12 images": ("f3rm-ext-lite", 64, {RAYS: 4096, WINDOW: 12}),
    "f3rm-ext-lite, 2048 rays, torch's hash grid, 8 images": (
        "f3rm-ext-lite",
        32,
        {RAYS: 2048, WINDOW: 8, MODEL + "backend": "torch"},
    ),
    "f3rm-ext, 512 rays, 256 dimensions, half size": (
        "f3rm-ext",
        256,
        {RAYS: 512, MANAGER + "camera_res_scale_factor": 0.5},
    ),
    "sugar-ext, 50,000, degree 2": ("sugar-ext", 0, {COUNT: 50_000, DEGREE: 2, **VANILLA}),
    "sugar-ext, 300,000, degree 3": ("sugar-ext", 0, {COUNT: 300_000, **VANILLA}),
    "sugar-ext, 300,000, degree 3, optimize-memory": (
        "sugar-ext",
        0,
        {COUNT: 300_000, MODEL + "memory.optimize_memory": True, **VANILLA},
    ),
    "sugar-ext, 150,000, degree 1, int8, dn-consistency, 50,000 points": (
        "sugar-ext",
        0,
        {
            COUNT: 150_000,
            DEGREE: 1,
            MODEL + "memory.sh_moments": "int8",
            REGULARIZATION: "dn-consistency",
            MODEL + "surface.samples": 50_000,
            **AT_ONCE,
        },
    ),
    "sugar-ext, 150,000, degree 3, planar": (
        "sugar-ext",
        0,
        {COUNT: 150_000, REGULARIZATION: "planar", **AT_ONCE},
    ),
}
"""Method, dimensions of the features, and options, by name."""


def write_capture(folder: Path, size_px: tuple[int, int], images: int = 24, classes: int = 0) -> Path:
    """Writes photos of noise from cameras around the origin, with labels as features if there are classes."""
    width, height = size_px
    dice = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    frames = []
    for index in range(images):
        turn, name = index * math.tau / images, f"{index:02}.png"
        x, y = math.cos(turn), math.sin(turn)
        pose = [[-y, 0.0, x, 2 * x], [x, 0.0, y, 2 * y], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
        Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "images" / name)
        frame: dict[str, Any] = {"file_path": f"images/{name}", "transform_matrix": pose}
        if classes:
            labels = dice.integers(0, classes, (height, width), dtype=np.uint8)
            Image.fromarray(labels).save(folder / "labels" / name)
            frame["label_file_path"] = f"labels/{name}"
        frames.append(frame)
    lens = {"fl_x": width, "fl_y": width, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    names = {"classes": [str(number) for number in range(classes)]} if classes else {}
    (folder / "transforms.json").write_text(json.dumps({**lens, **names, "frames": frames}))
    return folder


def write_lpips(path: Path) -> None:
    """Writes random weights of LPIPS: the network takes as much memory with them."""
    state = {}
    for stage, (layer, (out, channels, side)) in enumerate(zip((0, 3, 6, 8, 10), LPIPS_SHAPES, strict=True)):
        state[f"net.slice{stage + 1}.{layer}.weight"] = torch.zeros(out, channels, side, side)
        state[f"net.slice{stage + 1}.{layer}.bias"] = torch.zeros(out)
        state[f"lin{stage}.model.1.weight"] = torch.zeros(1, out, 1, 1)
    torch.save(state, path)


def make_config(name: str, folder: Path, tiny: bool = False, device: str = "cpu") -> Any:
    """Returns the trainer's configuration of a run."""
    from f3rm_ext.method_configs.presets import make_config as make_field
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    method, classes, changes = RUNS[name]
    config: Any = (make_field if method.startswith("f3rm") else make_splat_config)(method)
    manager = config.pipeline.datamanager
    capture = folder / (f"labels-{classes}" if classes else "photos")
    if not capture.exists():
        write_capture(capture, FIELD_PX if classes else SPLAT_PX, classes=classes)
    manager.data = capture
    manager.features.cache_dir = folder / "cache"
    manager.features.extractors = (f"labels:data={capture}",) if classes else ()
    config.pipeline.model.lpips_weights = folder / "lpips.pth"
    if not classes:
        manager.num_downscales = 0
        config.pipeline.model.sh_steps_per_degree = 1
        config.pipeline.model.densify.max_gaussians = 0
    for path, value in changes.items():
        *parents, last = path.split(".")
        setattr(functools.reduce(getattr, parents, config), last, value)
    if tiny:
        make_tiny(config)
    config.output_dir, config.timestamp, config.vis = folder / "runs", "run", "tensorboard"
    config.machine.device_type, config.max_num_iterations, config.steps_per_save = device, 15_000, 10**9
    config.logging.local_writer.enable = False
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    if hasattr(config.pipeline.datamanager, "stereo_points"):
        config.pipeline.datamanager.stereo_points = "never"  # photos of noise; the number of Gaussians is given
    return config


def make_tiny(config: Any) -> None:
    """Leaves a configuration its code and takes its size."""
    model, manager = config.pipeline.model, config.pipeline.datamanager
    if not hasattr(model, "grid"):
        model.num_random, model.surface.samples = 200, 200
        return
    manager.train_num_rays_per_batch, manager.train_num_images_to_sample_from, model.num_samples = 64, 2, 4
    for options in (model, *model.proposals):
        options.grid.log2_hashmap_size, options.num_samples = 8, 4
    model.feature_grid.log2_hashmap_size, model.eval_num_rays_per_chunk = 8, 512


def train(config: Any, mark: Callable[[str], Any]) -> dict[str, Any]:
    """Trains some steps with the real trainer, and draws an evaluation picture.

    Args:
        mark: returns a context for each phase.
    """
    from nerfstudio.engine.callbacks import TrainingCallbackLocation as Location

    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    pipeline = trainer.pipeline

    def step(number: int) -> None:
        pipeline.train()
        for location in (Location.BEFORE_TRAIN_ITERATION, None, Location.AFTER_TRAIN_ITERATION):
            if location is None:
                trainer.train_iteration(number)
                continue
            for callback in trainer.callbacks[1:-1]:  # without those that stop and resume a run
                callback.run_callback_at_location(number, location=location)

    first = 3  # SH degrees rise by one per step
    for number in range(first - 1, first + STEPS - 1):
        if number < first:
            step(number)
        else:
            with mark("train"):
                step(number)
    with mark("evaluation"), torch.no_grad():
        pipeline.get_eval_image_metrics_and_images(step=first + STEPS)
    manager, window = pipeline.datamanager, 0
    if hasattr(manager, "train_pixel_sampler"):
        window = manager.train_pixel_sampler._window.nbytes
    else:
        window = manager.train_stream._window.nbytes
    cameras = manager.train_dataset.cameras
    found = {"window": window, "train": len(manager.train_dataset), "eval": len(manager.eval_dataset)}
    found |= {"width_px": int(cameras.width[0]), "height_px": int(cameras.height[0])}
    manager.close()
    return found


def allocated(name: str, folder: Path) -> dict[str, Any]:
    """Measures what torch allocates, by the memory events of its profiler.

    They are those of the main thread: windows, which another thread loads, are added.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # What an earlier run leaves would be freed in this one, and count.
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        about = train(make_config(name, folder), lambda phase: torch.profiler.record_function(f"phase {phase}"))
    peaks = event_peaks(profile, [f"phase {phase}" for phase in PHASES])
    return {phase: peaks[f"phase {phase}"] + about["window"] for phase in PHASES} | {"about": about}


def resident(name: str, folder: Path) -> dict[str, Any]:
    """Measures by how much the memory of the process rises above that of a tiny run, which has loaded all code."""
    train(make_config(name, folder, tiny=True), lambda _: contextlib.nullcontext())
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peaks = _status("VmRSS"), dict.fromkeys(PHASES, 0)

    class Mark:
        def __init__(self, phase: str) -> None:
            self.phase = phase

        def __enter__(self) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far

        def __exit__(self, *_: object) -> None:
            peaks[self.phase] = max(peaks[self.phase], _status("VmHWM") - before)

    train(make_config(name, folder), Mark)
    return peaks


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise SystemExit("Linux says how much memory a process takes in /proc; this machine has none.")


def on_cuda(name: str, folder: Path, device: str, tiny: bool) -> dict[str, Any]:
    """Measures what torch's allocator hands out on a GPU at most, and plans the same run.

    Args:
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal, in which nothing is measured.
    """
    peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def mark(phase: str) -> Iterator[None]:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield
        if device == "cuda":
            peaks[phase] = max(peaks.get(phase, 0.0), (torch.cuda.max_memory_allocated() - before) / MIB)

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    config = make_config(name, folder, tiny, device)
    about = train(copy.deepcopy(config), mark)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 8 << 30
    request = request_of(name, config, about, device, memory)
    from f3rm_ext.planning.estimator import estimate_memory

    begin, found = time.perf_counter(), estimate_memory(request)
    tensors = {phase: _tensors(found.device[phase]) / MIB for phase in PHASES}
    reserved = torch.cuda.max_memory_reserved() / MIB if device == "cuda" else None
    return {
        "plan_s": round(time.perf_counter() - begin, 2),
        **{f"{phase}_planned_mib": round(value) for phase, value in tensors.items()},
        **{f"{phase}_mib": round(peaks[phase]) if phase in peaks else None for phase in PHASES},
        "whole_planned_mib": round(max(found.peak(phase) for phase in PHASES) / MIB),
        "reserved_mib": reserved and round(reserved),
    }


def _tensors(held: Mapping[Any, int]) -> int:
    """Bytes of tensors, without what CUDA takes and without the allowance for gaps."""
    return sum(size for category, size in held.items() if category not in ("context", "fragmentation"))


def request_of(name: str, config: Any, about: dict[str, Any], device: str, memory_bytes: int) -> Any:
    """Returns what is to be planned.

    Args:
        about: numbers and sizes of its images.
    """
    from f3rm_ext.memory.devices import Device
    from f3rm_ext.planning.request import CaptureSizes, PlanRequest

    splats = not RUNS[name][1]
    sizes = CaptureSizes(about["train"], about["eval"], about["width_px"], about["height_px"])
    count = config.pipeline.model.num_random if splats else None
    return PlanRequest(config, sizes, Device(device, memory_bytes), gaussians=count)


def plan(name: str, folder: Path, about: dict[str, Any], warm: bool = True) -> dict[str, Any]:
    """Plans the run: with what torch allocates, and with numpy's arrays too; and the plan's time.

    Args:
        about: what :func:`train` returned.
        warm: make a plan before, so that the time is without imports.
    """
    from f3rm_ext.memory.estimate import PROCESS_BYTES
    from f3rm_ext.planning.estimator import estimate_memory, estimate_splats

    request = request_of(name, make_config(name, folder), about, "cpu", 8 << 30)
    if warm:
        estimate_memory(copy.deepcopy(request))
    begin = time.perf_counter(), time.process_time()
    found = estimate_memory(request)
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    without = found if RUNS[name][1] else estimate_splats(request, arrays=False)
    # Evaluation reads one image at a time here; training has read its window.
    unread = found.device["train"].get("images", 0) + found.device["train"].get("features", 0) - about["window"]
    return {
        "planned": {phase: _tensors(without.device[phase]) - unread for phase in PHASES},
        "planned_process": {
            phase: found.peak(phase) - found.device[phase]["context"] + PROCESS_BYTES - unread for phase in PHASES
        },
        "categories": {phase: dict(found.device[phase]) for phase in PHASES},
        "plan_s": round(took[0], 2),
        "plan_cpu_s": round(took[1], 2),
    }


def in_child(work: Callable[[], Any]) -> Any:
    """Returns the result of a function, from a process of its own in which everything is imported already."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with os.fdopen(writer, "w") as file:
                json.dump(work(), file)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("A measurement failed.")
    return json.loads(said)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Returns a row of the report."""
    found = in_child(lambda: allocated(name, folder))
    about = found.pop("about")
    planned = in_child(lambda: plan(name, folder, about))
    process = in_child(lambda: resident(name, folder))
    return {"run": name, **planned, "allocated": found, "process": process, **about}


def print_row(row: dict[str, Any]) -> None:
    """Prints a run: planned and allocated, planned and process, MiB, and their ratios."""
    print(row["run"], f"(planned in {row['plan_s']} s)")
    for phase in PHASES:
        figures = [row[key][phase] / MIB for key in ("planned", "allocated", "planned_process", "process")]
        ratios = (figures[0] / figures[1], figures[2] / figures[3])
        said = [f"{figure:10.1f}" for figure in figures] + [f"{ratio:8.3f}" for ratio in ratios]
        print(f"  {phase:<12}", *said, flush=True)


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows, with versions and threads."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write_report({"versions": versions, "threads": torch.get_num_threads(), "rows": rows}, path)


def main() -> None:
    """Prints the table and writes results/plan_memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_memory.json")
    parser.add_argument("--one", choices=list(RUNS), help="only this run, on --device, for the GPU day")
    parser.add_argument("--device", default="cpu", help="of --one")
    parser.add_argument("--tiny", action="store_true", help="--one in next to no time, for a rehearsal")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # Imported once, for all children.
    import f3rm_ext.method_configs.presets
    import f3rm_ext.method_configs.splat_presets  # noqa: F401

    rows = []
    with tempfile.TemporaryDirectory(prefix="plan-memory-") as work:
        folder = Path(work)
        in_child(lambda: write_lpips(folder / "lpips.pth"))  # children hang after threads of OpenMP ran here
        if options.one:
            report_result(on_cuda(options.one, folder, options.device, options.tiny))
            return
        for name in RUNS:
            if options.only in name:
                rows.append(measure(name, folder))
                print_row(rows[-1])
    write_rows(rows, options.out)


if __name__ == "__main__":
    main()
