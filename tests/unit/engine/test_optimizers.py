"""The fused optimiser and the decay over a run."""

import pytest
import torch

from f3rm_ext.engine.optimizers import FusedAdamOptimizerConfig, RunDecaySchedulerConfig


def test_fused_adam_equals_plain_adam() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(50), torch.randn(4, 50)
    results = []
    for make in (FusedAdamOptimizerConfig(lr=0.1).setup, lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-15)):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make([parameter])
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_without_a_fused_kernel_the_plain_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = torch.optim.Adam

    def refuse(params: list[torch.nn.Parameter], **options: object) -> torch.optim.Adam:
        if options.pop("fused", False):
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")
        return adam(params, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim, "Adam", refuse)
    optimizer = FusedAdamOptimizerConfig().setup([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, adam) and not optimizer.defaults["fused"]


@pytest.mark.parametrize(("given", "run", "expected"), [(0, 300, 300), (100, 300, 100)])
def test_decay_ends_with_the_run_unless_told_otherwise(given: int, run: int, expected: int) -> None:
    config = RunDecaySchedulerConfig(lr_final=1e-3, max_steps=given)
    config.fit(run)
    assert config.max_steps == expected
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=1e-2)
    scheduler = config.setup().get_scheduler(optimizer, lr_init=1e-2)
    for _ in range(expected):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
