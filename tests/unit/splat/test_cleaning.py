"""Decisions on evidence that is written by hand, and reasons that are withdrawn where they cost too much."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.cleaning import KEPT, Reason, decide, decide_in_rounds, withdraw
from f3rm_ext.splat.evidence import Evidence

USUAL: dict[str, Any] = {
    "views": 10,
    "spread_rad": 0.5,
    "contribution": 20.0,
    "peak": 0.5,
    "free_views": 0,
    "surface_views": 10,
    "isolation": 0.1,
    "size": 0.02,
    "least_gain_near": -10.0,
    "information": [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]],
}
NUMBERS = {reason: number for number, reason in enumerate(Reason)}


def _scene(*strange: dict[str, float]) -> Evidence:
    """Fifty usual Gaussians, worth 0.02 to the photos per unit of contribution, more or less; then strange ones."""
    count = 50
    usual = {"gain": [0.4 if index % 2 else -0.3 for index in range(count)]}
    columns = {}
    for field in fields(Evidence):
        values = usual.get(field.name) or [USUAL[field.name]] * count
        columns[field.name] = torch.tensor([*values, *(one.get(field.name, values[1]) for one in strange)])
    return Evidence(**columns)


def _changed(evidence: Evidence, change: Callable[[str, Tensor], Tensor]) -> Evidence:
    """Changes each field, of which it is given the name and the values."""
    return Evidence(**{name: change(name, value) for name, value in vars(evidence).items()})


SLIGHT, STRONG = ({"gain": -20 * harm, "least_gain_near": -20 * harm} for harm in (0.03, 0.2))
FAINT_CLOUD = {"size": 0.5, "views": 0, "spread_rad": 0.0, "peak": 0.012, "contribution": 200.0}


@pytest.mark.parametrize(
    ("reason", "strange"),
    [
        (Reason.OVERSIZED, {"size": 0.5, **SLIGHT}),
        (Reason.OVERSIZED, {**FAINT_CLOUD, "gain": -6.0, "least_gain_near": -6.0}),
        (Reason.FREE_SPACE, {"free_views": 4, "surface_views": 1, **SLIGHT}),
        (Reason.FEW_VIEWS, {"views": 3, "spread_rad": 0.01, **SLIGHT}),
        (Reason.ISOLATED, {"views": 1, "isolation": 2.0, "gain": 0.0}),
        (Reason.FAINT, {"peak": 0.001}),
        (Reason.AGAINST_PHOTOS, STRONG),
        (Reason.OVERSIZED, {"size": 0.5, "free_views": 4, "surface_views": 1, **STRONG}),  # the first of three
    ],
)
def test_each_kind_of_floater_has_its_reason(reason: Reason, strange: dict[str, float]) -> None:
    reasons = decide(_scene(strange))
    assert reasons[-1] == NUMBERS[reason]
    assert (reasons[:-1] == KEPT).all()


@pytest.mark.parametrize(
    "strange",
    [
        {"size": 0.5},  # a wall without texture
        {"free_views": 9, "surface_views": 1},  # glass
        {"free_views": 4, "surface_views": 4, **SLIGHT},  # the views do not agree on what they see
        {**STRONG, "contribution": 2000.0},  # as bad as usual for all that it shows
        {"views": 1, "spread_rad": 0.0},  # at the edge of the capture
        {"views": 1, "isolation": 2.0},  # far away, and one photo needs it
        {"views": 9, "isolation": 5.0, "gain": 0.0},  # far away, and in many photos
        SLIGHT,
        {**STRONG, "least_gain_near": -5.0},  # a worse one overlaps it
        {"size": 0.5, **SLIGHT, "least_gain_near": -5.0},  # the same: both may be bad only together
        {**FAINT_CLOUD, "gain": -1.0},  # no worse than others
        {"views": 0, "spread_rad": 0.0, "peak": 0.01, **SLIGHT},  # no view at all is not one view
    ],
)
def test_weak_evidence_alone_removes_nothing(strange: dict[str, float]) -> None:
    assert (decide(_scene(strange)) == KEPT).all()


def test_the_scene_itself_says_what_is_usual() -> None:
    scene = _scene({"size": 0.5, **SLIGHT}, {"views": 1, "isolation": 2.0, "gain": 0.0}, STRONG)
    scaled = {"size": 7.0, "isolation": 7.0, "gain": 0.01, "least_gain_near": 0.01}
    other = _changed(scene, lambda name, values: values * scaled.get(name, 1))
    assert decide(other).tolist() == decide(scene).tolist()
    assert (decide(scene)[-3:] != KEPT).all()


def test_a_scene_that_no_view_shows_is_decided() -> None:
    nothing = _changed(_scene(), lambda name, values: torch.zeros_like(values))
    assert set(decide(nothing).tolist()) == {NUMBERS[Reason.FAINT]}


def test_the_worst_go_first_and_what_they_hid_is_judged_without_them() -> None:
    asked = []

    def gather(rows: Tensor) -> Evidence:
        asked.append(len(rows))
        evidence = _scene({"gain": -20.0, "least_gain_near": -20.0}, STRONG) if len(rows) == 52 else _scene({})
        evidence.peak[7] = 0.0  # what is hidden may come to light, so this one goes last
        return _changed(evidence, lambda name, values: values[: len(rows)])

    reasons = decide_in_rounds(52, gather)
    assert asked == [52, 51, 51, 51]
    assert (reasons != KEPT).nonzero().flatten().tolist() == [7, 50], "51 was bad only beside 50"


def test_nothing_is_asked_of_no_gaussians() -> None:
    def gather(rows: Tensor) -> Evidence:
        evidence = _scene()
        evidence.peak[:] = 0.0
        return evidence

    assert (decide_in_rounds(50, gather) == NUMBERS[Reason.FAINT]).all()


def _costs(costs: dict[Reason, float], reasons: Tensor) -> Callable[[Tensor], float]:
    """A PSNR that each reason lowers from 30 dB by its cost."""

    def psnr(kept: Tensor) -> float:
        return 30.0 - sum(cost for reason, cost in costs.items() if not kept[reasons == NUMBERS[reason]].all())

    return psnr


@pytest.mark.parametrize(
    ("costs", "given_up", "after"),
    [
        ({Reason.FAINT: 0.02, Reason.ISOLATED: 0.02}, (), 29.96),
        ({Reason.FAINT: 0.01, Reason.ISOLATED: 0.3}, (Reason.ISOLATED,), 29.99),
        ({Reason.FAINT: 0.2, Reason.ISOLATED: 0.3}, (Reason.ISOLATED, Reason.FAINT), 30.0),
        ({Reason.FAINT: -0.5, Reason.ISOLATED: 0.3}, (), 30.2),
    ],
)
def test_the_costliest_reasons_are_withdrawn_until_little_is_lost(
    costs: dict[Reason, float], given_up: tuple[Reason, ...], after: float
) -> None:
    reasons = torch.tensor([KEPT, NUMBERS[Reason.FAINT], NUMBERS[Reason.ISOLATED], KEPT], dtype=torch.int8)
    left, withdrawn, psnr = withdraw(reasons, _costs(costs, reasons), 29.95)
    assert withdrawn == given_up
    assert psnr == pytest.approx(after)
    gone = {NUMBERS[reason] for reason in given_up}
    assert left.tolist() == [KEPT if number in gone else number for number in reasons.tolist()]
