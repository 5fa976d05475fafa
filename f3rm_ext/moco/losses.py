"""Contrastive losses of MoCo v2 (arXiv 2003.04297) and v3 (arXiv 2104.02057), and measures of their embeddings.

All embeddings here have unit norm. Logits are computed in float32, also under autocast.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


def info_nce_logits(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "queue dim"],
    temperature: float,
    query_ids: Int[Tensor, "batch"] | None = None,
    negative_ids: Int[Tensor, "queue"] | None = None,
) -> Float[Tensor, "batch queue+1"]:
    """Returns similarities over temperature: that of the positive key first, then those of the queue.

    If image ids are given, keys of the query's own image get a logit of −∞ and so are no negatives.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key, negatives = query.float(), key.float(), negatives.float()
        positive = (query * key).sum(dim=1, keepdim=True)
        negative = query @ negatives.T
        if query_ids is not None and negative_ids is not None:
            negative = negative.masked_fill(query_ids[:, None] == negative_ids[None, :], -math.inf)
        return torch.cat([positive, negative], dim=1) / temperature


def info_nce(logits: Float[Tensor, "batch keys"]) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy of logits whose first column is the positive (arXiv 1911.05722, equation 1)."""
    return (logits.logsumexp(dim=1) - logits[:, 0]).mean()


def pretext_accuracy(logits: Float[Tensor, "batch keys"]) -> Float[Tensor, ""]:
    """Returns the share of queries whose positive is more similar than every negative, 0 to 1."""
    if logits.shape[1] == 1:
        return logits.new_ones(())
    return (logits[:, 0] > logits[:, 1:].max(dim=1).values).float().mean()


def batch_logits(
    query: Float[Tensor, "batch dim"], keys: Float[Tensor, "keys dim"], temperature: float, first: int = 0
) -> Float[Tensor, "batch keys"]:
    """Returns v3's similarities over temperature, where the other images of the batch are the negatives.

    Args:
        first: Row of `keys` that belongs to the first query.

    Returns:
        Logits with the positive in the first column; the order of the others is that of a rotation.
    """
    with torch.autocast(query.device.type, enabled=False):
        logits = query.float() @ keys.float().T / temperature
    count = len(keys)
    rows = torch.arange(len(query), device=query.device)[:, None]
    columns = (rows + first + torch.arange(count, device=query.device)[None, :]) % count
    return logits.gather(1, columns)


def symmetric_loss(
    query_1: Float[Tensor, "batch dim"],
    query_2: Float[Tensor, "batch dim"],
    key_1: Float[Tensor, "keys dim"],
    key_2: Float[Tensor, "keys dim"],
    temperature: float,
    first: int = 0,
) -> Float[Tensor, ""]:
    """Returns v3's loss, 2T·[CE(q₁, k₂) + CE(q₂, k₁)] (arXiv 2104.02057, algorithm 1); see :func:`batch_logits`."""
    one = info_nce(batch_logits(query_1, key_2, temperature, first))
    two = info_nce(batch_logits(query_2, key_1, temperature, first))
    return 2 * temperature * (one + two)


def alignment(one: Float[Tensor, "batch dim"], two: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """Returns the mean squared distance of two views of the same images, 0 to 4 (arXiv 2005.10242)."""
    return (one - two).square().sum(dim=1).mean()


def uniformity(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """Returns log E exp(−2‖x − y‖²) over pairs, −8 to 0; lower is more uniform (arXiv 2005.10242). Needs two rows."""
    return torch.pdist(embeddings.float()).square().mul(-2).exp().mean().log()


def output_spread(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """Returns the standard deviation over the batch times √dim: 1 if spread evenly, 0 if all outputs are the same."""
    unit = functional.normalize(embeddings.float(), dim=1)
    return unit.std(dim=0, correction=0).mean() * math.sqrt(unit.shape[1])
