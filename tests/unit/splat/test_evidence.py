"""Evidence on Gaussians in scenes made by hand: a ball that six cameras look at, and what hangs around it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.data.confidence import confidence, uncertainty
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.evidence import Evidence, gather_evidence, look_around
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import SplatScene, render

BALL = 200
"""Gaussians of the ball; those after them are what hangs around it."""
MIP = MipOptions(filter_3d=False)


def _ball(more: list[list[float]], alphas: list[float], sizes: list[float]) -> Gaussians:
    """An opaque grey ball of radius 0.4 around the origin, and red balls."""
    generator = torch.Generator().manual_seed(0)
    shell = 0.4 * torch.nn.functional.normalize(torch.randn(BALL, 3, generator=generator), dim=1)
    count = BALL + len(more)
    scales = torch.tensor([0.08] * BALL + sizes).log()[:, None].expand(-1, 3).contiguous()
    colors = torch.zeros(count, 3)
    colors[BALL:, 0] = 2.0
    return Gaussians(
        means=torch.cat([shell, torch.tensor(more).reshape(-1, 3)]),
        scales=scales,
        quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(count, 1),
        opacities=torch.logit(torch.tensor([0.95] * BALL + alphas))[:, None],
        features_dc=colors,
        features_rest=torch.zeros(count, 0, 3),
    )


@pytest.fixture
def views(ring_cameras: Callable[..., Any]) -> PinholeCameras:
    return PinholeCameras.of(ring_cameras())


def _gather(gaussians: Gaussians, views: PinholeCameras) -> Evidence:
    return gather_evidence(SplatScene(gaussians, MIP), views)


def test_views_look_through_a_floater_and_not_through_the_surface(views: PinholeCameras) -> None:
    before_camera = views.positions[0] * 0.5
    evidence = _gather(_ball([before_camera.tolist()], [0.3], [0.03]), views)
    assert evidence.free_views[BALL] >= 1
    assert evidence.surface_views[BALL] == 0
    assert confidence(evidence.information)[BALL] < 1e-3 < 0.2 < confidence(evidence.information)[:BALL].median()
    assert evidence.free_views[:BALL].sum() == 0, "the shell is where the rays end, or behind"
    assert (evidence.surface_views[:BALL] >= 1).float().mean() > 0.9, "all but some at the poles"


def test_what_no_view_shows_has_no_views(views: PinholeCameras) -> None:
    evidence = _gather(_ball([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]], [0.9, 0.9], [0.1, 0.01]), views)
    above, inside = BALL, BALL + 1
    for hidden in (above, inside):
        assert evidence.views[hidden] == 0
        assert evidence.peak[hidden] < 0.02
        assert evidence.spread_rad[hidden] == 0
        assert not evidence.information[hidden].any()
    assert evidence.isolation[above] > 8
    assert evidence.isolation[:BALL].max() < 0.4


def test_the_spread_of_two_views_is_half_the_angle_between_them(views: PinholeCameras) -> None:
    lone = _ball([[0.0, 0.0, 0.0]], [0.9], [0.1])[BALL:]
    two = views.take(slice(0, 2))
    ways = torch.nn.functional.normalize(two.positions, dim=1)
    expected = float(torch.acos(ways[0] @ ways[1])) / 2
    evidence = _gather(lone, two)
    assert evidence.views.item() == 2
    assert evidence.spread_rad.item() == pytest.approx(expected, abs=1e-3)
    least = 2 * math.sin(expected) ** 2  # of what two rays say along their mean
    assert confidence(evidence.information).item() == pytest.approx(least / (1 + least), abs=0.02)
    one = _gather(lone, views.take(slice(0, 1)))
    assert one.spread_rad.item() == pytest.approx(0, abs=1e-3)
    assert confidence(one.information).item() == pytest.approx(0, abs=1e-3), "one view tells no distance"
    assert 0.66 < uncertainty(one.information).item() < 0.7, "but two of three coordinates"


def test_a_gain_is_what_the_photos_would_lose_without_a_gaussian(views: PinholeCameras) -> None:
    gaussians = _ball([(views.positions[0] * 0.5).tolist()], [0.6], [0.05])
    gaussians.features_dc[:BALL] += torch.randn(BALL, 3, generator=torch.Generator().manual_seed(1))
    scene = SplatScene(gaussians, MIP, background=torch.tensor([0.1, 0.2, 0.3]))
    share = torch.rand(24, 32, 1, generator=torch.Generator().manual_seed(2))

    def draw(shown: SplatScene) -> Tensor:
        return torch.stack([render(shown, views.take(slice(i, i + 1))).rasterization.colors for i in range(6)])

    photos = draw(SplatScene(gaussians[:BALL], MIP))

    def errors(rows: Tensor) -> Tensor:
        drawn = draw(replace(scene, gaussians=gaussians[rows]))
        return (share * (drawn - photos).square()).sum(dim=(1, 2, 3))

    evidence = gather_evidence(scene, views, lambda index: (photos[index], share))
    everything = torch.arange(BALL + 1)
    for one in (BALL, 0, 1, 2, 3):
        grown = errors(everything[everything != one]) - errors(everything)
        assert evidence.gain[one] == pytest.approx(float(grown.sum()), rel=0.01, abs=1e-3)
    assert evidence.gain[BALL] < -0.1, "no photo shows it"
    assert evidence.gain[:4].abs().max() > 0.01
    masked = gather_evidence(scene, views, lambda index: (photos[index], torch.zeros_like(share)))
    assert not masked.gain.any()


def test_few_gaussians_have_the_neighbours_there_are() -> None:
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    size, gain = torch.tensor([0.3, 0.3, 0.3]), torch.tensor([2.0, 1.0, -1.0])
    apart, least = look_around(means, size, gain)
    assert apart.tolist() == [3.0, 2.0, 3.0]
    assert least.tolist() == [1.0, 1.0, -1.0], "the last one is too far away to stand in for others"
    assert look_around(means[:1], size[:1], gain[:1])[0].tolist() == [0.0]
