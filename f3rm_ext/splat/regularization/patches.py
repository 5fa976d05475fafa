"""Agreement of small patches of photos between views, as in PGSR (Chen et al. 2024).

Depth that is the same in two views can be wrong in both. Photos can tell: a patch of one photo, carried by the plane
at its middle into another view, must look the same there. Where the other photo is not at hand, what the Gaussians
render there stands for it; that hardly shows faint texture.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.regularization.frames import pixel_rays, rotate, to_camera
from f3rm_ext.splat.regularization.kernel_functions import VIEWS, PatchDisagreement
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.triton_kernels import choose_kernels

RADIUS_PX = 3
"""A patch has 2 · 3 + 1 pixels on each side."""
LEAST_CONTRAST = 0.002
"""Patches whose grey levels have a smaller standard deviation show nothing to compare."""
MOST_DISAGREEMENT = 0.9
"""Patches whose 1 − NCC is larger show different things."""


def grey(picture: Float[Tensor, "h w 3"]) -> Float[Tensor, "h w"]:
    """Returns the brightness of a picture, after ITU-R BT.601."""
    red, green, blue = picture.unbind(-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def patch_disagreement(
    view: DepthView,
    normals: Float[Tensor, "h w 3"],
    photo: Float[Tensor, "h w 3"],
    other: DepthView,
    picture: Float[Tensor, "h2 w2 3"],
    trust: Float[Tensor, "h w"],
    pixels: Float[Tensor, " patches"],
) -> Float[Tensor, ""]:
    """Computes the mean of w (1 − NCC) over patches, the normalised cross-correlation of their grey levels.

    Differentiable in the depth and normals of ``view``. Patches without contrast, those that leave the other picture
    and those that show something else there count 0.

    Args:
        view: depth of planes of a view, and its camera.
        normals: Σ w n of that view, in its camera's frame.
        other: camera of the other view; its depth is not used.
        picture: the other view's photo, or what is rendered there, without gradient.
        trust: w of each pixel, from 0 to 1.
        pixels: middles of the patches, as positions from 0 to below 1 in the flattened view.
    """
    h, w = view.depth.shape
    inner = (h - 2 * RADIUS_PX, w - 2 * RADIUS_PX)
    if min(inner) < 1:
        return 0 * view.depth.sum()
    place = (pixels * (inner[0] * inner[1])).long()
    rows, columns = place // inner[1] + RADIUS_PX, place % inner[1] + RADIUS_PX
    pictures = view.depth, normals, photo, picture, trust
    kernels = choose_kernels(VIEWS, *pictures)
    if kernels is not None:
        limits, places = (RADIUS_PX, LEAST_CONTRAST**2, MOST_DISAGREEMENT), rows * w + columns
        return PatchDisagreement.apply(*pictures, places, view, other, limits, kernels)  # type: ignore[return-value]
    photo, picture = grey(photo), grey(picture)
    offsets = torch.arange(-RADIUS_PX, RADIUS_PX + 1, device=pixels.device)
    patch_rows = (rows[:, None, None] + offsets[:, None]).expand(-1, len(offsets), len(offsets)).flatten(1)
    patch_columns = (columns[:, None, None] + offsets).expand(-1, len(offsets), len(offsets)).flatten(1)
    x, y = pixel_rays((h, w), view.K)
    rays = torch.stack([x[patch_columns], y[patch_rows], torch.ones_like(patch_rows, dtype=x.dtype)], dim=-1)
    middle = torch.stack([x[columns], y[rows], torch.ones_like(x[columns])], dim=-1)
    facing = functional.normalize(normals[rows, columns], dim=-1, eps=1e-12)
    towards, slants = (facing * middle).sum(-1), (facing[:, None] * rays).sum(-1)
    weight = trust[rows, columns]
    with torch.no_grad():
        # A plane seen at a flat angle runs away within the patch: depths stay below five times that of the middle.
        usable = (weight > 0) & (towards < 0) & (slants < 0.2 * towards[:, None]).all(1)
    depth = torch.where(usable, view.depth[rows, columns], 1) * torch.where(usable, towards, 1)
    depth = depth[:, None] / torch.where(usable[:, None], slants, 1)
    points = rotate((rays * depth[..., None]).flatten(0, 1) - view.viewmat[:3, 3], view.viewmat[:3, :3].T)
    there = to_camera(points, other.viewmat)
    with torch.no_grad():
        front = there[:, 2] > 1e-3 * depth.flatten().abs()
    there = torch.where(front[:, None], there, torch.ones_like(there))
    height, width = picture.shape
    u = 2 * (there[:, 0] / there[:, 2] * other.K[0, 0] + other.K[0, 2]) / width - 1
    v = 2 * (there[:, 1] / there[:, 2] * other.K[1, 1] + other.K[1, 2]) / height - 1
    with torch.no_grad():
        inside = (front & (u.abs() < 1) & (v.abs() < 1)).view(len(rows), -1).all(1)
        usable = usable & inside
    where = torch.where(inside.repeat_interleave(patch_rows.shape[1])[:, None], torch.stack([u, v], dim=-1), 0)
    samples = functional.grid_sample(picture[None, None], where[None, None], "bilinear", "border", align_corners=False)
    theirs, ours = samples.view(len(rows), -1), photo[patch_rows, patch_columns]
    theirs, ours = theirs - theirs.mean(1, keepdim=True), ours - ours.mean(1, keepdim=True)
    powers = theirs.square().mean(1), ours.square().mean(1)
    least = LEAST_CONTRAST**2
    with torch.no_grad():
        usable = usable & (powers[0] > least) & (powers[1] > least)
    wrong = 1 - (theirs * ours).mean(1) * (powers[0].clamp_min(least) * powers[1].clamp_min(least)).rsqrt()
    with torch.no_grad():
        weight = torch.where(usable & (wrong < MOST_DISAGREEMENT), weight, 0)
    return (weight * wrong).sum() / max(1, len(rows))
