"""Which Gaussians are floaters: each that goes has one reason, by evidence that is rare in its scene.

What the photos lose without a Gaussian is measured against what they lose without a usual one, per unit of its
contribution. Sizes and distances are measured against the medians of the scene. Evidence that is weak alone (a place in
free space, a large size, few views) counts only for Gaussians that the photos are better off without. Of Gaussians that
overlap, each may spoil the photos only because the others are there; so only the worst of them goes at a time.
"""

from collections.abc import Callable
from enum import Enum

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from f3rm_ext.splat.evidence import Evidence

ROUNDS = (4.0, 2.0, 1.0, 1.0)
"""Strictness of each round of decisions. Only the last removes what is not seen."""
KEPT = -1
"""Number of the reason of Gaussians that stay."""
_HARM = 4.0
"""Without these the photos gain this many times what they usually lose or gain by one Gaussian."""
_SLIGHT_HARM = 1.0
"""The same, where other evidence speaks against them."""
_OVERSIZED = 8.0
"""Medians of the size."""
_ISOLATED = 10.0
"""Medians of the isolation."""
_NEEDLESS = 0.1
"""The photos need it less than this many medians of what they would lose or gain by one Gaussian."""
_NARROW_RAD = 0.05
"""Views with less spread do not tell where something is."""
_FAINT = 1 / 255
"""No photo shows a smaller weight."""


class Reason(Enum):
    """Why a Gaussian is removed. Where several hold, the first counts."""

    OVERSIZED = "oversized"
    FREE_SPACE = "free_space"
    FEW_VIEWS = "few_views"
    ISOLATED = "isolated"
    FAINT = "faint"
    AGAINST_PHOTOS = "against_photos"


MEANINGS = {
    Reason.OVERSIZED: f"{_OVERSIZED:g} times as large as usual, and the photos fit better without it.",
    Reason.FREE_SPACE: "Most views look through its place, and the photos fit better without it.",
    Reason.FEW_VIEWS: "One view shows it, or several from almost one direction, and the photos fit better without it.",
    Reason.ISOLATED: f"{_ISOLATED:g} times as far from others as usual; one view shows it at most, no photo needs it.",
    Reason.FAINT: "On no ray of any view does it make up 1/255 of the colour.",
    Reason.AGAINST_PHOTOS: "The photos fit much better without it.",
}
"""A sentence on each reason, for people."""


def decide(evidence: Evidence, strictness: float = 1.0, *, unseen: bool = True) -> Int8[Tensor, " gaussians"]:
    """Returns the number of the first reason to remove each Gaussian, −1 where there is none.

    Args:
        strictness: how many times as much the photos must gain without a Gaussian before it goes.
        unseen: whether what is not seen goes. While there are floaters, they may hide it.
    """
    seen, shown = evidence.views > 0, evidence.peak >= _FAINT
    worth = torch.where(shown, evidence.gain / evidence.contribution.clamp_min(1e-12), 0)
    usual, usual_gain = (
        value[seen].abs().median() if bool(seen.any()) else value.new_zeros(()) for value in (worth, evidence.gain)
    )
    worst = evidence.gain <= evidence.least_gain_near
    slight, strong = (worst & (worth < -strictness * harm * usual) for harm in (_SLIGHT_HARM, _HARM))
    lone = (evidence.views < 2) & (evidence.isolation > _ISOLATED * evidence.isolation.median())
    tests = {
        Reason.OVERSIZED: slight & (evidence.size > _OVERSIZED * evidence.size.median()),
        Reason.FREE_SPACE: slight & evidence.refuted,
        Reason.FEW_VIEWS: slight & seen & (evidence.spread_rad < _NARROW_RAD),
        Reason.ISOLATED: unseen & lone & (evidence.gain <= _NEEDLESS * usual_gain),
        Reason.FAINT: unseen & (evidence.peak < _FAINT),
        Reason.AGAINST_PHOTOS: strong,
    }
    reasons = torch.full((len(evidence),), KEPT, dtype=torch.int8)
    for number, reason in reversed(list(enumerate(Reason))):
        reasons[tests[reason]] = number
    return reasons


def decide_in_rounds(count: int, gather: Callable[[Tensor], Evidence]) -> Int8[Tensor, " gaussians"]:
    """Decides once for each of ``ROUNDS``, each time by the evidence on those that are left.

    Floaters spoil the evidence on what is behind them. So the worst go first, and the others are judged without them.

    Args:
        gather: gathers the evidence on Gaussians of some indices, as if there were no others.
    """
    reasons = torch.full((count,), KEPT, dtype=torch.int8)
    for number, strictness in enumerate(ROUNDS, 1):
        rows = (reasons == KEPT).nonzero()[:, 0]
        if len(rows):
            reasons[rows] = decide(gather(rows), strictness, unseen=number == len(ROUNDS))
    return reasons


def withdraw(
    reasons: Int8[Tensor, " gaussians"], psnr: Callable[[Bool[Tensor, " gaussians"]], float], least_psnr: float
) -> tuple[Int8[Tensor, " gaussians"], tuple[Reason, ...], float]:
    """Gives up reasons, costliest first, until the picture is good enough.

    Args:
        reasons: as of :func:`decide`.
        psnr: measures the picture of the Gaussians that stay, dB.
        least_psnr: dB.

    Returns:
        The reasons that are left, those given up, and the PSNR with what is left.
    """
    after = psnr(reasons == KEPT)
    if after >= least_psnr:
        return reasons, (), after
    used = [number for number in range(len(Reason)) if bool((reasons == number).any())]
    alone = {number: psnr(reasons != number) for number in used}
    withdrawn = []
    for number in sorted(used, key=alone.__getitem__):
        withdrawn.append(list(Reason)[number])
        reasons = torch.where(reasons == number, KEPT, reasons)
        after = psnr(reasons == KEPT)
        if after >= least_psnr:
            break
    return reasons, tuple(withdrawn), after
