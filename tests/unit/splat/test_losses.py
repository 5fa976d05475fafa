"""How a drawn picture is compared with the photo, by kernels of numba, or those of Triton in its interpreter."""

from collections.abc import Callable

import pytest
import torch

from f3rm_ext.splat import losses
from f3rm_ext.splat.losses import photometric_loss, ssim


@pytest.fixture(autouse=True)
def kernels(use_triton: Callable[..., None]) -> None:
    """Several programs in each direction."""
    use_triton(losses, COLUMNS=64)


def pair(side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(side, side, 3, generator=generator)
    return one, (one + 0.2 * torch.randn(side, side, 3, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("side", [8, 13])
def test_the_formula(side: int) -> None:
    """Images smaller than the window are compared by differences alone."""
    one, two = pair(side)
    expected = 0.8 * (one - two).abs().mean() + (0.2 * (1 - ssim(one, two)) if side > 8 else 0)
    torch.testing.assert_close(photometric_loss(one, two, None, 0.2), expected)
    assert float(photometric_loss(one, one, None, 0.2)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("size", "weight", "masked"),
    [
        ((30, 23), 0.2, True),
        ((11, 40), 1.0, False),
        ((8, 20), 0.2, True),
        ((5, 5), 1.0, False),
        ((5, 5), 1.0, True),
        ((16, 16), 0.0, False),
    ],
)
def test_the_kernels_agree_with_torch(size: tuple[int, int], weight: float, masked: bool) -> None:
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
        loss = photometric_loss(seen, two.to(dtype), mask, weight)
        (grad,) = torch.autograd.grad(3 * loss, predicted)
        results.append((loss.detach().float(), grad.float()))
    assert results[0][1].any() or size == (5, 5)
    for exact, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


def test_the_window_is_that_of_the_library() -> None:
    from pytorch_msssim import ssim as of_batch

    batch = [image.permute(2, 0, 1)[None] for image in pair(40)]
    assert torch.equal(ssim(*pair(40)), of_batch(*batch, data_range=1.0, win_size=11))
