"""Trains one registered method in this process and prints what it cost, as one line of JSON.

Used by the other benchmarks, each run in a process of its own so that neither memory nor threads carry over.
"""

import ast
import copy
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from processes import report_result

from f3rm_ext.engine.cost import peak_mib


def measured_config(
    config: Any, data: Path, folder: Path, *, steps: int, scale: float, device: str, seed: int = 42
) -> Any:
    """Returns a copy of a method's options for a run that only trains: no evaluation, viewer, log or checkpoint."""
    config = copy.deepcopy(config)
    config.output_dir, config.timestamp = folder, "run"
    config.data = config.pipeline.datamanager.data = data
    config.max_num_iterations, config.vis = steps, "tensorboard"
    config.machine.device_type, config.machine.seed = device, seed
    config.logging.local_writer.enable = False
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    config.steps_per_save = 10**9
    config.pipeline.datamanager.camera_res_scale_factor = scale
    return config


@dataclass
class TrainOnce:
    """Trains one method for a number of steps."""

    method: str
    """Registered name, e.g. `nerfacto` or `f3rm-ext-lite`."""
    data: Path
    """A capture with a transforms.json."""
    output_dir: Path
    """Where the run folder goes."""
    steps: int = 800
    """Steps at most."""
    rays: int = 0
    """Rays per step; 0 keeps the method's default."""
    scale: float = 0.25
    """Factor on the image size."""
    seed: int = 42
    """Random seed."""
    change: tuple[str, ...] = ()
    """Changes to the config, each as `dotted.path=python literal`, e.g. `pipeline.model.num_samples=48`."""
    extractors: tuple[str, ...] | None = None
    """Features to distil, for our methods; none given keeps the method's default."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train. nerfacto takes its torch implementation, on CUDA tiny-cuda-nn where that is installed."""

    def make_config(self) -> Any:
        """Returns the trainer's configuration.

        Raises:
            SystemExit: a change names no option.
        """
        from nerfstudio.configs.method_configs import all_methods
        from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

        peer = self.method == "nerfacto-f3rm"
        config: Any = all_methods["nerfacto" if peer else self.method]
        ours = self.method.startswith(("f3rm-ext", "sugar-ext"))
        if peer:
            from peers import f3rm_peer

            config = f3rm_peer(copy.deepcopy(config))
        config = measured_config(
            config, self.data, self.output_dir, steps=self.steps, scale=self.scale, device=self.device, seed=self.seed
        )
        if self.rays:
            config.pipeline.datamanager.train_num_rays_per_batch = self.rays
        if not ours:
            config.pipeline.model.implementation = "torch" if self.device == "cpu" else "tcnn"
        if not ours and not peer:
            config.pipeline.datamanager.dataparser = NerfstudioDataParserConfig()
        elif self.extractors is not None:
            config.pipeline.datamanager.features.extractors = self.extractors
        for change in self.change:
            path, value = change.split("=", 1)
            *parents, last = path.split(".")
            owner = functools.reduce(getattr, parents, config)
            if not hasattr(owner, last):
                raise SystemExit(f"There is no option {path}.")
            setattr(owner, last, ast.literal_eval(value))
        config.set_timestamp()
        return config

    def main(self) -> None:
        """Trains, and prints the result."""
        from nerfstudio.scripts.train import _set_random_seed

        config = self.make_config()
        config.save_config()
        _set_random_seed(self.seed)
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()

        durations: list[float] = []
        cpu_durations: list[float] = []
        inner = trainer.train_iteration

        def timed(step: int):
            begin, cpu_begin = time.perf_counter(), time.process_time()
            result = inner(step)
            durations.append(time.perf_counter() - begin)
            cpu_durations.append(time.process_time() - cpu_begin)
            return result

        trainer.train_iteration = timed
        started = time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - started
        rays = trainer.pipeline.datamanager.get_train_rays_per_batch()
        first = min(20, len(durations) // 2)
        q1, median, q3 = statistics.quantiles(durations[first:], n=4)
        parameters = getattr(trainer.pipeline.model, "gauss_params", None)
        cpu_median = statistics.median(cpu_durations[first:])
        report_result(
            {
                "method": self.method,
                "steps": len(durations),
                "rays_per_step": rays,
                "train_s": round(wall, 2),
                "step_ms_median": round(1e3 * median, 2),
                "step_ms_q1": round(1e3 * q1, 2),
                "step_ms_q3": round(1e3 * q3, 2),
                "rays_per_s": round(rays / median, 1),
                "step_cpu_ms_median": round(1e3 * cpu_median, 2),
                "train_cpu_s": round(sum(cpu_durations), 2),
                "rays_per_cpu_s": round(rays / cpu_median, 1),
                "peak_rss_mib": round(peak_mib(torch.device("cpu"))),
                "threads": torch.get_num_threads(),
                "config": str(config.get_base_dir() / "config.yml"),
                **({} if parameters is None else {"gaussians": len(parameters["means"])}),
            }
        )


if __name__ == "__main__":
    tyro.cli(TrainOnce).main()
