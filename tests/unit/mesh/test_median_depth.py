"""Depth of two sheets of Gaussians, one in front of the other."""

import numpy as np
import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.median_depth import median_depth
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, render

MIP = MipOptions(filter_3d=False, filter_2d=False)


def sheets(*depths_and_alphas: tuple[float, float]) -> Gaussians:
    """Sheets across the view, each made of one wide, flat Gaussian."""
    count = len(depths_and_alphas)
    depths, alphas = torch.tensor(depths_and_alphas).T
    return Gaussians(
        means=torch.stack([torch.zeros(count), torch.zeros(count), depths], dim=1),
        scales=torch.tensor([[50.0, 50.0, 0.01]]).log().repeat(count, 1),
        quats=torch.tensor([[1.0, 0, 0, 0]]).repeat(count, 1),
        opacities=torch.logit(alphas)[:, None],
        features_dc=torch.zeros(count, 3),
        features_rest=torch.zeros(count, 0, 3),
    )


@pytest.fixture
def view() -> PinholeCameras:
    K = torch.tensor([[[20.0, 0, 8], [0, 20, 8], [0, 0, 1]]])
    side = torch.tensor([16], dtype=torch.int32)
    return PinholeCameras(torch.eye(4)[None], K, side, side)


@pytest.mark.parametrize(("front", "median"), [(0.8, 2.0), (0.3, 6.0)])
def test_the_median_is_on_a_sheet_where_the_mean_is_between(view: PinholeCameras, front: float, median: float) -> None:
    scene = SplatScene(sheets((2.0, front), (6.0, 0.999)), torch.zeros(2), MIP)
    mean = render(scene, view, 0, torch.zeros(3), RenderSettings()).outputs()["depth"][..., 0]
    assert 2.5 < float(mean[8, 8]) < 5
    found = median_depth(scene, view, mean, RenderSettings())
    np.testing.assert_allclose(found[4:12, 4:12], median, rtol=1e-3)


def test_nothing_has_no_depth(view: PinholeCameras) -> None:
    scene = SplatScene(sheets((-2.0, 0.9)), torch.zeros(1), MIP)
    assert (median_depth(scene, view, torch.zeros(16, 16), RenderSettings()) == 0).all()


def test_what_lies_beyond_the_bins_is_in_the_outer_ones(view: PinholeCameras) -> None:
    scene = SplatScene(sheets((3.0, 0.999), (500.0, 0.999)), torch.zeros(2), MIP)
    found = median_depth(scene, view, torch.full((16, 16), 3.0), RenderSettings())
    np.testing.assert_allclose(found[8, 8], 3.0, rtol=1e-3)
