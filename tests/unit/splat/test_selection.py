"""Which Gaussians an object is made of: shares of masks, and what was hidden."""

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat import selection
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import SplatScene
from f3rm_ext.splat.selection import HIDDEN_PX, MaskShares, lift_masks

LEFT, MIDDLE, RIGHT, BEHIND = range(4)
K = torch.tensor([[[60.0, 0, 40], [0, 60, 30], [0, 0, 1]]])


@pytest.fixture
def scene() -> SplatScene:
    """Opaque Gaussians on the left, in the middle and on the right, and a small one behind the left one."""
    means = torch.tensor([[-0.8, 0, 2], [0, 0, 2], [0.8, 0, 2], [-1.2, 0, 3]])
    sizes = torch.tensor([-1.8, -1.8, -1.8, -3.5])[:, None].expand(4, 3)
    quats = torch.tensor([[1.0, 0, 0, 0]]).expand(4, 4)
    opacities = torch.full((4, 1), 9.0)
    return SplatScene(Gaussians(means, sizes, quats, opacities, torch.zeros(4, 3), torch.zeros(4, 0, 3)), MipOptions())


def left_half(index: int) -> torch.Tensor:
    mask = torch.zeros(60, 80, 2, dtype=torch.bool)
    mask[:, :40, 0] = True
    mask[..., 1] = index == 0  # the whole first view
    return mask


def test_shares_are_of_the_weight_in_all_views(scene: SplatScene) -> None:
    """The second view is of a camera that has moved aside: the middle Gaussian is then in the left half."""
    viewmats = torch.eye(4).repeat(2, 1, 1)
    viewmats[1, 0, 3] = -0.8
    views = PinholeCameras(viewmats, K.repeat(2, 1, 1), torch.tensor([80, 80]), torch.tensor([60, 60]))
    shares, weights = lift_masks(scene, views, left_half)
    assert shares[LEFT, 0] > 0.99 and shares[MIDDLE, 0] == pytest.approx(0.75, abs=0.02)
    assert shares[RIGHT, 0] == pytest.approx(0.25, abs=0.02), "half of it in one of two views"
    assert shares[MIDDLE, 1] == pytest.approx(0.5, abs=0.03)
    assert weights[BEHIND] < HIDDEN_PX < weights[:BEHIND].min()


def test_what_comes_to_light_where_the_object_was_belongs_to_it(
    scene: SplatScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = MaskShares(torch.tensor([[0.9], [0.4], [0.4], [0.0]]), torch.tensor([500.0, 500, 0.1, 0.1]))
    rest = MaskShares(torch.tensor([[0.9], [0.9], [0.1]]), torch.tensor([500.0, 20, 20]))
    passes = iter((before, rest) * 2)
    monkeypatch.setattr(selection, "lift_masks", lambda *_: next(passes))
    views = PinholeCameras(torch.eye(4)[None], K, torch.tensor([80]), torch.tensor([60]))
    found = selection.choose_gaussians(scene, views, left_half, torch.ones(4, dtype=torch.bool))
    assert found.chosen.tolist() == [True, False, True, False], "not what was visible before or lies elsewhere"
    assert found.visible.tolist() == [True, False, False, False]
    found = selection.choose_gaussians(scene, views, left_half, torch.arange(4) < 2)
    assert found.chosen.tolist() == [True, False, False, False], "what may not belong to it"


def test_an_object_alone_ends_where_the_views_show_it() -> None:
    """What is hidden within it stays, what is hidden far behind it does not."""
    means = torch.tensor([[0.0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [0.5, 0.5, 9], [0.5, 0.5, 0.6]])
    chosen, visible = torch.tensor([1, 1, 1, 1, 0]).bool(), torch.tensor([1, 1, 0, 0, 0]).bool()
    assert selection.Chosen(chosen, visible, visible.float()).core(means).tolist() == [True, True, True, False, False]
    nothing = torch.zeros(5, dtype=torch.bool)
    assert not selection.Chosen(nothing, nothing, nothing.float()).core(means).any()
