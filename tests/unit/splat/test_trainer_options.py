"""What splats ask of the trainer's options before anything is built."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.splat_presets import make_splat_config


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> F3rmTrainerConfig:
    """sugar-ext on a machine with eight GPUs, on which gsplat has kernels and CUDA has not started."""
    monkeypatch.setattr("f3rm_ext.compat.has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "gsplat.cuda._backend", SimpleNamespace(_C=object()))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    config = make_splat_config("sugar-ext")
    config.machine.device_type = "cuda"
    config.output_dir, config.timestamp = tmp_path, "now"
    return config


@pytest.mark.parametrize("count", ["num_devices", "num_machines"])
def test_several_devices_are_refused(config: F3rmTrainerConfig, count: str, tmp_path: Path) -> None:
    setattr(config.machine, count, 2)
    with pytest.raises(ConfigError, match=r"2 devices were asked for.*use --machine.num-devices 1"):
        config.save_config()
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(ConfigError, match="gsplat has no kernels here"):
        config.save_config()
    assert not list(tmp_path.iterdir())
    config.pipeline.model.backend = "torch"  # type: ignore[attr-defined]
    config.check()
    config.pipeline.model.backend = "auto"  # type: ignore[attr-defined]
    config.machine.device_type = "cpu"
    config.check()
