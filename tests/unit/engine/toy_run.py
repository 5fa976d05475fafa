"""A training run small enough for unit tests: nerfstudio's loop over one linear layer.

Imported by the fixtures of this folder, and run as a program (its ``main``) by tests that need a process to kill.
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from nerfstudio.configs.base_config import InstantiateConfig, LocalWriterConfig, LoggingConfig, MachineConfig
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from torch import nn

from f3rm_ext.engine.trainer import F3rmTrainer, F3rmTrainerConfig


class ToyData:
    """Draws from every random generator and has a cycle position of its own."""

    def __init__(self) -> None:
        self.train_dataset = [0]
        self.eval_dataset = None
        self.position = 0

    def get_train_rays_per_batch(self) -> int:
        return 4

    def next_train(self) -> torch.Tensor:
        self.position = (3 * self.position + 1) % 101
        noise = torch.rand(4, 3) + float(np.random.rand()) + random.random() + float(np.random.randn())
        return noise + self.position / 101

    def cycle_state(self) -> dict[str, Any]:
        return {"position": np.int64(self.position)}  # what a careless author might return

    def load_cycle_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class ToyModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)
        self.momentum = 0.0

    def get_extra_state(self) -> str:
        return str(self.momentum)

    def set_extra_state(self, state: str) -> None:
        self.momentum = float(state)


class ToyPipeline(nn.Module):
    def __init__(self, config: "ToyPipelineConfig", **_: Any) -> None:
        super().__init__()
        self.config = config
        self.model = ToyModel(config.width)
        self.datamanager = ToyData()
        self.losses: dict[int, float] = {}

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"fields": list(self.model.parameters())}

    def get_training_callbacks(self, _: Any) -> list:
        return []

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict, dict]:
        self.config.on_step(step)
        self.model.momentum = 0.5 * self.model.momentum + step
        value = self.model.layer(self.datamanager.next_train()).pow(2).mean() * (1 + 1e-3 * self.model.momentum)
        self.losses[step] = float(value.detach())
        return {}, {"loss": value}, {}

    def load_pipeline(self, state: dict[str, Any], step: int) -> None:
        self.load_state_dict(state)


@dataclass
class ToyPipelineConfig(InstantiateConfig):
    _target: type = field(default_factory=lambda: ToyPipeline)
    width: int = 2
    datamanager: Any = field(default_factory=lambda: SimpleNamespace(data=None))

    def on_step(self, step: int) -> None:
        """For tests to put something in."""


def make_config(output: Path, steps: int, **options: Any) -> F3rmTrainerConfig:
    """The options of a toy run; a new time stamp for each."""
    make_config.count += 1
    options.setdefault("steps_per_save", 4)
    options.setdefault("timestamp", f"run{make_config.count}")
    return F3rmTrainerConfig(
        output_dir=output,
        method_name="toy",
        max_num_iterations=steps,
        machine=MachineConfig(device_type="cpu"),
        pipeline=options.pop("pipeline", None) or ToyPipelineConfig(),  # type: ignore[arg-type]
        optimizers={
            "fields": {
                "optimizer": AdamOptimizerConfig(lr=1e-2),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-3, max_steps=20),
            }
        },
        logging=LoggingConfig(local_writer=LocalWriterConfig(enable=False), profiler="none"),
        vis="tensorboard",
        **options,
    )


make_config.count = 0


def run(config: F3rmTrainerConfig, seed: int = 42) -> F3rmTrainer:
    """What ns-train does, in this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--slow-write", action="store_true", help="announce the write of a checkpoint, then hang in it")
    options = parser.parse_args()
    if options.slow_write:
        save, saved = torch.save, []

        def save_half(state: Any, file: Any) -> None:
            save(state, file)
            saved.append(file)
            if len(saved) > 1:  # let the first checkpoint be
                file.truncate(file.tell() // 2)
                file.flush()
                print("writing", flush=True)
                time.sleep(60)

        torch.save = save_half
    run(make_config(options.output, options.steps, timestamp="killed"))
