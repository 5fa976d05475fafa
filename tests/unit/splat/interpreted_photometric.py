"""Triton kernels of the photometric loss, interpreted; run by tests/cuda_contract/test_splat_triton.py."""

import pytest
import torch

from f3rm_ext.splat import losses, triton_photometric


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton for float32, in small programs."""
    chosen = {torch.float32: triton_photometric}
    monkeypatch.setattr(losses, "choose_kernels", lambda _, *tensors: chosen.get(tensors[0].dtype))
    monkeypatch.setattr(triton_photometric, "COLUMNS", 64)


@pytest.mark.parametrize(
    ("size", "weight", "masked"),
    [
        ((20, 23), 0.2, True),  # several programs each way
        ((11, 13), 1.0, False),
        ((8, 20), 0.2, True),
        ((5, 5), 1.0, False),
        ((12, 12), 0.0, False),
    ],
)
def test_values_and_gradients(size: tuple[int, int], weight: float, masked: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    one, two = (torch.rand(*size, 3, generator=generator) for _ in range(2))
    two[:, : size[1] // 2] = (one + 0.1 * two)[:, : size[1] // 2]  # part of it is alike
    two[:2] = one[:2]  # and some the same
    mask = torch.rand(*size, 1, generator=generator) > 0.3 if masked else None
    results = []
    for dtype in (torch.float64, torch.float32):
        predicted = one.to(dtype).requires_grad_()
        # As a rendering it is a part of more channels, and not contiguous.
        seen = torch.cat([predicted, predicted], dim=-1)[..., :3]
        loss = losses.photometric_loss(seen, two.to(dtype), mask, weight)
        (grad,) = torch.autograd.grad(3 * loss, predicted)
        results.append((loss.detach().float(), grad.float()))
    assert results[0][1].any() or size == (5, 5)
    for exact, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


def test_the_trial() -> None:
    triton_photometric.try_out(torch.device("cpu"))
