"""Whole steps of every method and regularisation on the pretended GPU: backward pass, optimisers, densification."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pretend.gsplat_kernels import gsplat_kernels
from pretend.small import CASES, SPLATS, STEPS, build, on_cuda
from pretend.tensors import pretended


@pytest.mark.parametrize(("method", "mode"), CASES)
def test_steps(method: str, mode: str, noise_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Steps with backward pass, optimisers, 3D filter and densification."""
    folder = tmp_path_factory.getbasetemp() / "features"
    splats = method in SPLATS
    with pretended("backward"), gsplat_kernels():
        run = build(method, mode, noise_capture, folder)
        for step in STEPS[mode] if splats else (0, 1):
            before = [parameter.detach().cpu() for parameter in run.model.parameters()]
            run.step(step)
            after = list(run.model.parameters())
            on_cuda(after)
            assert any(
                old.shape != new.shape or not torch.equal(old, new.detach().cpu())
                for old, new in zip(before, after, strict=True)
            )
        if splats:
            count = run.model.num_gaussians
            on_cuda(dict(run.model.gauss_params.items()))
            assert all(len(value) == count for value in run.model.gauss_params.values())
            assert run.model.filter_3d.shape == (count,)
            if mode == "none":
                assert count != 200, "no Gaussian was added or removed"


def _on_the_cpu(values: Any) -> Any:
    """A state as ``torch.load`` gives it, which nerfstudio has put on the CPU."""
    if isinstance(values, dict):
        return {key: _on_the_cpu(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_on_the_cpu(value) for value in values]
    return values.detach().cpu() if isinstance(values, torch.Tensor) else values


@pytest.mark.parametrize(("method", "mode"), [("f3rm-ext", "none"), ("sugar-ext", "none"), ("sugar-ext-lite", "none")])
def test_a_resumed_run_has_its_moments_on_the_gpu(
    method: str, mode: str, noise_capture: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "features"
    with pretended("backward"), gsplat_kernels():
        first = build(method, mode, noise_capture, folder)
        first.step(4001)
        saved = {name: _on_the_cpu(optimizer.state_dict()) for name, optimizer in first.optimizers.optimizers.items()}
        states = _on_the_cpu(first.model.state_dict())
        resumed = build(method, mode, noise_capture, folder)
        resumed.model.load_state_dict(states)
        resumed.optimizers.load_optimizers(saved)
        resumed.step(4002)
        for optimizer in resumed.optimizers.optimizers.values():
            for state in optimizer.state.values():
                on_cuda({name: value for name, value in state.items() if name != "step"})
