"""The initial Gaussians of a run: at the points of the capture, or at random points in view of the cameras."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.densify.free_space import FreeSpace
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh, sh_rest_count
from f3rm_ext.splat.mip import sampling_intervals
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours

ALPHA = 0.1
"""Initial opacity of every Gaussian."""
NEIGHBOURS = 3
"""The initial size of a Gaussian is its mean distance to this many neighbours."""
NEAREST, FARTHEST = 0.3, 10.0
"""Range of depths on rays, in units of the distance from the scene's centre to the farthest camera."""
FEWEST_POINTS = 100
"""A capture with fewer points starts from random points too."""
_LEAST_OUTSIDE = 0.9
"""Share of the points that lie outside the free space around the cameras, or else it is not known."""
_ROUNDS = 20


class InitialPoints(NamedTuple):
    """Centres and colours of the initial Gaussians."""

    means: Float[Tensor, "gaussians 3"]
    """Scene frame."""
    rgb: Float[Tensor, "gaussians 3"]
    """0 to 1."""
    described: str
    """Their number and origin, for the log."""
    random: bool
    """Whether any of them are at random places."""
    free_space: FreeSpace | None
    """Where none of them are; None if it is not known."""


def initial_points(
    points: tuple[Tensor, Tensor] | None,
    source: str,
    views: PinholeCameras | None,
    count_random: int,
    most: int,
    generator: torch.Generator,
    dense: int = 0,
    prune_near: float = 0.0,
) -> InitialPoints:
    """Chooses the points of the capture, and adds random ones if there are fewer than :data:`FEWEST_POINTS`.

    Args:
        points: positions (points, 3), scene frame, and colours, 0 to 255, of the capture's points; None for none.
        views: training cameras; without them random points fill the cube from −1 to 1.
        most: upper limit; a random subset is kept. 0 for no limit.
        dense: number of points, the last ones, that are spread evenly over the photos. Half of ``most`` are of these,
            if there are as many.
        prune_near: share of the distance from a camera to the nearest points, within which none are chosen.
    """
    count = 0 if points is None else len(points[0])
    parts: list[tuple[Tensor, Tensor]] = []
    free_space, outside = None, count
    if points is not None and count:
        means, rgb = points[0].cpu().float(), points[1].cpu().float() / 255.0
        if views is not None and prune_near and count >= FEWEST_POINTS:
            balls = FreeSpace.measure(views.to("cpu"), means, prune_near)
            kept = ~balls.holds(means)
            if int(kept.sum()) >= _LEAST_OUTSIDE * count:
                means, rgb, outside, free_space = means[kept], rgb[kept], int(kept.sum()), balls
                dense = int(kept[count - dense :].sum())
        parts.append((means, rgb))
    if count < FEWEST_POINTS:
        dense = 0  # The last ones are random then.
        if views is not None:
            random = random_points(views, count_random, generator)
        else:
            random = torch.rand(count_random, 3, generator=generator) * 2 - 1
        parts.append((random, torch.full((count_random, 3), 0.5)))
    means, rgb = (torch.cat(some) for some in zip(*parts, strict=True))
    if most and len(means) > most:
        own = len(means) - dense
        even = min(dense, max(most // 2, most - own))
        kept = torch.randperm(own, generator=generator)[: most - even]
        if even:
            kept = torch.cat([kept, own + torch.randperm(dense, generator=generator)[:even]])
        means, rgb = means[kept], rgb[kept]
    taken = f"{len(means)} of the {count}" if count > len(means) else f"the {count}"
    where = f"{taken} points of {source}" if count else "random points, as none are known"
    if 0 < count < FEWEST_POINTS:
        where += f" and at random points, as {count} are too few"
    described = f"Starting with {len(means)} Gaussians at {where}."
    if outside < count:
        described += f" {count - outside} others are nearer to a camera than prune-near allows."
    return InitialPoints(means, rgb, described, count < FEWEST_POINTS, free_space)


def random_points(views: PinholeCameras, count: int, generator: torch.Generator) -> Float[Tensor, "points 3"]:
    """Draws random points for a capture without points: half by :func:`points_seen_by_many` (the subject), half by
    :func:`points_on_rays` (everything around and behind it).

    Returns:
        Scene frame, on the CPU.
    """
    views = views.to("cpu")
    inside = points_seen_by_many(views, count - count // 2, generator)
    return torch.cat([inside, points_on_rays(views, count // 2, generator)])


def points_on_rays(views: PinholeCameras, count: int, generator: torch.Generator) -> Float[Tensor, "points 3"]:
    """Draws points on the rays of random pixels of random cameras, with a uniform logarithm of the depth.

    Every pixel gets as many points on average, so near and far things start with as many Gaussians per image area.
    Depths are along the optical axis, from :data:`NEAREST` to :data:`FARTHEST` times the distance of the farthest
    camera from the point nearest to all optical axes.

    Args:
        views: training cameras, on the CPU.
    """
    chosen = torch.randint(len(views.viewmats), (count,), generator=generator)
    sizes = torch.stack([views.widths, views.heights], dim=1)[chosen]
    pixels = torch.rand(count, 2, generator=generator) * sizes
    low, high = math.log(NEAREST), math.log(FARTHEST)
    depths = (low + (high - low) * torch.rand(count, generator=generator)).exp() * views.radius()
    pixels = torch.cat([pixels, torch.ones(count, 1)], dim=1)
    local = (torch.linalg.inv(views.Ks)[chosen] @ pixels[..., None])[..., 0] * depths[:, None]
    viewmats = views.viewmats[chosen]
    return (viewmats[:, :3, :3].transpose(1, 2) @ (local - viewmats[:, :3, 3])[..., None])[..., 0]


def points_seen_by_many(views: PinholeCameras, count: int, generator: torch.Generator) -> Float[Tensor, "points 3"]:
    """Draws random points in the ball that the cameras face, most of them in view of many cameras.

    The centre of the ball is the point nearest to all optical axes; the farthest camera lies on its surface. A point
    is drawn again if fewer than half as many cameras see it as see the best-seen point.

    Args:
        views: training cameras, on the CPU.
    """
    centre, radius = views.focus(), views.radius()
    kept, seen_most = [], 1.0
    for attempt in range(_ROUNDS):
        cube = (torch.rand(4 * count, 3, generator=generator) * 2 - 1) * radius
        points = centre + cube[cube.norm(dim=1) <= radius]
        seen = _count_views(points, views)
        if attempt == 0:
            seen_most = float(seen.max())
        # Later rounds accept points with fewer views, so that the loop ends.
        kept.append(points[seen >= 0.5 * 0.8**attempt * seen_most])
        if sum(map(len, kept)) >= count:
            break
    else:
        kept.append(points)
    return torch.cat(kept)[:count]


def _count_views(points: Tensor, views: PinholeCameras) -> Float[Tensor, " points"]:
    """Counts the cameras that see each point."""
    seen = torch.zeros(len(points))
    for index in range(len(views.viewmats)):
        seen += sampling_intervals(points, views.take(slice(index, index + 1)), near=1e-3, margin=0.0)[1]
    return seen


def initial_gaussians(
    means: Float[Tensor, "gaussians 3"],
    rgb: Float[Tensor, "gaussians 3"] | None,
    sh_degree: int,
    largest: float,
    generator: torch.Generator,
) -> Gaussians:
    """Creates isotropic, nearly transparent Gaussians.

    Args:
        means: centres, scene frame, on the CPU; at least one.
        rgb: colours, 0 to 1; grey if None.
        largest: upper limit of the standard deviations, scene units.
    """
    count = len(means)
    if count > 1:
        neighbours = nearest_neighbours(means, min(NEIGHBOURS + 1, count)).long()
        apart = (means[:, None] - means[neighbours.clamp_min(0)]).norm(dim=-1)
        distance = apart.sum(dim=1) / (apart.shape[1] - 1)
    else:
        distance = torch.full((1,), largest)
    sizes = distance.clamp(1e-5, largest)
    colors = torch.full((count, 3), 0.5) if rgb is None else rgb.float()
    return Gaussians(
        means=means.float(),
        scales=sizes.log()[:, None].repeat(1, 3),
        quats=torch.randn(count, 4, generator=generator),
        opacities=torch.full((count, 1), ALPHA).logit(),
        features_dc=rgb_to_sh(colors),
        features_rest=torch.zeros(count, sh_rest_count(sh_degree), 3),
    )
