"""Feature metrics of evaluation, at the patch centres."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.features.base import FeatureMap
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.chunked_rendering import default_chunk
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
