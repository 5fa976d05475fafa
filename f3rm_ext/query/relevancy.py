"""What a query makes of similarities: relevancy against negatives, and labels from several queries. Pure maths.

Relevancy is LERF's (Kerr et al. 2023, §3.3): for every negative the softmax over the pair (positive, negative), then
the minimum over the negatives. A negative given twice changes nothing, unlike with one softmax over all of them.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from f3rm_ext.errors import ConfigError

OTHER = -1
"""Label of what no query claims."""


def relevancy(
    positive: Float[Tensor, "*batch positives"],
    negative: Float[Tensor, "*batch negatives"],
    temperature: float,
) -> Float[Tensor, "*batch"]:
    """How much more a feature is like the positives than like any negative, 0 to 1; ½ where it is like both.

    The best positive counts. Since exp(p/T) / (exp(p/T) + exp(n/T)) grows with p and falls with n, the minimum over
    negatives of the pairwise softmax is the logistic function of (max p − max n) / T.

    Args:
        positive: cosines with the positives, at least one.
        negative: cosines with the negatives, at least one.
        temperature: T > 0; small values make the result all or nothing.
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
    """Index of the query with the greatest score, :data:`OTHER` where that score is below the threshold."""
    best, index = scores.max(dim=-1)
    return torch.where(best >= threshold, index, OTHER)


def check_temperature(temperature: float) -> float:
    """The temperature, if it can be used.

    Raises:
        ConfigError: it is not a number above 0.
    """
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"The temperature is {temperature}, but it has to be above 0: 0.1 is usual.")
    return temperature
