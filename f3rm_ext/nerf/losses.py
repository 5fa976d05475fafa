"""Losses on rendered features."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

FeatureLoss = Literal["mse", "cosine", "huber"]

HUBER_DELTA = 1.25
"""Where the Huber loss turns linear (LERF's value)."""


def feature_loss(
    predicted: Float[Tensor, "rays feat"], target: Float[Tensor, "rays feat"], kind: FeatureLoss
) -> Float[Tensor, ""]:
    """Distance between rendered and 2D features, in float32 whatever the inputs.

    Args:
        predicted: rendered features, not normalised.
        target: features of the image at the rays' pixels, not normalised.
        kind: ``mse`` (F3RM: mean over rays and dimensions), ``cosine`` (1 − cosine similarity, mean over rays) or
            ``huber`` (LERF: mean over rays and dimensions).
    """
    predicted, target = predicted.float(), target.float()
    if kind == "mse":
        return functional.mse_loss(predicted, target)
    if kind == "cosine":
        return (1.0 - cosine(predicted, target)).mean()
    return functional.huber_loss(predicted, target, delta=HUBER_DELTA)


def cosine(a: Float[Tensor, "*batch feat"], b: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch"]:
    """Cosine similarity over the last dimension, with norms in float32; 0 where a vector is zero."""
    return functional.cosine_similarity(a.float(), b.float(), dim=-1, eps=1e-8)


def heaviest_samples(
    weights: Float[Tensor, "rays samples 1"], positions: Float[Tensor, "rays samples 3"], count: int
) -> tuple[Float[Tensor, "rays kept 1"], Float[Tensor, "rays kept 3"]]:
    """The samples of each ray with the largest weights, rescaled to the weight of all.

    Rendering features at a few samples instead of all of them costs little, since a trained ray has most of its
    weight in very few; scaling keeps the rendered magnitude unbiased.

    Args:
        weights: volume-rendering weights, ≥ 0.
        positions: sample positions.
        count: samples to keep, ≥ 1; all are kept if there are not more.
    """
    if count >= weights.shape[1]:
        return weights, positions
    kept, index = weights[..., 0].topk(count, dim=-1)
    scale = weights.sum(dim=1) / kept.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return (kept * scale)[..., None], positions.gather(1, index[..., None].expand(-1, -1, 3))
