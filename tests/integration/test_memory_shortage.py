"""Memory that runs out in training, and the run that goes on as it is told to, on the CPU."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FAILING = """
import sys, torch
sys.argv = sys.argv[1:]
from nerfstudio.scripts.train import entrypoint
from f3rm_ext.engine.trainer import F3rmTrainer

train = F3rmTrainer.train

def train_on_a_full_device(trainer):
    model = trainer.pipeline.model
    loss_of = model.get_loss_dict

    def get_loss_dict(*arguments):
        if trainer.step == 7:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss_of(*arguments)

    model.get_loss_dict = get_loss_dict
    train(trainer)

F3rmTrainer.train = train_on_a_full_device
entrypoint()
"""
METHODS = {
    "f3rm-ext-lite": (
        *("--pipeline.datamanager.train-num-rays-per-batch", 256, "--pipeline.datamanager.features.extractors"),
        *("dense-daisy", "--pipeline.datamanager.features.cache-dir", "cache"),
    ),
    "sugar-ext-lite": (
        *("--pipeline.model.num-random", 500, "--pipeline.model.regularization", "none"),
        *("--pipeline.datamanager.num-downscales", 0),
    ),
}
RESUMED_WITH = {
    "f3rm-ext-lite": ("--pipeline.datamanager.train-num-rays-per-batch", "128"),
    "sugar-ext-lite": ("--pipeline.model.optimize-memory", "True"),
}


@pytest.mark.parametrize("method", METHODS)
def test_running_out_of_memory_is_one_sentence_and_the_run_goes_on_with_less(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path, method: str
) -> None:
    arguments = (
        *("ns-train", method, "--data", tiny_capture, "--output-dir", tmp_path, "--experiment-name", "e"),
        *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--machine.device-type", "cpu"),
        *("--max-num-iterations", 10, "--steps-per-save", 5, "--timestamp", "t"),
        *(tmp_path / part if part == "cache" else part for part in METHODS[method]),
    )
    done = run_command("python", "-c", FAILING, *arguments)
    assert done.code == 2, done.text[-3000:]
    assert "Traceback" not in done.text
    (error,) = (line for line in done.text.splitlines() if line.startswith("Error: "))
    assert error.startswith("Error: Memory ran out in training step 7 on cpu: ") and error.endswith(".")
    folder = tmp_path / "e" / method / "t" / "nerfstudio_models"
    assert [path.name for path in folder.iterdir()] == ["step-000000005.ckpt"]
    ways = re.findall(r"--([\w.-]+) (\S+)(?: --\S+ \S+)? \(now ", error)
    assert ways[0][0] == "pipeline.datamanager.train-num-images-to-sample-from"
    option, lower = RESUMED_WITH[method]
    assert (option.removeprefix("--"), lower) in ways

    found = re.search(r"`(.*)`", error)
    assert found
    program, name, *rest = shlex.split(found[1])
    assert (program, name) == ("ns-train", method) and str(folder) in rest
    rest[rest.index("t")] = "resumed"
    done = run_command("ns-train", method, *rest, option, lower).succeeds()
    last = tmp_path / "e" / method / "resumed" / "nerfstudio_models" / "step-000000009.ckpt"
    assert torch.load(last, weights_only=True, map_location="cpu")["step"] == 9
