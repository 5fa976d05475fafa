"""What a view shows of each Gaussian, against weights that the definition of the rasteriser composites."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Ellipsoids, Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.sight import measure_sight
from f3rm_ext.splat.rendering import SplatScene


def _weights(shapes: Ellipsoids, camera: Camera) -> tuple[Tensor, Tensor]:
    """Weights of all Gaussians at all pixels, (h, w, gaussians), and the accumulation."""
    drawn = rasterize(shapes, torch.eye(len(shapes.means)), camera, backend="torch")
    return drawn.colors, drawn.alpha


def _expected_medians(weights: Tensor, depths: Tensor) -> Tensor:
    order = depths.argsort()
    reached = weights[..., order].cumsum(dim=-1) >= 0.5
    first = depths[order][reached.int().argmax(dim=-1)]
    return torch.where(reached.any(dim=-1), first, 0.0)


def test_a_view_is_measured_as_the_definition_composites_it(
    colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any]
) -> None:
    gaussians = colorful(80)
    gaussians.scales += 0.8  # of several tiles, and in front of each other
    gaussians.opacities += 1.0
    gaussians.means[0] = torch.tensor([0.0, 0.0, 50.0])  # no view shows it
    scene = SplatScene(gaussians, MipOptions())
    view = PinholeCameras.of(ring_cameras()).take(slice(1, 2))
    shapes, camera = scene.shapes(), scene.camera(view)

    sight = measure_sight(shapes, camera)

    weights, alpha = _weights(shapes, camera)
    flat = weights.flatten(0, 1)
    assert torch.allclose(sight.contributions, flat.sum(dim=0), rtol=1e-4, atol=1e-5)
    assert torch.allclose(sight.peaks, flat.amax(dim=0), atol=1e-5)
    depths = (gaussians.means @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3])[:, 2]
    expected = _expected_medians(weights, depths)
    clear = (alpha - 0.5).abs() > 1e-3
    assert torch.allclose(sight.median_depth[clear], expected[clear], atol=1e-4)
    assert bool((expected == 0).any())
    assert bool((expected > 0).any())
    assert sight.peaks[0] == 0


def test_a_view_without_gaussians_shows_nothing(
    colorful: Callable[..., Gaussians], ring_cameras: Callable[..., Any]
) -> None:
    gaussians = colorful(3)
    gaussians.means[:, 2] = 50.0
    scene = SplatScene(gaussians, MipOptions())

    sight = measure_sight(scene.shapes(), scene.camera(PinholeCameras.of(ring_cameras()).take(slice(0, 1))))

    assert not sight.contributions.any()
    assert not sight.median_depth.any()
