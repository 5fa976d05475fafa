"""Some rows of a picture are those of the whole picture, in values and in gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize import Backend, rasterize


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("rows", [(0, 16), (16, 40), (32, 40), (0, 40)])
def test_rows(
    backend: Backend, rows: tuple[int, int], colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any]
) -> None:
    gaussians = colorful(80)
    view = PinholeCameras.of(ring_cameras()[2:3])
    K = view.Ks[0].clone()
    K[1, 2] = 26.0  # off the middle, so that the strip's own middle would be another
    values = torch.randn(80, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def draw(**options: Any) -> Any:
        return rasterize(
            *(gaussians.means, gaussians.quats, gaussians.sizes() * 3, gaussians.alphas(), values),
            *(view.viewmats[0], K, 32, 40),
            antialiased=True,
            backend=backend,
            **options,
        )

    whole, strip = draw(), draw(rows=rows)
    part = slice(*rows)
    assert strip.colors.shape == (rows[1] - rows[0], 32, 5) and whole.alpha[part].max() > 0.2
    torch.testing.assert_close(strip.colors, whole.colors[part], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(strip.depth, whole.depth[part], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(strip.alpha, whole.alpha[part], atol=1e-5, rtol=1e-4)
    upstream = torch.randn(strip.colors.shape, generator=torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(whole.colors[part], values, upstream)
    (found,) = torch.autograd.grad(strip.colors, values, upstream)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
