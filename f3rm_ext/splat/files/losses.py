"""What a format or a lower SH degree took from splats, in words."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.gaussians import SH_C0, Gaussians


def rotation_differences(
    ours: Float[Tensor, "gaussians 4"], theirs: Float[Tensor, "gaussians 4"]
) -> Float[Tensor, " gaussians"]:
    """Angles between rotations, degrees, float64; exact also where they are small."""
    a, b = functional.normalize(ours.double(), dim=1), functional.normalize(theirs.double(), dim=1)
    b = torch.where((a * b).sum(dim=1, keepdim=True) < 0, -b, b)
    return torch.rad2deg(4 * torch.asin(((a - b).norm(dim=1) / 2).clamp(max=1)))


def losses(before: Gaussians, after: Gaussians) -> list[str]:
    """What was lost, a sentence for each kind of number that changed.

    Args:
        before: as they were.
        after: the same Gaussians in the same order; the SH degree may be lower.
    """
    told = []
    if after.sh_degree < before.sh_degree:
        flat = " (colours are now the same from everywhere)" if after.sh_degree == 0 else ""
        told.append(f"SH degree {before.sh_degree} became {after.sh_degree}{flat}.")
    span = float((before.means.amax(dim=0) - before.means.amin(dim=0)).max())
    share = f"; the scene is {span:.3g} wide"
    kept = before.with_sh_degree(after.sh_degree)
    differences = {
        "Positions": ((after.means.double() - before.means).norm(dim=1), "", share),
        "Sizes": (100 * ((after.scales.double() - before.scales).abs().amax(dim=1).exp() - 1), " %", ""),
        "Rotations": (rotation_differences(before.quats, after.quats), "°", ""),
        "Opacities": ((_alphas(after) - _alphas(before)).abs(), "", ""),
        "Colours": (255 * SH_C0 * (after.features_dc.double() - before.features_dc).abs().amax(dim=1), " of 255", ""),
    }
    if after.features_rest.numel():
        change = (after.features_rest.float() - kept.features_rest.float()).abs().amax(dim=(1, 2))
        differences["SH coefficients"] = (change, "", "")
    for name, (values, unit, more) in differences.items():
        if bool((values > 0).any()):
            middle, most = float(values.median()), float(values.max())
            told.append(f"{name} changed by {middle:.2g}{unit} in the middle case, {most:.2g}{unit} at most{more}.")
    return told


def _alphas(gaussians: Gaussians) -> Float[Tensor, " gaussians"]:
    return gaussians.opacities.double().sigmoid().squeeze(-1)
