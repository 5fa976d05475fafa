"""Where to stand for the next photos: poses that would most lower the uncertainty of pictures like those taken.

People look at a scene as they photographed it, but from all around. So what counts is what the cameras of the capture
would show if they were turned about the vertical axis through the middle of the scene: a point has the share of these
pictures that shows it as its demand. Places to stand are drawn within the range of the cameras and at their heights.
One counts if two views at least look through it and it is no nearer to a surface than photos were taken. At each,
cameras look at Gaussians that are uncertain, and around. A camera is worth what it takes from the uncertainty
(:func:`~f3rm_ext.data.confidence.uncertainty`) of the points that it shows, by their demand: the mean drop over those
pictures (I-optimality; Pukelsheim 1993). The best is chosen, what it would say is added, and the others are judged
again: the greedy choice of next best views (Connolly, "The determination of next best views", 1985). A quarter of each
picture must show surface that is known by then: nothing else tells structure from motion where a photo was taken.

Pixels that show nothing are surface that no view saw, if the photos leave nothing empty themselves; points on a sphere
around the scene stand for it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Int, Int32
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.confidence import TOLERANCE, agreement, ray_information, uncertainty
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.evidence import Evidence, gather_evidence, median_depths
from f3rm_ext.splat.knn import NearestGaussians
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.sight import Sight, measure_sight
from f3rm_ext.splat.rendering import SplatScene

PLACES = 150
"""Places to stand that are tried."""
TARGETS = 3
"""Cameras at each place that look at something uncertain; one more looks around."""
USUAL = 120
"""Cameras of the capture that are turned about the middle of the scene."""
SIDE_PX = 160
"""Longest side of the pictures by which cameras are judged."""
SURVEY_PX = 640
"""Longest side of the pictures from which confidence is measured: it compares depth, not detail."""
_DRAWN = 20
"""Places that are drawn for each that is tried."""
_MARGIN = 0.1
"""Share of the range of the cameras by which places may lie outside it."""
_SOLID = 0.5
"""Opacity of what one cannot walk into."""
_EMPTY = 0.02
"""Captures whose photos show nothing in a larger share of their pixels have a sky, or objects before nothing."""
OVERLAP = 0.25
"""Least share of an advised picture that shows known surface."""
KNOWN = 0.5
"""Points are known whose uncertainty is less: that of three views from almost one direction."""
_UNSEEN_POINTS = 2000
_SEEN_PX = 0.01
_STEEPEST = 0.94
"""Sine of the steepest angle up or down at which a camera looks."""


class Survey(NamedTuple):
    """What the photos say of the Gaussians, and of places to stand."""

    evidence: Evidence
    """Without gains."""
    places: Float[Tensor, "places 3"]
    """Within reach of the cameras and at their heights; last those of ``usual``."""
    usual: PinholeCameras
    """Cameras of the capture, turned about the middle of the scene."""
    free_views: Int[Tensor, " places"]
    """Number of views that look through each place."""
    empty: float
    """Share of the pixels of the photos that show nothing."""


class NextView(NamedTuple):
    """A camera for the next photo."""

    camera: PinholeCameras
    """One, with the intrinsics of the nearest photo."""
    gain: float
    """By how much it lowers the mean uncertainty, 0 to 1, of pictures like those taken, after those before it."""


class _Reading(NamedTuple):
    """What a camera would say of the points that it shows; small, since hundreds are kept."""

    points: Int32[Tensor, " shown"]
    shares: Float[Tensor, " shown"]
    """Share of the picture that shows each."""
    weights: Float16[Tensor, " shown"]
    """Weight of the camera for the place of each."""
    position: Float[Tensor, "3"]

    def information(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "shown 3 3"]:
        """Returns the information that the camera adds about each point that it shows."""
        directions = functional.normalize(points[self.points] - self.position, dim=1)
        return ray_information(directions, self.weights.float())


def up_of(views: PinholeCameras) -> Float[Tensor, "3"]:
    """Returns the direction that is up in the photos, length 1."""
    return functional.normalize(-views.viewmats[:, 1, :3].mean(dim=0), dim=0)


@torch.no_grad()
def survey(scene: SplatScene, views: PinholeCameras, on_view: Callable[[], None] = lambda: None) -> Survey:
    """Measures what the photos say of Gaussians and of places to stand; on the CPU.

    Args:
        scene: the Gaussians, without a 3D filter.
    """
    views = views.to("cpu").shrink(SURVEY_PX)
    usual = _turn_cameras(views)
    places = torch.cat([_draw_places(views), usual.positions])
    free_views, empty_px = torch.zeros(len(places), dtype=torch.int32), [0, 0]

    def watch(camera: Camera, sight: Sight) -> None:
        own = places @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
        shown = median_depths(own, camera, sight.median_depth)
        free_views.add_((shown > 0) & (own[:, 2] < (1 - TOLERANCE) * shown))
        empty_px[0] += int((sight.median_depth == 0).sum())
        empty_px[1] += sight.median_depth.numel()

    evidence = gather_evidence(scene, views, on_view=on_view, watch=watch)
    return Survey(evidence, places, usual, free_views, empty_px[0] / max(empty_px[1], 1))


def _draw_places(views: PinholeCameras) -> Float[Tensor, "places 3"]:
    """Draws places over the ground that the cameras span, at the heights of cameras."""
    generator, count = torch.Generator().manual_seed(0), _DRAWN * PLACES
    up = up_of(views)
    heights = views.positions @ up
    flat = views.positions - heights[:, None] * up
    middle = flat.mean(dim=0)
    _, _, axes = torch.linalg.svd(flat - middle)
    along = (flat - middle) @ axes[:2].T
    low, high = along.amin(dim=0), along.amax(dim=0)
    reach = (high - low) * (1 + 2 * _MARGIN)
    drawn = (low + high) / 2 + reach * (torch.rand(count, 2, generator=generator) - 0.5)
    chosen = torch.randint(len(heights), (count,), generator=generator)
    return middle + drawn @ axes[:2] + heights[chosen, None] * up


def _turn_cameras(views: PinholeCameras) -> PinholeCameras:
    """Turns some of the cameras about the vertical axis through the middle of the scene, evenly spread."""
    generator, centre, up = torch.Generator().manual_seed(0), views.focus(), up_of(views)
    if ((centre - views.positions) * views.forward).sum(dim=1).median() <= 0:  # they look outwards
        centre = views.positions.mean(dim=0)
    chosen = views.take(torch.randint(len(views.widths), (USUAL,), generator=generator))
    angles = 2 * torch.pi * (torch.arange(USUAL) + torch.rand(USUAL, generator=generator)) / USUAL
    axes = [_turn(row, up, angles) for row in chosen.viewmats[:, :3, :3].unbind(1)]
    positions = centre + _turn(chosen.positions - centre, up, angles)
    return _place(torch.stack(axes, dim=1), positions, chosen)


@torch.no_grad()
def propose(
    scene: SplatScene,
    views: PinholeCameras,
    survey: Survey,
    places: int = PLACES,
) -> PinholeCameras:
    """Returns cameras where one could stand, some that look at uncertain Gaussians and some that look around.

    Args:
        places: number of places to stand; there are fewer where the photos leave no room.
    """
    generator = torch.Generator().manual_seed(0)
    views, gaussians, evidence = views.to("cpu"), scene.gaussians, survey.evidence
    means, alphas = gaussians.means.detach().float().cpu(), gaussians.alphas().detach().float().cpu()
    solid = (alphas > _SOLID) & ~evidence.refuted
    nearest = NearestGaussians(means[solid]) if bool(solid.any()) else None

    def clearances(points: Float[Tensor, "points 3"]) -> Float[Tensor, " points"]:
        if nearest is None:
            return torch.full((len(points),), torch.inf)
        return (means[solid][nearest(points, 1)[:, 0]] - points).norm(dim=1)

    least = clearances(views.positions).quantile(0.1)
    possible = (survey.free_views >= 2) & (clearances(survey.places) >= least)
    drawn = len(survey.places) - len(survey.usual.widths)
    stands = survey.places[:drawn][possible[:drawn]][:places]
    # Someone stood where the photos were taken.
    stands = torch.cat([stands, views.positions[torch.randperm(len(views.widths), generator=generator)[: places // 3]]])
    doubt = uncertainty(evidence.information) * evidence.size.square() * alphas * ~evidence.refuted
    aims = _targets(stands, means, doubt, generator)
    around = views.forward[torch.randint(len(views.widths), (len(stands),), generator=generator)]
    around = _turn(around, up_of(views), 2 * torch.pi * torch.rand(len(stands), generator=generator))
    forward = torch.cat([aims - stands[:, None], around[:, None]], dim=1).flatten(0, 1)
    aimed = _aim(stands.repeat_interleave(TARGETS + 1, dim=0), forward, views)
    usual = _aim(survey.usual.positions[possible[drawn:]], survey.usual.forward[possible[drawn:]], views)
    return PinholeCameras(*map(torch.cat, zip(aimed, usual, strict=True)))


def _targets(
    stands: Tensor, means: Tensor, doubt: Tensor, generator: torch.Generator
) -> Float[Tensor, "places targets 3"]:
    if not bool((doubt > 0).any()):
        doubt = torch.ones_like(doubt)
    # More than 2^24 cannot be drawn from at once.
    some = torch.randperm(len(means), generator=generator)[: 1 << 20]
    drawn = torch.multinomial(doubt[some], len(stands) * TARGETS, replacement=True, generator=generator)
    return means[some[drawn]].view(len(stands), TARGETS, 3)


def _turn(
    directions: Float[Tensor, "n 3"], axis: Float[Tensor, "3"], angle_rad: Float[Tensor, " n"]
) -> Float[Tensor, "n 3"]:
    """Rotates directions about an axis (Rodrigues)."""
    cos, sin = angle_rad.cos()[:, None], angle_rad.sin()[:, None]
    return (
        directions * cos
        + torch.cross(axis.expand_as(directions), directions, dim=1) * sin
        + (directions @ axis)[:, None] * axis * (1 - cos)
    )


def _aim(positions: Float[Tensor, "n 3"], directions: Float[Tensor, "n 3"], views: PinholeCameras) -> PinholeCameras:
    """Returns upright cameras with the intrinsics of the nearest photo; none that looks almost straight up or down."""
    up, forward = up_of(views), functional.normalize(directions, dim=1)
    kept = (forward @ up).abs() < _STEEPEST
    forward, positions = forward[kept], positions[kept]
    right = functional.normalize(torch.cross(forward, up.expand_as(forward), dim=1), dim=1)
    rotations = torch.stack([right, torch.cross(forward, right, dim=1), forward], dim=1)
    return _place(rotations, positions, views.take(torch.cdist(positions, views.positions).argmin(dim=1)))


def _place(
    rotations: Float[Tensor, "n 3 3"], positions: Float[Tensor, "n 3"], lenses: PinholeCameras
) -> PinholeCameras:
    """Returns cameras at places, with the intrinsics and sizes of others."""
    viewmats = torch.eye(4).repeat(len(positions), 1, 1)
    viewmats[:, :3, :3] = rotations
    viewmats[:, :3, 3] = -(rotations @ positions[:, :, None])[..., 0]
    return lenses._replace(viewmats=viewmats)


@torch.no_grad()
def choose(
    scene: SplatScene,
    views: PinholeCameras,
    survey: Survey,
    candidates: PinholeCameras,
    count: int,
    on_view: Callable[[], None] = lambda: None,
) -> list[NextView]:
    """Chooses cameras one after another, each by what it adds to those before it.

    Args:
        count: cameras to choose at most; fewer if no other adds anything.
        on_view: called after each candidate, and after each of the ``usual`` cameras.
    """
    shapes, evidence = scene.shapes().map(lambda value: value.detach().float().cpu()), survey.evidence
    unseen = _unseen_points(views.to("cpu"), shapes.means, evidence) if survey.empty <= _EMPTY else torch.zeros(0, 3)
    points = torch.cat([shapes.means, unseen])
    information = torch.cat([evidence.information, torch.zeros(len(unseen), 3, 3)])
    counts = torch.cat([~evidence.refuted, torch.ones(len(unseen), dtype=torch.bool)])

    def read(cameras: PinholeCameras) -> Iterator[_Reading]:
        small = cameras.to("cpu").shrink(SIDE_PX)
        for index, position in enumerate(small.positions):
            camera = scene.camera(small.take(slice(index, index + 1)))
            yield _read(points, counts, camera, position, measure_sight(shapes, camera))
            on_view()

    demand = torch.zeros(len(points))
    for reading in read(survey.usual):
        demand[reading.points] += reading.shares / len(survey.usual.widths)
    readings = list(read(candidates))
    chosen: list[NextView] = []
    left = set(range(len(readings)))
    while len(chosen) < count:
        gains = {index: _gain(information, demand, points, readings[index]) for index in left}
        best = max(gains, key=gains.__getitem__, default=-1)
        if best < 0 or gains[best] <= 0:
            break
        chosen.append(NextView(candidates.take(slice(best, best + 1)), gains[best]))
        information[readings[best].points] += readings[best].information(points)
        left.remove(best)
    return chosen


def _unseen_points(views: PinholeCameras, means: Tensor, evidence: Evidence) -> Float[Tensor, "points 3"]:
    """Points on a sphere (Fibonacci's lattice) around the scene, which stand for surface that no view saw."""
    centre, agreed = views.focus(), evidence.surface_views >= 2
    if not bool(agreed.any()):
        return torch.zeros(0, 3)
    away = (means[agreed] - centre).norm(dim=1)
    radius = away[torch.randperm(len(away), generator=torch.Generator().manual_seed(0))[: 1 << 20]].quantile(0.9)
    number = torch.arange(_UNSEEN_POINTS) + 0.5
    height, turn = 1 - 2 * number / _UNSEEN_POINTS, torch.pi * (1 + 5**0.5) * number
    ring = (1 - height.square()).sqrt()
    return centre + radius * torch.stack([ring * turn.cos(), ring * turn.sin(), height], dim=1)


def _read(points: Tensor, counts: Tensor, camera: Camera, position: Tensor, sight: Sight) -> _Reading:
    gaussians, pixels = len(sight.peaks), sight.median_depth.numel()
    own = points @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
    shown = median_depths(own, camera, sight.median_depth)
    weights = agreement(own[:, 2], shown)
    shares = torch.zeros(len(points))
    shares[:gaussians] = torch.where(sight.contributions > _SEEN_PX, sight.contributions / pixels, 0)
    empty = (median_depths(own, camera, (sight.median_depth == 0).float()) > 0)[gaussians:]
    share = float((sight.median_depth == 0).float().mean())
    shares[gaussians:], weights[gaussians:] = empty * share / empty.sum().clamp_min(1), 1.0
    rows = ((shares > 0) & (weights > 0) & counts).nonzero()[:, 0]
    return _Reading(rows.int(), shares[rows], weights[rows].half(), position)


def _gain(information: Tensor, demand: Tensor, points: Tensor, reading: _Reading) -> float:
    """Returns what a camera is worth; 0 if it shows too little that is known."""
    before = information[reading.points]
    uncertain = uncertainty(before)
    if reading.shares[uncertain < KNOWN].sum() < OVERLAP:
        return 0.0
    return float((demand[reading.points] * (uncertain - uncertainty(before + reading.information(points)))).sum())
