"""Whole steps of every method and regularisation on the pretended GPU: backward pass, optimisers, densification."""

from pathlib import Path

import pytest
import torch
from pretend.gsplat_kernels import gsplat_kernels
from pretend.small import CASES, REFINEMENT, SPLATS, STEPS, build, on_cuda
from pretend.tensors import pretended


@pytest.mark.parametrize(("method", "mode"), CASES)
def test_steps(method: str, mode: str, noise_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Steps with backward pass, optimisers, 3D filter and densification; the first has the losses of the CPU."""
    folder = tmp_path_factory.getbasetemp() / "features"
    splats = method in SPLATS
    truth = build(method, mode, noise_capture, folder) if method in ("f3rm-ext", "sugar-ext", REFINEMENT) else None
    steps = STEPS[mode] if splats else (0, 1)
    expected = None
    if truth is not None:
        truth.before(steps[0])
        torch.manual_seed(1)
        expected = truth.losses(*truth.pipeline.datamanager.next_train(steps[0]))[1]
    with pretended("backward"), gsplat_kernels(exact=True):
        run = build(method, mode, noise_capture, folder)
        if expected is not None:
            run.before(steps[0])
            torch.manual_seed(1)
            found = run.losses(*run.pipeline.datamanager.next_train(steps[0]))[1]
            for name, value in expected.items():
                torch.testing.assert_close(found[name].detach().cpu(), value.detach(), rtol=2e-3, atol=1e-5, msg=name)
        for step in steps:
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
