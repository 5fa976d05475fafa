"""Options that cannot work, what splats need from the trainer and the machine, and advice when memory runs out."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.options import QualityImpact, RunState
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.model import SplatModelConfig


@pytest.fixture
def config(environment: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None], tmp_path: Path) -> F3rmTrainerConfig:
    """sugar-ext on a machine with eight GPUs, on which gsplat has kernels and CUDA has not started."""
    pretend_gpus(8)
    environment.setitem(sys.modules, "gsplat.cuda._backend", SimpleNamespace(_C=object()))
    config = make_splat_config("sugar-ext")
    config.machine.device_type = "cuda"
    config.output_dir, config.timestamp = tmp_path, "now"
    return config


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (DensifyOptions, "densify.every", 0),
        (DensifyOptions, "densify.max-gaussians", -1),
        (DensifyOptions, "densify.prune-opacity", 1.0),
        (DensifyOptions, "densify.start", -5),
        (MipOptions, "mip.variance-3d", 0.0),
        (MipOptions, "mip.near", -1.0),
        (MipOptions, "mip.every", 0),
        (MipOptions, "mip.margin", -0.1),
        (MipOptions, "mip.eps2d-mip", 0.0),
        (MemoryOptions, "reflective-above", 0.0),
        (SplatModelConfig, "sh-degree", 4),
        (SplatModelConfig, "num-random", 0),
        (SplatModelConfig, "sh-steps-per-degree", 0),
        (SplatModelConfig, "ssim-weight", 1.5),
        (SplatModelConfig, "ssim-weight", float("nan")),
        (SplatModelConfig, "near-plane", 0.0),
        (SplatModelConfig, "start-stage", "regularized"),
        (BoundModelConfig, "initial-opacity", 1.0),
        (BoundModelConfig, "normal-consistency", -1.0),
        (BoundModelConfig, "laplacian", -1.0),
        (BoundModelConfig, "free-beyond", 0.0),
        (BoundModelConfig, "sh-degree", 4),
    ],
)
def test_options_that_cannot_work(options: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} (is )?{value}\b"):
        options(**{name.rpartition(".")[2].replace("-", "_"): value})


@pytest.mark.parametrize("option", ["mixed_precision", "use_grad_scaler"])
def test_mixed_precision_is_turned_off_and_said(
    config: F3rmTrainerConfig, option: str, capsys: pytest.CaptureFixture
) -> None:
    setattr(config, option, True)
    config.check()
    assert not config.mixed_precision and not config.use_grad_scaler
    assert "Splats train in single precision" in capsys.readouterr().out
    config.check()
    assert "single precision" not in capsys.readouterr().out


def test_expandable_segments_are_asked_for_before_anything_is_built(config: F3rmTrainerConfig) -> None:
    config.check()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    config.pipeline.model.memory.optimize_memory = True  # type: ignore[attr-defined]
    config.check()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_expandable_segments_that_come_too_late_are_said(
    config: F3rmTrainerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config.pipeline.model.memory.expandable_segments = True  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("f3rm_ext.compat.set_cuda_allocator", lambda settings: False)
    config.check()
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in " ".join(capsys.readouterr().out.split())


def test_gsplat_without_kernels_is_refused_on_cuda_alone(
    config: F3rmTrainerConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gsplat.cuda._backend", SimpleNamespace(_C=None))
    with pytest.raises(ConfigError, match="no kernels"):
        config.save_config()
    assert not list(tmp_path.iterdir())
    config.pipeline.model.backend = "torch"  # type: ignore[attr-defined]
    config.check()
    config.pipeline.model.backend = "auto"  # type: ignore[attr-defined]
    config.machine.device_type = "cpu"
    config.check()


def advised(config: SplatModelConfig, device: str = "cuda", growing: bool = True) -> dict[str, tuple[object, object]]:
    options = config.memory_options(RunState(device, 9, gaussians=90_000, growing=growing))
    found = sorted(options, key=lambda option: option.quality_impact)
    return {option.name.removeprefix("pipeline.model."): (option.now, option.lower) for option in found}


def test_the_defaults_can_be_lowered_in_every_way() -> None:
    assert list(advised(SplatModelConfig(regularization="sdf")).items()) == [
        ("expandable-segments", ("False", "True")),
        ("fragmentation", ("auto", "aggressive")),
        ("optimize-memory", ("False", "True")),
        ("sh-moments", ("float32", "int8")),
        ("surface.samples", (1_000_000, 500_000)),
        ("sh-degree", (3, 2)),
        ("densify.max-gaussians", ("without limit, 90000 there", 72_000)),
    ]


def test_the_cpu_has_no_allocator_to_set() -> None:
    assert next(iter(advised(SplatModelConfig(), "cpu"))) == "optimize-memory"


def test_what_is_low_already_is_not_named() -> None:
    config = SplatModelConfig(
        sh_degree=0, regularization="none", memory=MemoryOptions(optimize_memory=True, fragmentation="aggressive")
    )
    assert advised(config, growing=False) == {}


@pytest.mark.parametrize(("step", "growing"), [(10, True), (90, False)])
def test_a_model_knows_whether_it_grows(make_splat_model: Any, begin_training: Any, step: int, growing: bool) -> None:
    model = make_splat_model()
    begin_training(model).before(step)
    options = [option.name for option in model.memory_options()]
    assert ("pipeline.model.densify.max-gaussians" in options) is growing
    assert all(option.quality_impact < QualityImpact.RESTART for option in model.memory_options())
