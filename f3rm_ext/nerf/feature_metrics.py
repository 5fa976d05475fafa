"""What evaluation adds to rendering: feature metrics at the patch centres, normals, and pictures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils import colormaps
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import FeatureMap
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.chunked_rendering import default_chunk
from f3rm_ext.nerf.fields import SceneField
from f3rm_ext.nerf.losses import cosine

if TYPE_CHECKING:
    from f3rm_ext.nerf.model import F3rmModel


def feature_metrics(model: "F3rmModel", batch: dict[str, Any]) -> dict[str, float]:
    """Cosine similarity and mean squared error of rendered features, by head.

    The truth lives at patch centres, so that is where rays are cast; their features are compared chunk by chunk and
    never kept, whatever the image size.

    Args:
        model: the model.
        batch: of an evaluation image; without ``camera`` and ``feature_maps`` there is nothing to compare.

    Returns:
        ``feature_cosine_NAME`` and ``feature_mse_NAME``, means over the patches, each of the weight of its pixels that
        ``mask`` keeps; nothing where it keeps nothing.
    """
    maps: dict[str, FeatureMap] = batch.get("feature_maps") or {}
    metrics: dict[str, float] = {}
    mask: Tensor | None = batch.get("mask")
    if masks.keeps_nothing(mask):
        return metrics
    for name in model.feature_field.names:
        if name not in maps:
            continue
        grid = maps[name].grid
        truth = torch.from_numpy(maps[name].values.astype("float32")).flatten(0, 1)
        centres = torch.from_numpy(grid.centres_px()).flatten(0, 1)
        shares = torch.ones(len(truth)) if mask is None else masks.patch_shares(mask, grid).flatten().cpu()
        truth, centres, shares = truth[shares > 0], centres[shares > 0], shares[shares > 0]
        chunk = model.chunked.chunk or default_chunk(model.device)
        similarity, squared = 0.0, 0.0
        for start in range(0, len(truth), chunk):
            part = slice(start, start + chunk)
            wanted, share = truth[part].to(model.device), shares[part].to(model.device)
            rendered = render_at(model, batch["camera"], centres[part])[name]
            similarity += float((cosine(rendered, wanted) * share).sum())
            squared += float(((rendered - wanted).square().mean(dim=-1) * share).sum())
        metrics[f"feature_cosine_{name}"] = similarity / float(shares.sum())
        metrics[f"feature_mse_{name}"] = squared / float(shares.sum())
    return metrics


@torch.inference_mode()
def render_at(model: "F3rmModel", camera: Cameras, yx_px: Float[Tensor, "rays 2"]) -> dict[str, Tensor]:
    """Features at image positions.

    Args:
        model: the model.
        camera: one camera.
        yx_px: continuous pixel coordinates (y, x); centres of pixels lie at + ½.

    Returns:
        (rays, D) features by head.
    """
    indices = torch.zeros(len(yx_px), 1, dtype=torch.long, device=camera.device)
    rays = camera.generate_rays(camera_indices=indices, coords=yx_px.to(camera.device))
    return model.render_features(rays.to(model.device))


def render_normals(
    field: SceneField, positions: Float[Tensor, "rays samples 3"], weights: Float[Tensor, "rays samples 1"]
) -> Float[Tensor, "rays 3"]:
    """Normals (minus the direction in which density grows), rendered and mapped from ±1 to 0–1.

    Args:
        field: the scene field.
        positions: sample positions, scene frame.
        weights: volume-rendering weights.
    """
    with torch.enable_grad():
        points = positions.detach().requires_grad_(True)
        density, _ = field.density(points)
        (gradient,) = torch.autograd.grad(density.clamp(min=1e-10).log().sum(), points)
    normals = functional.normalize((weights.detach() * -functional.normalize(gradient, dim=-1)).sum(dim=-2), dim=-1)
    return (normals + 1.0) / 2.0


def comparison_images(
    model: "F3rmModel", outputs: dict[str, Tensor], truth: Float[Tensor, "h w 3"], batch: dict[str, Any]
) -> dict[str, Tensor]:
    """Pictures for TensorBoard and for `ns-eval --render-output-path`, in [0, 1]; grey where ``mask`` leaves out.

    Args:
        model: the model.
        outputs: of the rendered image.
        truth: the true image.
        batch: of the evaluation image.
    """
    mask = batch.get("mask")
    images = {
        "img": torch.cat([truth, outputs["rgb"]], dim=1),
        "accumulation": colormaps.apply_colormap(outputs["accumulation"]),
        "depth": depth_colors(outputs["depth"], outputs["accumulation"], mask),
    }
    return masks.shown(images | feature_images(model, outputs, batch), mask)


def feature_images(model: Any, outputs: dict[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """``feature_pca`` (and ``feature_pca_NAME`` of the further features): as colours, the 2D features | those rendered.

    Args:
        model: has features, a field or splats.
        outputs: of the rendered image.
        batch: of the evaluation image.
    """
    images: dict[str, Tensor] = {}
    maps = batch.get("feature_maps") or {}
    for index, name in enumerate(model.query_heads()):
        key = f"feature_pca_{name}" if index else "feature_pca"
        if name in maps and key in outputs:
            wanted = display_map(model, name, maps[name], outputs[key].shape[0], outputs[key].shape[1])
            images[key] = torch.cat([wanted, outputs[key]], dim=1)
    return images


def depth_colors(
    depth: Float[Tensor, "h w 1"], accumulation: Float[Tensor, "h w 1"], mask: Bool[Tensor, "h w 1"] | None = None
) -> Float[Tensor, "h w 3"]:
    """Depth as colours, from its 2 % to its 90 % quantile: a hole in a far wall must not make all else one colour.

    Args:
        depth: scene units.
        accumulation: opacity, 0 to 1; the colours fade with it.
        mask: the quantiles are those of the pixels that it keeps, if it keeps any.
    """
    kept = depth.flatten() if mask is None or not mask.any() else depth[mask.to(depth.device)]
    some = kept[:: max(1, kept.numel() // 100_000)]
    near, far = torch.quantile(some, torch.tensor([0.02, 0.9], device=some.device)).tolist()
    return colormaps.apply_depth_colormap(depth, accumulation=accumulation, near_plane=near, far_plane=far)


def display_map(
    model: Any, name: str, feature_map: FeatureMap, height_px: int, width_px: int
) -> Float[Tensor, "h w 3"]:
    """A 2D feature map in the colours of ``feature_pca``, at image size."""
    head = model.query_heads()[name]
    values = torch.from_numpy(feature_map.values.astype("float32")).to(model.device)
    resized = functional.interpolate(head.colors(values).permute(2, 0, 1)[None], (height_px, width_px), mode="bilinear")
    return resized[0].permute(1, 2, 0)
