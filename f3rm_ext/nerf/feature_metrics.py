"""Metrics of rendered features against 2D features, at the centres of image patches."""

from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.features.base import FeatureMap
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.chunked_rendering import default_chunk
from f3rm_ext.nerf.losses import cosine
from f3rm_ext.nerf.queryable import QueryableField


def feature_metrics(model: QueryableField, batch: dict[str, Any]) -> dict[str, float]:
    """Returns cosine similarity and mean squared error of rendered features, by head.

    2D features belong to patch centres, so rays are cast there. They are compared chunk by chunk and never kept,
    whatever the image size.

    Args:
        batch: of an evaluation image: its ``camera``, 2D ``feature_maps`` by head, and ``mask`` if there is one.

    Returns:
        ``feature_cosine_NAME`` and ``feature_mse_NAME``: means over patches, each weighted by the share of its pixels
        that ``mask`` keeps. Empty without feature maps, or if the mask keeps no pixel.
    """
    maps: dict[str, FeatureMap] = batch.get("feature_maps") or {}
    metrics: dict[str, float] = {}
    mask: Tensor | None = batch.get("mask")
    if masks.is_empty(mask):
        return metrics
    for name in model.feature_field.names:
        if name not in maps:
            continue
        grid = maps[name].grid
        target = torch.from_numpy(maps[name].values.astype("float32")).flatten(0, 1)
        centres = torch.from_numpy(grid.centres_px()).flatten(0, 1)
        shares = torch.ones(len(target)) if mask is None else masks.patch_shares(mask, grid).flatten().cpu()
        target, centres, shares = target[shares > 0], centres[shares > 0], shares[shares > 0]
        chunk = model.chunked.chunk or default_chunk(model.device)
        similarity, squared = 0.0, 0.0
        for start in range(0, len(target), chunk):
            part = slice(start, start + chunk)
            truth, share = target[part].to(model.device), shares[part].to(model.device)
            rendered = render_pixels(model, batch["camera"], centres[part])[name]
            similarity += float((cosine(rendered, truth) * share).sum())
            squared += float(((rendered - truth).square().mean(dim=-1) * share).sum())
        metrics[f"feature_cosine_{name}"] = similarity / float(shares.sum())
        metrics[f"feature_mse_{name}"] = squared / float(shares.sum())
    return metrics


@torch.inference_mode()
def render_pixels(
    model: QueryableField, camera: Cameras, yx_px: Float[Tensor, "rays 2"]
) -> dict[str, Float[Tensor, "rays feat"]]:
    """Renders features at image positions, by head.

    Args:
        yx_px: continuous pixel coordinates (y, x); centres of pixels lie at + ½.
    """
    indices = torch.zeros(len(yx_px), 1, dtype=torch.long, device=camera.device)
    rays = camera.generate_rays(camera_indices=indices, coords=yx_px.to(camera.device))
    return model.render_features(rays.to(model.device))
