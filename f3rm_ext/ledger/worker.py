"""One training or evaluation of a benchmark, in a process of its own, as ``ns-train`` and ``ns-eval`` would do it.

``python -c "from f3rm_ext.ledger.worker import main; main()" JOB.json`` reads the job, writes its result as JSON into
the folder that the job names, and sends its progress by :mod:`f3rm_ext.events`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from f3rm_ext import events
from f3rm_ext.errors import CheckpointError, ConfigError, install_excepthook
from f3rm_ext.utils.atomic_files import write_atomic

RESULT = "result.json"


@dataclass(frozen=True)
class TrainJob:
    """A training to measure."""

    arguments: list[str]
    """Arguments of ns-train, the method first."""
    out: str
    """Folder for the run and for :data:`RESULT`."""
    steps: int
    """Number of steps; 0 for the rest of the run."""
    warm_up: int
    """Number of steps at the beginning that are not timed."""
    seed_offset: int
    eval_step: int = 0
    """Step of the whole run after which to evaluate; 0 for the last one."""


@dataclass(frozen=True)
class EvalJob:
    """An evaluation of a run."""

    config: str
    """Path of the run's config.yml."""
    out: str
    """Folder for :data:`RESULT`."""
    train_views: int
    """Number of training views to evaluate too, spread evenly."""
    eval_step: int = 0
    """Step of the checkpoint to evaluate; 0 for the newest one."""


def write_job(job: TrainJob | EvalJob, path: Path) -> None:
    """Writes a job for :func:`main`."""
    # Versions of the package before this option can be baselines.
    values = {key: value for key, value in asdict(job).items() if key != "eval_step" or value}
    path.write_text(json.dumps({"kind": type(job).__name__, **values}))


def main() -> None:
    """Runs the job whose file is the only argument."""
    install_excepthook()
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.pop("kind") == "TrainJob":
        result = train(TrainJob(**job))
    else:
        result = evaluate(EvalJob(**job))
    write_atomic(Path(job["out"]) / RESULT, json.dumps(result).encode())


def report(done: int, total: int) -> None:
    """Tells the progress."""
    events.progress(events.STEPS, done, total)


# --- training --------------------------------------------------------------------------------------------------------


def train(job: TrainJob) -> dict[str, Any]:
    """Runs ns-train, times its steps, and returns values, conditions, origin, method, seed and config of the run.

    Raises:
        ConfigError: the run cannot be measured like this.
    """
    import torch
    from nerfstudio.engine.trainer import Trainer
    from nerfstudio.scripts import train as ns_train

    from f3rm_ext.engine.optimizers import schedule_length
    from f3rm_ext.ledger.conditions import commit, config_digest, hardware, versions
    from f3rm_ext.ledger.stopwatch import Stopwatch

    stopwatch = Stopwatch(job.warm_up, report, job.eval_step)
    result: dict[str, Any] = {}
    original_main, original_train = ns_train.main, Trainer.train

    def measured_main(config: Any) -> None:
        result["origin"] = {"schedule_steps": schedule_length(config), "config": "", **commit(), "versions": versions()}
        result["steps"] = set_window(config, job)
        result["method"], result["seed"] = config.method_name, config.machine.seed
        if config.data:
            config.pipeline.datamanager.data = config.data
        result["origin"]["config"] = config_digest(config)
        result["config"] = str(config.get_base_dir() / "config.yml")
        config.save_only_latest_checkpoint &= not job.eval_step
        original_main(config)

    def measured_train(trainer: Any) -> None:
        stopwatch.attach(trainer, result["steps"])
        result["rays_per_step"] = trainer.pipeline.datamanager.get_train_rays_per_batch()
        original_train(trainer)

    # The entry point of ns-train runs as it is, so that options and plugins mean what they mean there.
    ns_train.main, Trainer.train = measured_main, measured_train  # type: ignore[assignment, method-assign]
    sys.argv = ["ns-train", *job.arguments]
    ns_train.entrypoint()

    values = stopwatch.figures()
    if result.get("rays_per_step"):
        values["rays_per_step"] = float(result["rays_per_step"])
    device = stopwatch.device.type
    conditions = {
        "first_step": stopwatch.first_step,
        "last_step": stopwatch.last_step,
        "eval_step": job.eval_step or stopwatch.last_step,
        "warm_up_steps": job.warm_up,
        "device": device,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
    }
    about = {key: result[key] for key in ("origin", "method", "seed", "config")}
    return {"values": values, "conditions": conditions, **about}


def set_window(config: Any, job: TrainJob) -> int:
    """Shortens a run to the window that is measured, with its schedule unchanged, and turns off saving, evaluation and
    the viewer. Returns the number of steps of the window.

    Raises:
        ConfigError: the run has no such window, or uses several devices.
        CheckpointError: the checkpoint to start from does not exist.
    """
    if config.load_config is not None:
        raise ConfigError("`bench run` needs the options of a run, not --load-config: give its method and options.")
    if config.machine.num_devices * config.machine.num_machines > 1:
        raise ConfigError("`bench run` measures a single device: leave out --machine.num-devices and -machines.")
    first = first_step(config)
    whole = config.max_num_iterations
    steps = job.steps or whole - first
    if first + steps > whole:
        raise ConfigError(
            f"The window ends at step {first + steps}, but the run at step {whole}: take fewer steps (bench run "
            "--steps), or give the length of the whole run (--max-num-iterations)."
        )
    if job.eval_step and not first < job.eval_step <= first + steps:
        raise ConfigError(
            f"--eval-step is {job.eval_step}, outside of the window from step {first} to {first + steps}: give a step "
            "in it."
        )
    if steps - job.warm_up < 2:
        raise ConfigError(
            f"Of {max(steps, 0)} steps, {job.warm_up} are for warming up (--warm-up), which leaves too few to measure: "
            "take more steps (--steps)."
        )
    if hasattr(config, "schedule_steps"):  # our methods count from the first run and can cut a schedule short
        config.schedule_steps, config.max_num_iterations = config.schedule_steps or whole, first + steps
    else:
        config.max_num_iterations = steps
    config.output_dir, config.experiment_name, config.timestamp = Path(job.out), "bench", "run"
    config.vis = "tensorboard"
    config.logging.local_writer.enable = False
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    config.steps_per_save = 10**9
    config.machine.seed += job.seed_offset
    return steps


def first_step(config: Any) -> int:
    """Returns the step at which a run starts: the one after its checkpoint, or 0.

    Raises:
        CheckpointError: the checkpoint does not exist.
    """
    from f3rm_ext.engine import checkpoint

    path = config.load_checkpoint
    if path is None and config.load_dir is not None:
        folder = checkpoint.find_folder(config.load_dir, config.relative_model_dir)
        if config.load_step is not None:
            path = checkpoint.make_path(folder, config.load_step)
        else:
            path = next((path for _, path in checkpoint.newest_first(folder)), folder / "step-*.ckpt")
    if path is None:
        return 0
    step = checkpoint.parse_step(path)
    if step is None or not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path} to start from: give one named step-000002999.ckpt.")
    return step + 1


def recorded_first_step(config: Any) -> int | None:
    """Returns the step at which a finished run started, according to its config.yml; None if that does not tell."""
    from f3rm_ext.engine import checkpoint

    if config.load_checkpoint is not None:
        last = checkpoint.parse_step(config.load_checkpoint)
    else:  # a run with a folder, but without a step, loaded the checkpoint that was the newest then
        last = -1 if config.load_dir is None else config.load_step
    return None if last is None else last + 1


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(job: EvalJob) -> dict[str, Any]:
    """Evaluates a run as ns-eval does, and some of its training views.

    Returns values, conditions, cost (figures of its training), method, seed and origin.
    """
    from torch.utils._pytree import tree_leaves

    from f3rm_ext.engine import checkpoint
    from f3rm_ext.engine.config_file import read_config
    from f3rm_ext.engine.cost import MIB
    from f3rm_ext.engine.opening import open_run
    from f3rm_ext.engine.optimizers import schedule_length
    from f3rm_ext.ledger.conditions import capture_conditions, config_digest

    path = Path(job.config)
    first = recorded_first_step(read_config(path))  # opening a run changes its options of loading
    run = open_run(path, lambda config: True, "", step=job.eval_step - 1 if job.eval_step else None)
    config, pipeline = run.config, run.pipeline
    model: Any = pipeline.model
    evaluator = _ViewEvaluator(model)
    values = evaluator.mean_metrics(pipeline.datamanager.fixed_indices_eval_dataloader)  # type: ignore[union-attr]
    values["eval_peak_mib"] = evaluator.peak_mib
    train = evaluator.mean_metrics(list(_train_views(pipeline.datamanager, job.train_views)))
    values |= {f"train_{key}": train[key] for key in ("psnr", "ssim", "lpips", "l1") if key in train}
    values |= _gaussians(model)
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    values["parameters_mib"] = sum(sizes) / MIB
    moments = tree_leaves(checkpoint.load(run.checkpoint, needed=()).get("optimizers", {}))
    values["persistent_mib"] = (sum(sizes) + sum(getattr(leaf, "nbytes", 0) for leaf in moments)) / MIB
    conditions = {
        **capture_conditions(pipeline),
        **({} if first is None else {"first_step": first}),
        "last_step": run.step + 1,
        "eval_step": run.step + 1,
        "train_views": job.train_views,
        "device": config.machine.device_type,
    }
    return {
        "values": values,
        "conditions": conditions,
        "cost": evaluator.cost,
        "method": config.method_name,
        "seed": config.machine.seed,
        "origin": {"schedule_steps": schedule_length(config), "config": config_digest(config)},
    }


class _ViewEvaluator:
    """Renders views, compares them with their photos, and records the peak of memory in rendering."""

    def __init__(self, model: Any) -> None:
        self.model, self.peak_mib = model, 0.0
        self.cost: dict[str, float] = {}
        """Figures of the training, which our models report with their metrics."""

    def mean_metrics(self, views: Any) -> dict[str, float]:
        """Returns the mean of every metric over pairs of a camera and a batch."""
        import torch

        from f3rm_ext.engine.cost import peak_mib, reset_peak

        samples: dict[str, list[float]] = {}
        device = self.model.device
        for number, (camera, batch) in enumerate(views):
            reset_peak(device)
            with torch.no_grad():
                outputs = self.model.get_outputs_for_camera(camera)
                self.peak_mib = max(self.peak_mib, peak_mib(device))
                metrics, images = self.model.get_image_metrics_and_images(outputs, batch)
            if "l1" not in metrics and "img" in images:  # nerfstudio's own methods: photo and rendering side by side
                photo, rendering = torch.chunk(images["img"], 2, dim=1)
                metrics = {**metrics, "l1": float((photo - rendering).abs().mean())}
            for key, value in metrics.items():
                if key.startswith("train_"):
                    self.cost[key] = float(value)
                elif not key.startswith("eval_"):
                    samples.setdefault(key, []).append(float(value))
            report(number + 1, len(views))
        return {key: fmean(values) for key, values in samples.items()}


def _train_views(manager: Any, count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields camera and batch of some training views, spread evenly over all."""
    from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager
    from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader

    from f3rm_ext.data.eval_dataloaders import EvalLoader
    from f3rm_ext.utils.pictures import pick_evenly

    chosen = pick_evenly(len(manager.train_dataset), count)
    dataloader = manager.fixed_indices_eval_dataloader
    if isinstance(dataloader, EvalLoader):
        loader = type(dataloader)(manager.train_dataset, manager.device, lambda: None)
        yield from (loader.get_camera(index) for index in chosen)
    elif isinstance(manager, FullImageDatamanager):
        pictures = manager.cached_train  # this changes the cameras, because it undistorts
        cameras = manager.train_dataset.cameras.to(manager.device)
        yield from ((cameras[index : index + 1], dict(pictures[index])) for index in chosen)
    else:
        yield from FixedIndicesEvalDataloader(manager.train_dataset, tuple(chosen), manager.device, num_workers=0)  # type: ignore[arg-type]


def _gaussians(model: Any) -> dict[str, float]:
    """Number and mean opacity of splats, also nerfstudio's; empty for fields."""
    import torch

    parameters = getattr(model, "gauss_params", None)
    if parameters is None or "opacities" not in parameters:
        return {}
    opacities = parameters["opacities"].detach()
    return {"gaussian_count": float(len(opacities)), "mean_opacity": float(torch.sigmoid(opacities).mean())}
