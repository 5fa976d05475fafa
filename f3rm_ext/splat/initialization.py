"""The Gaussians a run begins with: at the capture's points, or where cameras look."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh, sh_rest_count
from f3rm_ext.splat.mip import sampling_intervals
from f3rm_ext.splat.surface.neighbours import nearest_neighbours

ALPHA = 0.1
"""Opacity of every Gaussian at the beginning."""
NEIGHBOURS = 3
"""A Gaussian begins as large as its mean distance to so many neighbours."""
NEAREST, FARTHEST = 0.3, 10.0
"""Depths of places on rays, in distances of the farthest camera from the point they look at."""
FEWEST_POINTS = 100
"""A capture with fewer points begins at random places too."""
_ROUNDS = 20


class Places(NamedTuple):
    """Where a run begins."""

    means: Float[Tensor, "gaussians 3"]
    """Scene frame."""
    rgb: Float[Tensor, "gaussians 3"]
    """0 to 1."""
    described: str
    """For the log: how many, and from where."""


def first_places(
    points: tuple[Tensor, Tensor] | None,
    source: str,
    views: PinholeCameras | None,
    count_random: int,
    most: int,
    generator: torch.Generator,
) -> Places:
    """The capture's points, and random places where these are none or fewer than :data:`FEWEST_POINTS`.

    Args:
        points: of the capture, (points, 3), scene frame, and their colours, 0 to 255; None where it has none.
        source: what they are of, for the log.
        views: training cameras; without them random places fill the cube from −1 to 1.
        count_random: how many random places.
        most: so many at most, taken at random; 0 for no limit.
        generator: of the random numbers (CPU).
    """
    count = 0 if points is None else len(points[0])
    parts: list[tuple[Tensor, Tensor]] = []
    if points is not None and count:
        parts.append((points[0].cpu().float(), points[1].cpu().float() / 255.0))
    if count < FEWEST_POINTS:
        if views is not None:
            drawn = seen_places(views, count_random, generator)
        else:
            drawn = torch.rand(count_random, 3, generator=generator) * 2 - 1
        parts.append((drawn, torch.full((count_random, 3), 0.5)))
    means, rgb = (torch.cat(some) for some in zip(*parts, strict=True))
    if most and len(means) > most:
        kept = torch.randperm(len(means), generator=generator)[:most]
        means, rgb = means[kept], rgb[kept]
    taken = f"{most} of the {count}" if most and count > most else f"the {count}"
    where = f"{taken} points of {source}" if count else "random places, as there are no points of the capture"
    if 0 < count < FEWEST_POINTS:
        where += f" and at random places, as {count} are too few"
    return Places(means, rgb, f"Beginning with {len(means)} Gaussians at {where}.")


def seen_places(views: PinholeCameras, count: int, generator: torch.Generator) -> Float[Tensor, "points 3"]:
    """Random places for a capture that has no points: half of them :func:`seen_by_many` (the subject), and half
    :func:`on_rays` (everything behind it and around).

    Args:
        views: training cameras.
        count: how many places.
        generator: of the random numbers (CPU).

    Returns:
        Scene frame, on the CPU.
    """
    views = views.to("cpu")
    inside = seen_by_many(views, count - count // 2, generator)
    return torch.cat([inside, on_rays(views, count // 2, generator)])


def on_rays(views: PinholeCameras, count: int, generator: torch.Generator) -> Float[Tensor, "points 3"]:
    """Places on rays of random pixels of random cameras, at depths whose logarithm is uniform.

    So every pixel has as much in front of it, and far things begin with as many Gaussians for their size in the picture
    as near ones. Depths are along the optical axis, from :data:`NEAREST` to :data:`FARTHEST` times the distance of the
    farthest camera from the point that all look at.

    Args:
        views: training cameras, on the CPU.
        count: how many places.
        generator: of the random numbers (CPU).
    """
    chosen = torch.randint(len(views.viewmats), (count,), generator=generator)
    sizes = torch.stack([views.widths, views.heights], dim=1)[chosen]
    pixels = torch.rand(count, 2, generator=generator) * sizes
    low, high = math.log(NEAREST), math.log(FARTHEST)
    depths = (low + (high - low) * torch.rand(count, generator=generator)).exp() * _radius(views)
    pixels = torch.cat([pixels, torch.ones(count, 1)], dim=1)
    local = (torch.linalg.inv(views.Ks)[chosen] @ pixels[..., None])[..., 0] * depths[:, None]
    viewmats = views.viewmats[chosen]
    return (viewmats[:, :3, :3].transpose(1, 2) @ (local - viewmats[:, :3, 3])[..., None])[..., 0]


def _radius(views: PinholeCameras) -> float:
    """Distance of the farthest camera from the point nearest to all optical axes, scene units."""
    return float((views.positions - _nearest_to_axes(views)).norm(dim=1).max().clamp_min(1e-3))


def seen_by_many(
    views: PinholeCameras, count: int, generator: torch.Generator, share: float = 0.5
) -> Float[Tensor, "points 3"]:
    """Random places in the ball that the cameras look at, most of them seen by a good share of the cameras.

    The ball's centre is the point nearest to all optical axes; it reaches to the farthest camera.

    Args:
        views: training cameras.
        count: how many places.
        generator: of the random numbers (CPU).
        share: places seen by fewer than this share of the cameras that see the most seen place are drawn again.

    Returns:
        Scene frame, on the CPU.
    """
    views = views.to("cpu")
    centre, radius = _nearest_to_axes(views), _radius(views)
    kept, seen_most = [], 1.0
    for attempt in range(_ROUNDS):
        cube = (torch.rand(4 * count, 3, generator=generator) * 2 - 1) * radius
        points = centre + cube[cube.norm(dim=1) <= radius]
        seen = _count_views(points, views)
        if attempt == 0:
            seen_most = float(seen.max())
        # Later rounds are less choosy, so that there is an end to it.
        kept.append(points[seen >= share * 0.8**attempt * seen_most])
        if sum(map(len, kept)) >= count:
            break
    else:
        kept.append(points)
    return torch.cat(kept)[:count]


def _nearest_to_axes(views: PinholeCameras) -> Float[Tensor, "3"]:
    """The point with the least sum of squared distances from the optical axes."""
    away = torch.eye(3) - views.forward[:, :, None] * views.forward[:, None, :]
    matrix = away.sum(dim=0) + 1e-6 * len(away) * torch.eye(3)  # Parallel axes meet nowhere: near the cameras then.
    mean = views.positions.mean(dim=0)
    right = (away @ (views.positions - mean)[..., None]).sum(dim=0)[:, 0]
    return mean + torch.linalg.solve(matrix, right)


def _count_views(points: Tensor, views: PinholeCameras) -> Float[Tensor, " points"]:
    """By how many cameras each point is seen."""
    seen = torch.zeros(len(points))
    for index in range(len(views.viewmats)):
        one = PinholeCameras(*(part[index : index + 1] for part in views))
        seen += sampling_intervals(points, *one, near=1e-3, margin=0.0)[1]
    return seen


def initial_gaussians(
    means: Float[Tensor, "gaussians 3"],
    rgb: Float[Tensor, "gaussians 3"] | None,
    sh_degree: int,
    largest: float,
    generator: torch.Generator,
) -> Gaussians:
    """Round, half transparent Gaussians at given places.

    Args:
        means: their centres, scene frame, CPU.
        rgb: their colours, 0 to 1; grey where there are none.
        sh_degree: of the colours, 0 to 3.
        largest: standard deviations do not exceed this, scene units.
        generator: of the rotations (CPU).

    Raises:
        ConfigError: there are none.
    """
    count = len(means)
    if not count:
        raise ConfigError("There is no Gaussian to begin with: the capture's points are empty, so leave them out.")
    if count > 1:
        found = nearest_neighbours(means, min(NEIGHBOURS + 1, count)).long()
        apart = (means[:, None] - means[found.clamp_min(0)]).norm(dim=-1)
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
