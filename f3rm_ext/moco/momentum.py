"""The key encoder as a moving average of the query encoder."""

import math

import torch
from torch import nn


def cosine_momentum(start: float, progress: float) -> float:
    """Returns v3's momentum, which rises from `start` to 1 along half a cosine (arXiv 2104.02057, section 4).

    >>> [round(cosine_momentum(0.99, part), 4) for part in (0.0, 0.5, 1.0)]
    [0.99, 0.995, 1.0]

    Args:
        start: Momentum of the first step, 0 to 1.
        progress: Part of the training that is done, 0 to 1.
    """
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def update_momentum(key: nn.Module, query: nn.Module, momentum: float) -> None:
    """Sets each parameter of the key encoder to m·θ_key + (1 − m)·θ_query. Buffers stay; see :func:`update_statistics`.

    Args:
        key: The averaged network.
        query: The trained network, with the same parameters in the same order.
        momentum: m, 0 to 1.
    """
    averaged = list(key.parameters())
    trained = list(query.parameters())
    if len(averaged) != len(trained):
        raise ValueError(f"{len(averaged)} parameters cannot follow {len(trained)}")
    for average, value in zip(averaged, trained, strict=True):
        average.lerp_(value, 1 - momentum)


@torch.no_grad()
def update_statistics(key: nn.Module, query: nn.Module, momentum: float) -> None:
    """Lets the running statistics of batch norms follow like parameters (EMAN, arXiv 2101.08482).

    Args:
        key: The averaged network, which is in evaluation mode.
        query: The trained network.
        momentum: m, 0 to 1.
    """
    for average, value in zip(key.buffers(), query.buffers(), strict=True):
        if average.is_floating_point():
            average.lerp_(value, 1 - momentum)
        else:
            average.copy_(value)
