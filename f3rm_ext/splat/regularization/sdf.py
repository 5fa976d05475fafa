"""Random points near Gaussians, and losses at them: density, normals, and sdf.

The density loss compares the density with that of flat, opaque Gaussians on a surface. The sdf loss compares the
distance implied by the density with the distance to the rendered depth.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.regularization.field import NeighbourField
from f3rm_ext.splat.regularization.frames import rotate, to_camera
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.table import MAX_SQUARED

MAX_DENSITY = 1 - 1e-3
"""Upper limit of densities; there √(−2 log d) has the finite slope 22, while at 1 it is infinite."""
MIN_DENSITY = 1e-16
"""Lower limit of densities, a distance of 8.6 β."""
NEAR = 0.01
"""Points nearer to the camera are not usable, scene units."""


def sample_points(
    gaussians: Gaussians,
    visible: Bool[Tensor, " gaussians"],
    count: int,
    *,
    spread: float = 1.5,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, "points 3"], Int[Tensor, " points"]]:
    """Samples points p = μ + R (spread · s ⊙ ε), ε ~ N(0, I), of uniformly chosen Gaussians (SuGaR §4.1).

    Random numbers are drawn on the generator's own device, so a generator gives the same sample on every device.

    Args:
        gaussians: all Gaussians; only means, quats and scales are read.
        count: number of points; there are none if no Gaussian is visible.

    Returns:
        The points, part of the graph of means, rotations and sizes, and the index of each one's Gaussian, int64.
        Indices are ascending, so that memory access is local.
    """
    owners = visible.nonzero().squeeze(1)
    place = visible.device if generator is None else generator.device
    if len(owners):
        drawn = torch.randint(len(owners), (count,), generator=generator, device=place)
        owners = owners[drawn.to(visible.device).sort().values]
    # index_select: its gradient is far cheaper than that of indexing.
    means, quats, scales = (
        value.index_select(0, owners) for value in (gaussians.means, gaussians.quats, gaussians.scales)
    )
    noise = torch.randn(len(owners), 3, generator=generator, device=place, dtype=means.dtype).to(means.device)
    return means + rotate(spread * scales.exp() * noise, quats_to_rotations(quats)), owners


def look_up(
    image: Float[Tensor, "h w"], points: Float[Tensor, "points 3"], K: Float[Tensor, "3 3"]
) -> tuple[Float[Tensor, " points"], Bool[Tensor, " points"]]:
    """Interpolates an image where camera-frame points project (bilinear; pixel centres at +½); differentiable.

    Returns:
        Values, and a mask of usable points: in front of the camera, inside the image, with a finite value. Others
        are 0.
    """
    h, w = image.shape
    with torch.no_grad():
        ahead = points[:, 2] > NEAR
    z = torch.where(ahead, points[:, 2], 1)
    x = points[:, 0] / z * K[0, 0] + K[0, 2]
    y = points[:, 1] / z * K[1, 1] + K[1, 2]
    with torch.no_grad():
        inside = ahead & (x >= 0) & (x <= w) & (y >= 0) & (y <= h)
    where = torch.stack([2 * x / w - 1, 2 * y / h - 1], dim=-1)
    where = torch.where(inside[:, None], where, 0)
    finite = torch.isfinite(image)
    clean = torch.where(finite, image, 0)
    values = _bilinear(clean, where)
    if not bool(finite.all()):
        # A non-finite pixel makes exactly those points unusable that interpolate it.
        inside = inside & (_bilinear((~finite).to(image.dtype), where.detach()) == 0)
    return torch.where(inside, values, 0), inside


def _bilinear(image: Tensor, where: Tensor) -> Tensor:
    samples = functional.grid_sample(
        image[None, None], where[None, None], mode="bilinear", padding_mode="border", align_corners=False
    )
    return samples[0, 0, 0]


def view_deviations(
    means: Float[Tensor, "gaussians 3"],
    rotations: Float[Tensor, "gaussians 3 3"],
    sizes: Float[Tensor, "gaussians 3"],
    viewmat: Float[Tensor, "4 4"],
) -> Float[Tensor, " gaussians"]:
    """Returns standard deviations of Gaussians along the line from the camera to their centres, scene units."""
    position = -rotate(viewmat[:3, 3], viewmat[:3, :3].T)
    directions = functional.normalize(means - position, dim=1)
    own = rotate(directions, rotations.transpose(1, 2))
    return (own * sizes).norm(dim=1)


@torch.no_grad()
def near_depth(
    gaussians: Gaussians, visible: Bool[Tensor, " gaussians"], view: DepthView, *, sigmas: float = 2.0
) -> Bool[Tensor, " gaussians"]:
    """Returns visible Gaussians whose centres lie near the depth map: |z_map − z_g| < sigmas · σ, σ along the view."""
    seen = visible.nonzero().squeeze(1)
    means, quats, scales = (value[seen] for value in (gaussians.means, gaussians.quats, gaussians.scales))
    local = to_camera(means, view.viewmat)
    depth, usable = look_up(view.depth, local, view.K)
    deviations = view_deviations(means, quats_to_rotations(quats), scales.exp(), view.viewmat)
    near = usable & ((depth - local[:, 2]).abs() < sigmas * deviations)
    return torch.zeros_like(visible).index_fill(0, seen[near], True)


def implied_distance(density: Float[Tensor, " points"], beta: Float[Tensor, " points"]) -> Float[Tensor, " points"]:
    """Computes f = β √(−2 log d): the distance at which flat, opaque Gaussians have this density, scene units.

    Densities of 1 or more are divided by their own detached value. Overlapping Gaussians thus count as lying on the
    surface but still get a gradient, with the slope at :data:`MAX_DENSITY`.
    """
    scaled = density / density.detach().clamp_min(1)
    # Clamps the value but passes the gradient through.
    capped = scaled - (scaled - MAX_DENSITY).clamp_min(0).detach()
    return beta * (-2 * capped.clamp_min(MIN_DENSITY).log()).sqrt()


def sdf_loss(
    points: Float[Tensor, "points 3"],
    field: NeighbourField,
    view: DepthView,
    extent: float,
    *,
    unit: float = 0.1,
    most: float = 10.0,
) -> Float[Tensor, ""]:
    """Computes the mean of min(|f − |f̂|| / (unit · extent), most · extent), f̂ = z_map(p) − z(p) (SuGaR §4.1).

    Gradients flow through the density, the points and the depth map. Points without a value in the map do not count;
    the loss is 0 if none is left.

    Args:
        points: sampled from Gaussians :func:`near_depth`.
        view: its depth is over a background at the farthest depth: Σ w z + (1 − Σ w) z_max.
        extent: of the scene, scene units.
        unit: error that counts as 1, as a share of the extent.
        most: upper limit of the loss of a point, in units of the extent (applied to a plain number, as in SuGaR).
    """
    local = to_camera(points, view.viewmat)
    depth, usable = look_up(view.depth, local, view.K)
    error = (implied_distance(field.density, field.beta) - (depth - local[:, 2]).abs()).abs() / (unit * extent)
    error = torch.where(usable, error.clamp(max=most * extent), 0)
    return error.sum() / usable.sum().clamp_min(1)


def density_loss(points: Float[Tensor, "points 3"], field: NeighbourField) -> Float[Tensor, ""]:
    """Computes mean |d(p) − exp(−½ f̂² / β²)| (SuGaR §4.1); d is not clamped. 0 if there are no points.

    The exponential is the density of opaque, flat Gaussians of thickness β at the distance f̂ = ⟨p − μ_g, n_g⟩ of a
    point from the plane of its own Gaussian.
    """
    heights = ((points - field.center) * field.normal).sum(1)
    ideal = (-0.5 * (heights / field.beta).square().clamp(max=MAX_SQUARED)).exp()
    return (field.density - ideal).abs().sum() / max(1, len(points))


def normal_loss(field: NeighbourField) -> Float[Tensor, ""]:
    """Computes mean ‖n_g − n(p)‖² of a Gaussian's normal and the direction of its neighbours; 0 if there are no points.

    Gradients flow to the normals of the Gaussian and its neighbours. Signs do not matter, since neighbours are aligned.
    """
    return (field.normal - field.direction).square().sum() / max(1, len(field.normal))
