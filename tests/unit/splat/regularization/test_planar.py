"""The regularisation ``planar``: its schedule, what it needs, its parts, what it removes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization import make_regularizer
from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.regularization.planar import edge_weights, thickness
from f3rm_ext.splat.regularization.regularizer import Needs, Regularizer

START = 2500
Make = Callable[..., Gaussians]
Losses = Callable[..., dict[str, Tensor]]


def planar(**options: Any) -> Regularizer:
    return make_regularizer(RegularizationOptions(mode="planar", **options))


def test_which_losses_when(wall: Make, losses_of: Losses) -> None:
    names = {"thickness", "plane_normals", "multiview", "patches"}
    for step, expected in [(0, set()), (START, set()), (START + 1, names), (14_999, names)]:
        assert set(losses_of(planar(), wall(), step)) == expected, step
    assert planar().needs(START) == Needs()
    assert planar().needs(START + 1) == Needs(planes=True, neighbour=True)


@pytest.mark.parametrize(
    ("off", "needs", "left"),
    [
        ({"multiview_factor": 0.0}, Needs(planes=True, neighbour=True), {"thickness", "plane_normals", "patches"}),
        ({"patch_factor": 0.0}, Needs(planes=True, neighbour=True), {"thickness", "plane_normals", "multiview"}),
        ({"multiview_factor": 0.0, "patch_factor": 0.0}, Needs(planes=True), {"thickness", "plane_normals"}),
        ({"plane_factor": 0.0}, Needs(planes=True, neighbour=True), {"thickness", "multiview", "patches"}),
        ({"plane_factor": 0.0, "multiview_factor": 0.0, "patch_factor": 0.0}, Needs(), {"thickness"}),
        ({"flat_factor": 0.0}, Needs(planes=True, neighbour=True), {"plane_normals", "multiview", "patches"}),
    ],
)
def test_parts_can_be_off(off: dict[str, float], needs: Needs, left: set[str], wall: Make, losses_of: Losses) -> None:
    reg = planar(**off)
    assert reg.needs(START + 1) == needs
    assert set(losses_of(reg, wall())) == left


def test_a_surface_that_all_agree_on_costs_nothing_but_thickness(wall: Make, losses_of: Losses) -> None:
    found = losses_of(planar(flat_factor=3.0), wall(thickness=0.05), extent=2.0)
    assert float(found["thickness"]) == pytest.approx(3 * 0.05 / 2, rel=1e-5)
    assert float(found["plane_normals"]) == pytest.approx(0, abs=1e-6)
    assert float(found["multiview"]) == pytest.approx(0, abs=1e-5)


def test_each_part_answers_to_its_own_error(wall: Make, losses_of: Losses) -> None:
    reg = planar(plane_factor=1.0, multiview_factor=1.0)
    turned = torch.tensor([0.6, 0.0, -0.8]).expand(30, 40, 3)
    share = 28 * 38 / 1200
    assert float(losses_of(reg, wall(), normals=turned)["plane_normals"]) == pytest.approx(0.2 * share, rel=1e-4)
    assert float(losses_of(reg, wall(), plane_depth=torch.full((30, 40), 10.5))["multiview"]) > 0.05
    nobody = torch.zeros(30, 40)
    for given in ({"alpha": nobody}, {"plane_depth": nobody}, {"mask": nobody.bool()}):
        found = losses_of(reg, wall(), normals=turned, **given)
        assert float(found["plane_normals"]) == 0 and float(found["multiview"]) == 0, given
    assert not {"multiview", "patches"} & set(losses_of(reg, wall(), other=None))


def test_edges_of_the_photo_weigh_less(wall: Make, losses_of: Losses) -> None:
    photo = torch.zeros(30, 40, 3)
    photo[:, 20:] = 1.0
    weights = edge_weights(photo)
    assert torch.equal(weights[5, 19:21], torch.zeros(2)) and bool((weights[5, [3, 17, 22, 38]] == 1).all())
    turned = torch.tensor([0.6, 0.0, -0.8]).expand(30, 40, 3)
    flat, edge = (losses_of(planar(), wall(), normals=turned, photo=p)["plane_normals"] for p in (0 * photo, photo))
    assert float(edge) == pytest.approx(float(flat) * 36 / 38, rel=1e-4)


def test_thickness_flattens_the_smallest_axis_alone(wall: Make) -> None:
    gaussians = wall(side=3)
    scales = gaussians.scales.clone().requires_grad_()
    visible = torch.arange(9) < 6
    moved = Gaussians.from_tensors({**gaussians.tensors(), "scales": scales})
    thickness(moved, visible, 1.0).backward()
    assert scales.grad is not None
    expected = torch.zeros(9, 3)
    expected[:6, 2] = 0.05 / 6
    torch.testing.assert_close(scales.grad, expected)
    assert float(thickness(moved, torch.zeros(9, dtype=torch.bool), 1.0).detach()) == 0
    with torch.no_grad():
        scales[0, 1] = torch.nan
    assert float(thickness(moved, visible, 1.0).detach()) == pytest.approx(0.05)


def test_nothing_is_flattened_below_the_3d_filter(wall: Make, losses_of: Losses) -> None:
    """It would turn transparent: the filter gives it its own thickness and lowers the opacity."""
    gaussians, filters = wall(side=3, thickness=0.05), torch.tensor([0.01, 0.04, 0.06]).repeat(3)
    scales = gaussians.scales.clone().requires_grad_()
    moved = Gaussians.from_tensors({**gaussians.tensors(), "scales": scales})
    found = losses_of(planar(flat_factor=2.0), moved, extent=2.0, filter_3d=filters)["thickness"]
    assert float(found.detach()) == pytest.approx(2 * (0.04 + 0.01 + 0) / 3 / 2, rel=1e-4)
    found.backward()
    assert scales.grad is not None and (scales.grad[:, 2] > 0).tolist() == [True, True, False] * 3


def test_hardly_anything_is_removed(wall: Make) -> None:
    gaussians = wall()
    gaussians.opacities[:10] = -5.0
    gaussians.opacities[10:30] = -1.0
    mask = planar().prune_mask(9001, gaussians)
    assert mask is not None and torch.equal(mask, torch.arange(81) < 10)
    assert planar().prune_mask(9000, gaussians) is None
    assert planar(planar_prune_opacity=0.0).prune_mask(9001, gaussians) is None
