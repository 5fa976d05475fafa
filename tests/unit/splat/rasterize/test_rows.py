"""What is composited from one projection, rows by rows, is the whole picture."""

from typing import Any

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import Backend, prepare, rasterize
from f3rm_ext.splat.rasterize.camera import Camera


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("antialiased", [False, True])
def test_rows(backend: Backend, antialiased: bool, colorful: Any, ring_cameras: Any) -> None:
    gaussians = colorful(80)
    view = PinholeCameras.of(ring_cameras()[2:3])
    K = view.Ks[0].clone()
    K[1, 2] = 26.0  # off the middle, so that the strip's own middle would be another
    values = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    shapes = Ellipsoids(gaussians.means, gaussians.quats, gaussians.sizes() * 3, gaussians.alphas())
    camera = Camera(view.viewmats[0], K, 32, 40, antialiased=antialiased)
    whole = rasterize(shapes, values, camera, backend=backend)
    strips = prepare(shapes, camera, backend)
    for rows in ((0, 16), (16, 40), (32, 40), (0, 40)):
        composite, part = strips(rows), slice(*rows)
        assert whole.alpha[part].max() > 0.2
        for channels in (slice(0, 5), slice(1, 2)):
            found = composite(values[:, channels])
            assert found.shape == (rows[1] - rows[0], 32, values[:, channels].shape[1]) and not found.requires_grad
            torch.testing.assert_close(found, whole.colors[part, :, channels], atol=1e-5, rtol=1e-4)
