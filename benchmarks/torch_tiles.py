"""A plain vectorised torch tile renderer: the peer of ``rasterize_cpu.py``, and nothing else.

What one writes without a compiler: projection on whole arrays, Gaussians of each 16 × 16 tile from a table, one
(pixels, Gaussians) matrix per tile, transmittance by ``cumprod``, gradients by autograd. It draws the same picture.
"""

import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids, quats_to_rotations
from f3rm_ext.splat.rasterize.camera import Camera

TILE_PX = 16


def render(shapes: Ellipsoids, colors: Tensor, view: Camera) -> tuple[Tensor, Tensor, Tensor]:
    """Colours (h, w, channels), depth and accumulation (h, w) of Gaussians over black."""
    (means, quats, sizes, alphas), K, (width, height) = shapes, view.K, view.size
    rotation = view.viewmat[:3, :3]
    camera = means @ rotation.T + view.viewmat[:3, 3]
    kept = (camera[:, 2] > 0.01).nonzero().squeeze(-1)
    order = kept[camera[kept, 2].argsort()]
    x, y, z = camera[order].unbind(-1)
    fx, fy, cx, cy = K[0, 0], K[1, 1], K[0, 2], K[1, 2]
    limits = [
        (-(c + 0.15 * side) / f, (side - c + 0.15 * side) / f) for c, f, side in ((cx, fx, width), (cy, fy, height))
    ]
    zero = torch.zeros_like(z)
    slopes = (x / z).clamp(*limits[0]), (y / z).clamp(*limits[1])
    jacobian = torch.stack([fx / z, zero, -fx * slopes[0] / z, zero, fy / z, -fy * slopes[1] / z], -1).reshape(-1, 2, 3)
    axes = jacobian @ rotation @ (quats_to_rotations(quats[order]) * sizes[order, None, :])
    covariances = axes @ axes.transpose(1, 2)
    xx, xy, yy = covariances[:, 0, 0] + 0.3, covariances[:, 0, 1], covariances[:, 1, 1] + 0.3
    det = xx * yy - xy**2
    middle = (xx + yy).detach() / 2
    radii = (3 * (middle + (middle**2 - det.detach()).clamp(min=0.01).sqrt()).sqrt()).ceil()
    centres = torch.stack([fx * x / z + cx, fy * y / z + cy], -1)
    first = ((centres.detach() - radii[:, None]) / TILE_PX).floor()
    stop = ((centres.detach() + radii[:, None]) / TILE_PX).ceil()
    numbers = torch.cat([centres, torch.stack([yy / det, -xy / det, xx / det, alphas[order]], -1)], -1)
    payload = torch.cat([colors[order], z[:, None], torch.ones_like(z)[:, None]], -1)

    bands = []
    for row in range(-(-height // TILE_PX)):
        in_row = ((first[:, 1] <= row) & (stop[:, 1] > row)).nonzero().squeeze(-1)
        left, right = first[in_row, 0], stop[in_row, 0]
        pictures = []
        for column in range(-(-width // TILE_PX)):
            members = in_row[(left <= column) & (right > column)]
            steps = torch.arange(TILE_PX) + 0.5
            py, px = torch.meshgrid(steps + row * TILE_PX, steps + column * TILE_PX, indexing="ij")
            mx, my, a, b, c, opacity = numbers[members].unbind(-1)
            dx, dy = px.reshape(-1, 1) - mx, py.reshape(-1, 1) - my
            covered = (opacity * torch.exp(-0.5 * (a * dx**2 + c * dy**2) - b * dx * dy)).clamp(max=0.999)
            covered = torch.where(covered >= 1 / 255, covered, 0.0)
            after = torch.cumprod(1 - covered, dim=1)
            before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], 1)
            weights = torch.where(after > 1e-4, covered * before, 0.0)
            pictures.append((weights @ payload[members]).reshape(TILE_PX, TILE_PX, -1))
        bands.append(torch.cat(pictures, dim=1))
    picture = torch.cat(bands)[:height, :width]
    return picture[..., :-2], picture[..., -2], picture[..., -1]
