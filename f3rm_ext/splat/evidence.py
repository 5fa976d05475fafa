"""Evidence that Gaussians belong to the scene: what the training views and the other Gaussians say of each of them.

One pass over the views gathers all of it. Nothing is decided here, so that other uses can weigh the same evidence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.confidence import TOLERANCE, agreement, ray_information
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.knn import NearestGaussians
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.sight import Sight, Truth, measure_sight
from f3rm_ext.splat.rendering import SplatScene, render

SEEN = 0.02
"""A view sees a Gaussian whose largest weight at a pixel is at least this: five steps of 255."""
NEIGHBOURS = 8
"""The isolation of a Gaussian is the distance to the neighbour of this number."""
OVERLAP = 2.0
"""Gaussians overlap whose centres are at most this many times the sum of their sizes apart."""

Photo = tuple[Float[Tensor, "h w 3"], Float[Tensor, "h w 1"] | None]
"""Colours of a view, 0 to 1, and weights of its pixels, 0 to 1; None for 1 everywhere."""


@dataclass(frozen=True)
class Evidence:
    """Evidence on each Gaussian; all tensors are on the CPU."""

    views: Int[Tensor, " gaussians"]
    """Number of training views that see it."""
    spread_rad: Float[Tensor, " gaussians"]
    """Spread of the directions from which these views see it: 0 for a single one, θ for two that are 2 θ apart."""
    contribution: Float[Tensor, " gaussians"]
    """Sum of its compositing weights over the pixels of all views."""
    peak: Float[Tensor, " gaussians"]
    """Largest compositing weight on any ray, 0 to 1."""
    free_views: Int[Tensor, " gaussians"]
    """Number of views that look through its centre: the median depth is clearly behind it."""
    surface_views: Int[Tensor, " gaussians"]
    """Number of views whose median depth agrees with its centre."""
    isolation: Float[Tensor, " gaussians"]
    """Distance to the eighth nearest centre, scene units."""
    size: Float[Tensor, " gaussians"]
    """Largest standard deviation, scene units."""
    gain: Float[Tensor, " gaussians"]
    """By how much the squared error of all photos would grow if it alone were missing; 0 without photos."""
    least_gain_near: Float[Tensor, " gaussians"]
    """Smallest gain of it and of those neighbours that overlap it, which would take its place."""
    information: Float[Tensor, "gaussians 3 3"]
    """What the views say together of the place of its centre; see :mod:`f3rm_ext.data.confidence`."""

    def __len__(self) -> int:
        return len(self.views)

    @property
    def refuted(self) -> Bool[Tensor, " gaussians"]:
        """Whether more views look through it than agree with it: a floater, which no photo has to show."""
        return (self.free_views >= 2) & (self.free_views > self.surface_views)


@torch.no_grad()
def gather_evidence(
    scene: SplatScene,
    views: PinholeCameras,
    photo: Callable[[int], Photo] | None = None,
    on_view: Callable[[], None] = lambda: None,
    watch: Callable[[Camera, Sight], None] = lambda camera, sight: None,
) -> Evidence:
    """Gathers the evidence of the training views.

    Args:
        scene: the Gaussians, without a 3D filter.
        photo: returns the photo of a view; without it, nothing is known of gains.
        watch: is given each view and what it shows.
    """
    shapes = scene.shapes().map(lambda value: value.detach().float().cpu())
    on_cpu = views.to("cpu")  # where sights are measured; pictures are drawn where the scene is
    size, total = shapes.sizes.amax(dim=1), _Totals(len(shapes.means))
    for index in range(len(views.viewmats)):
        one = slice(index, index + 1)
        camera = scene.camera(on_cpu.take(one))
        truth = None if photo is None else compare(scene, views.take(one), photo(index))
        sight = measure_sight(shapes, camera, truth)
        total.add_sight(shapes, camera, sight)
        watch(camera, sight)
        on_view()
    isolation, least_gain_near = look_around(shapes.means, size, total.gain)
    sums = vars(total)
    # Unit directions d that lie θ on both sides of a mean add up to a length of cos θ each.
    mean_length = sums.pop("directions").norm(dim=1) / total.views.clamp_min(1)
    spread_rad = mean_length.clamp(max=1).acos() * (total.views > 0)
    return Evidence(**sums, spread_rad=spread_rad, isolation=isolation, size=size, least_gain_near=least_gain_near)


class _Totals:
    """Sums and maxima over views, one value per Gaussian: those of :class:`Evidence`, and directions."""

    def __init__(self, count: int) -> None:
        self.views, self.free_views, self.surface_views = torch.zeros(3, count, dtype=torch.int32)
        self.contribution, self.peak, self.gain = torch.zeros(3, count)
        self.directions, self.information = torch.zeros(count, 3), torch.zeros(count, 3, 3)

    def add_sight(self, shapes: Ellipsoids, camera: Camera, sight: Sight) -> None:
        seen = sight.peaks >= SEEN
        self.views += seen
        self.contribution += sight.contributions
        self.peak = torch.maximum(self.peak, sight.peaks)
        self.gain += sight.gains
        own = shapes.means @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
        directions = functional.normalize(own, dim=1) @ camera.viewmat[:3, :3]
        self.directions += seen[:, None] * directions
        depth = median_depths(own, camera, sight.median_depth)
        self.free_views += (depth > 0) & (own[:, 2] < (1 - TOLERANCE) * depth)
        self.surface_views += (depth > 0) & ((own[:, 2] - depth).abs() <= TOLERANCE * depth)
        self.information += ray_information(directions, agreement(own[:, 2], depth))


def median_depths(
    points: Float[Tensor, "points 3"], camera: Camera, median_depth: Float[Tensor, "h w"]
) -> Float[Tensor, " points"]:
    """Returns the median depth of a view at the pixels of points; 0 outside the picture and where there is none.

    Args:
        points: in the camera's frame, OpenCV axes.
    """
    depths = points[:, 2]
    x, y = ((points @ camera.K.T)[:, :2] / depths[:, None]).unbind(1)
    inside = (depths > camera.near_plane) & (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
    medians = torch.zeros_like(depths)
    medians[inside] = median_depth[y[inside].long(), x[inside].long()]
    return medians


def compare(scene: SplatScene, view: PinholeCameras, photo: Photo | None = None) -> Truth:
    """Returns what one view shows beside its photo; without one, beside itself, so that every change counts."""
    gaussians = scene.gaussians
    degree = gaussians.sh_degree if scene.sh_degree is None else scene.sh_degree
    directions = gaussians.means - view.positions
    own = packed_sh_colors(degree, directions, gaussians.features_dc, gaussians.features_rest)
    picture = render(scene, view).rasterization.colors
    colors, share = (picture, None) if photo is None else photo
    return Truth(own.cpu(), picture.cpu(), colors.cpu(), None if share is None else share[..., 0].cpu())


def look_around(
    means: Float[Tensor, "gaussians 3"], size: Float[Tensor, " gaussians"], gain: Float[Tensor, " gaussians"]
) -> tuple[Float[Tensor, " gaussians"], Float[Tensor, " gaussians"]]:
    """Returns the distance from each centre to its eighth nearest neighbour, or to the last if there are fewer, and
    the smallest gain of it and of the neighbours that overlap it.

    Args:
        size: largest standard deviations.
    """
    near = NearestGaussians(means)(means, NEIGHBOURS + 1)
    apart = (means[near] - means[:, None]).norm(dim=2)
    overlapping = apart <= OVERLAP * (size[:, None] + size[near])
    return apart[:, -1], torch.where(overlapping, gain[near], gain[:, None]).amin(dim=1)
