"""Pictures that evaluation and the viewer show: photo beside rendering, depth and features as colours."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from nerfstudio.utils import colormaps
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import FeatureMap
from f3rm_ext.model_components import masks


def comparison_images(
    outputs: Mapping[str, Tensor], truth: Float[Tensor, "h w 3"], mask: Bool[Tensor, "h w 1"] | None = None
) -> dict[str, Tensor]:
    """Returns the pictures for TensorBoard and `ns-eval --render-output-path`, in [0, 1].

    Args:
        outputs: of the rendered image: ``rgb``, ``accumulation``, ``depth`` and, if rendered, ``normal`` and
            ``normal_from_depth``.

    Returns:
        ``img`` (photo | rendering), ``accumulation``, ``depth`` and, if rendered, ``normal`` (side by side).
    """
    images = {
        "img": torch.cat([truth, outputs["rgb"]], dim=1),
        "accumulation": colormaps.apply_colormap(outputs["accumulation"]),
        "depth": depth_colors(outputs["depth"], outputs["accumulation"], mask),
    }
    normals = [outputs[name] for name in ("normal", "normal_from_depth") if name in outputs]
    if normals:
        images["normal"] = torch.cat(normals, dim=1)
    return masks.grey_out(images, mask)


def feature_images(model: Any, outputs: dict[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns 2D features | rendered features, as colours: ``feature_pca``, and ``feature_pca_NAME`` for further heads.

    Heads without an entry in the batch's ``feature_maps`` have no picture.
    """
    images: dict[str, Tensor] = {}
    maps = batch.get("feature_maps") or {}
    for index, name in enumerate(model.query_heads()):
        key = f"feature_pca_{name}" if index else "feature_pca"
        if name in maps and key in outputs:
            reference = display_map(model, name, maps[name], outputs[key].shape[0], outputs[key].shape[1])
            images[key] = torch.cat([reference, outputs[key]], dim=1)
    return images


def depth_colors(
    depth: Float[Tensor, "h w 1"], accumulation: Float[Tensor, "h w 1"], mask: Bool[Tensor, "h w 1"] | None = None
) -> Float[Tensor, "h w 3"]:
    """Colours depth from its 2 % to its 90 % quantile, so that a hole in a far wall does not flatten everything else.

    The quantiles are those of the pixels that the mask keeps, if any. Colours fade with the accumulation.
    """
    kept = depth.flatten() if mask is None or not mask.any() else depth[mask.to(depth.device)]
    # torch.quantile sorts its values, and refuses more than 16 million of them.
    some = kept[:: max(1, kept.numel() // 100_000)]
    near, far = torch.quantile(some, torch.tensor([0.02, 0.9], device=some.device)).tolist()
    return colormaps.apply_depth_colormap(depth, accumulation=accumulation, near_plane=near, far_plane=far)


def display_map(
    model: Any, name: str, feature_map: FeatureMap, height_px: int, width_px: int
) -> Float[Tensor, "h w 3"]:
    """Returns a 2D feature map in the colours of ``feature_pca``, resized to the image."""
    head = model.query_heads()[name]
    values = torch.from_numpy(feature_map.values.astype("float32")).to(model.device)
    resized = functional.interpolate(head.colors(values).permute(2, 0, 1)[None], (height_px, width_px), mode="bilinear")
    return resized[0].permute(1, 2, 0)
