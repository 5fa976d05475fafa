"""Relevancy from similarities with positives and negatives, and labels from several queries. Pure maths.

Relevancy is LERF's (Kerr et al. 2023, §3.3): for every negative the softmax over the pair (positive, negative), then
the minimum over the negatives. A repeated negative changes nothing; in one softmax over all of them it would.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

OTHER = -1
"""Label where no query reaches the threshold."""


def relevancy(
    positive: Float[Tensor, "*batch positives"],
    negative: Float[Tensor, "*batch negatives"],
    temperature: float,
) -> Float[Tensor, "*batch"]:
    """How much more similar a feature is to the positives than to any negative, 0 to 1; ½ for equally similar.

    The best positive counts. Since exp(p/T) / (exp(p/T) + exp(n/T)) grows with p and falls with n, the minimum over
    negatives of the pairwise softmax is the logistic function of (max p − max n) / T.

    >>> relevancy(torch.tensor([0.3, 0.2]), torch.tensor([0.3, 0.1]), temperature=0.1)
    tensor(0.5000)

    Args:
        temperature: T > 0; small values push the result towards 0 and 1.
    """
    return torch.sigmoid((positive.amax(dim=-1) - negative.amax(dim=-1)) / temperature)


def relevancy_reference(
    positive: Float[Tensor, "*batch positives"],
    negative: Float[Tensor, "*batch negatives"],
    temperature: float,
) -> Float[Tensor, "*batch"]:
    """:func:`relevancy` as the paper writes it: a softmax for every pair, in float64."""
    pairs = torch.stack(
        torch.broadcast_tensors(positive.double()[..., :, None], negative.double()[..., None, :]), dim=-1
    )
    probability = (pairs / temperature).softmax(dim=-1)[..., 0]
    return probability.amin(dim=-1).amax(dim=-1)


def label_map(scores: Float[Tensor, "*batch queries"], threshold: float) -> Int64[Tensor, "*batch"]:
    """Index of the query with the highest score; :data:`OTHER` where that score is below the threshold.

    >>> label_map(torch.tensor([[0.9, 0.6], [0.2, 0.7], [0.3, 0.1]]), threshold=0.5)
    tensor([ 0,  1, -1])
    """
    best, index = scores.max(dim=-1)
    return torch.where(best >= threshold, index, OTHER)
