"""What convolutions on the CPU take beside their results."""

import math
from typing import Any

import torch
from torch import Tensor

from f3rm_ext.planning.shapes import DispatchMode

BLOCK = 16
"""Channels that oneDNN, which computes torch's convolutions on the CPU, keeps together (its layout nChw16c). A picture
of three channels is copied to sixteen. For kernels of a single row or column it keeps the plain layout. Both were found
with torch's profiler on an x86 CPU."""


class BlockedConvolutions(DispatchMode):
    """While this is entered, a convolution allocates and frees its input, weights and result in blocks of channels."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if function.overloadpacket is torch.ops.aten.convolution and 1 not in args[1].shape[2:]:
            image, weight = args[0], args[1]
            sides = [
                (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
                for side, kernel, stride, padding, dilation in zip(
                    image.shape[2:], weight.shape[2:], args[3], args[4], args[5], strict=True
                )
            ]
            copies = [_blocked(image, image.shape[1], image.shape[2:]), _blocked(image, weight.shape[0], sides)]
            copies.append(torch.empty_like(weight))
            del copies
        return function(*args, **(kwargs or {}))


def _blocked(image: Tensor, channels: int, sides: Any) -> Tensor:
    return image.new_empty(image.shape[0] * -(-channels // BLOCK) * BLOCK * math.prod(sides))
