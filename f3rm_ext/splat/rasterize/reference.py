"""The definition of the rasteriser, written for readability: plain torch, any device, float32 or float64.

3D Gaussian splatting (Kerbl et al. 2023) with the conventions of gsplat 1.4: pixel centres at half-integers, opacities
clamped at 0.999 and skipped below 1/255, compositing that ends before the transmittance would fall to 1e-4, and
Gaussians cut off at the 16 × 16 pixel tiles that the square of three standard deviations touches. Every pixel visits
every Gaussian, so time and memory grow with their product; it is meant for tests and small images. The numba kernels
and gsplat must agree with it.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids, quats_to_rotations
from f3rm_ext.splat.rasterize.camera import (
    MARGIN,
    MAX_ALPHA,
    MAX_RADIUS_PX,
    MIN_ALPHA,
    MIN_COMPENSATION,
    MIN_EXTENT,
    MIN_TRANSMITTANCE,
    TILE_PX,
    Camera,
    Composite,
    Projection,
)

CHUNK = 1 << 20
"""Pairs of pixels and Gaussians per chunk."""


def _footprints(
    shapes: Ellipsoids, camera: Camera
) -> tuple[Float[Tensor, "gaussians 2"], Float[Tensor, " gaussians"], Float[Tensor, "gaussians 2 2"]]:
    """Returns centres, depths and covariances, by a local affine approximation (Zwicker et al. 2001, eq. 24–31)."""
    rotation, translation = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
    (fx, _, cx), (_, fy, cy), _ = camera.K.unbind(0)
    width, height = camera.width, camera.height
    x, y, z = (shapes.means @ rotation.T + translation).unbind(-1)
    # The Jacobian is taken at the centre, clamped to a slightly larger image.
    x_over_z = torch.clamp(x / z, -(cx + MARGIN * width) / fx, (width - cx + MARGIN * width) / fx)
    y_over_z = torch.clamp(y / z, -(cy + MARGIN * height) / fy, (height - cy + MARGIN * height) / fy)
    zero = torch.zeros_like(z)
    jacobian = torch.stack([fx / z, zero, -fx * x_over_z / z, zero, fy / z, -fy * y_over_z / z], dim=-1)
    axes = jacobian.reshape(-1, 2, 3) @ rotation @ (quats_to_rotations(shapes.quats) * shapes.sizes[:, None, :])
    return torch.stack([fx * x / z + cx, fy * y / z + cy], dim=-1), z, axes @ axes.transpose(-1, -2)


@torch.no_grad()
def _radii(shapes: Ellipsoids, camera: Camera) -> Int[Tensor, " gaussians"]:
    """Returns the radius of each Gaussian; 0 if it is culled."""
    means2d, depths, covariances = _footprints(shapes, camera)
    xx, xy, yy = _add_blur(covariances, camera.eps2d)
    det, middle = xx * yy - xy**2, (xx + yy) / 2
    radii = (3.0 * (middle + (middle**2 - det).clamp(min=MIN_EXTENT).sqrt()).sqrt()).ceil()
    drawn = (depths > camera.near_plane) & (det > 0) & (radii <= MAX_RADIUS_PX)
    size, reach = torch.tensor([camera.width, camera.height], device=radii.device), radii[:, None]
    touches = (means2d + reach > 0) & (means2d - reach < size)
    return torch.where(drawn & touches.all(dim=-1), radii, 0.0).int()


def _add_blur(covariances: Float[Tensor, "gaussians 2 2"], eps2d: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the entries xx, xy, yy after the blur."""
    return covariances[:, 0, 0] + eps2d, covariances[:, 0, 1], covariances[:, 1, 1] + eps2d


def project(shapes: Ellipsoids, camera: Camera) -> Projection:
    """Projects Gaussians to the image and culls those outside."""
    radii = _radii(shapes, camera)
    # Only rendered Gaussians enter the graph, so that no gradient is ever 0 · ∞.
    drawn = radii.nonzero().squeeze(-1)
    means2d, depths, covariances = _footprints(shapes.map(lambda value: value[drawn]), camera)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(radii), *values.shape[1:]).index_copy(0, drawn, values)

    xx, xy, yy = _add_blur(covariances, camera.eps2d)
    det, alphas = xx * yy - xy**2, shapes.alphas
    if camera.antialiased:
        # √(det before / det after adding eps2d), so that the blur adds no light.
        ratio = (covariances[:, 0, 0] * covariances[:, 1, 1] - covariances[:, 0, 1] ** 2) / det
        thick = ratio > MIN_COMPENSATION**2
        alphas = alphas * spread(torch.where(thick, torch.where(thick, ratio, 1.0).sqrt(), 0.0))
    conics = torch.stack([yy, -xy, xx], dim=-1) / det[:, None]
    return Projection(spread(means2d), spread(conics), spread(depths), alphas, radii)


def tile_bounds(
    means2d: Float[Tensor, "gaussians 2"], radii: Int[Tensor, " gaussians"]
) -> tuple[Float[Tensor, "gaussians 2"], Float[Tensor, "gaussians 2"]]:
    """Returns the first tile that the square of a Gaussian touches, and the tile after the last, (x, y) each."""
    first = ((means2d - radii[:, None]) / TILE_PX).floor()
    return first, ((means2d + radii[:, None]) / TILE_PX).ceil()


def pixel_weights(
    offsets: Float[Tensor, "points gaussians 2"],
    conics: Float[Tensor, "gaussians 3"],
    alphas: Float[Tensor, " gaussians"],
    in_tile: Bool[Tensor, "points gaussians"],
) -> Float[Tensor, "points gaussians"]:
    """Computes the compositing weights of Gaussians, sorted front to back, at pixels.

    Args:
        offsets: from the Gaussians' centres to the pixels, pixels.
        alphas: opacities, already compensated if antialiased.
        in_tile: True for pixels in tiles that the Gaussian touches.
    """
    dx, dy = offsets.unbind(-1)
    power = 0.5 * (conics[:, 0] * dx**2 + conics[:, 2] * dy**2) + conics[:, 1] * dx * dy
    covered = torch.clamp(alphas * torch.exp(-power), max=MAX_ALPHA)
    covered = torch.where(in_tile & (power >= 0) & (covered >= MIN_ALPHA), covered, 0.0)
    after = torch.cumprod(1.0 - covered, dim=1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], dim=1)
    return torch.where(after > MIN_TRANSMITTANCE, covered * before, 0.0)


def composite(
    projected: Projection,
    colors: Float[Tensor, "gaussians channels"],
    size: tuple[int, int],
    background: Float[Tensor, " channels"] | None = None,
    absgrad: bool = False,
) -> tuple[Float[Tensor, "h w channels"], Float[Tensor, "h w"], Float[Tensor, "h w"]]:
    """Composites Gaussians front to back. Returns colours, depth and accumulation.

    With absgrad, the backward pass stores the sums of absolute per-pixel gradients (Ye et al. 2024, AbsGS) in
    ``projected.means2d.absgrad``.
    """
    (width, height), means2d = size, projected.means2d
    visible = projected.radii.nonzero().squeeze(-1)
    order = visible[torch.argsort(projected.depths[visible].detach(), stable=True)]
    centres, conics, depths, alphas, radii = (value[order] for value in projected)
    payload = torch.cat([colors[order], depths[:, None]], dim=-1)
    first, stop = tile_bounds(centres.detach(), radii)
    if absgrad:
        means2d.absgrad = torch.zeros_like(means2d)  # type: ignore[attr-defined]

    def add_absolute(grad: Tensor) -> None:
        means2d.absgrad.index_add_(0, order, grad.abs().sum(dim=0))  # type: ignore[attr-defined]

    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([columns, rows], dim=-1).reshape(-1, 2).to(means2d) + 0.5
    sums, accumulations = [], []
    for chunk in pixels.split(max(1, CHUNK // max(1, len(order)))):
        tiles = (chunk / TILE_PX).floor()[:, None, :]
        in_tile = ((tiles >= first) & (tiles < stop)).all(dim=-1)
        offsets = chunk[:, None, :] - centres
        if absgrad and offsets.requires_grad:
            offsets.register_hook(add_absolute)
        weights = pixel_weights(offsets, conics, alphas, in_tile)
        sums.append(weights @ payload)
        accumulations.append(weights.sum(dim=1))
    summed = torch.cat(sums).reshape(height, width, -1)
    alpha = torch.cat(accumulations).reshape(height, width)
    picture = summed[..., :-1]
    if background is not None:
        picture = picture + (1.0 - alpha)[..., None] * background
    return picture, summed[..., -1], alpha


def strip(projected: Projection, size: tuple[int, int]) -> Composite:
    """Returns what composites values of the Gaussians over 0."""
    return lambda values: composite(projected, values, size)[0]
