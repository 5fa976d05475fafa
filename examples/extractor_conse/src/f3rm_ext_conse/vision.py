"""Dense ImageNet posteriors of EfficientNet-lite0 (Tan and Le 2019, arXiv 1905.11946; lite: no squeeze, ReLU6)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors.weights import load_state_dict

STRIDE_PX = 32
"""Pixels between neighbouring outputs of the network."""
_MEAN, _SCALE = 127.0, 128.0


class DenseClassifier:
    """Applies the classifier's head at every location instead of to the mean over the image."""

    def __init__(self, path: Path, device: torch.device) -> None:
        import timm

        self._network: Any = timm.create_model("tf_efficientnet_lite0", pretrained=False)
        self._network.load_state_dict(in_order_of(self._network.state_dict(), load_state_dict(path), path))
        self._network.eval().requires_grad_(False).to(device)

    def posteriors(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols classes"]:
        """Returns class probabilities at each location.

        Args:
            pixels: RGB in [0, 1], sides multiples of :data:`STRIDE_PX`.
        """
        maps = self._network.forward_features((pixels * 255 - _MEAN) / _SCALE)
        head = self._network.classifier
        return functional.linear(maps.permute(0, 2, 3, 1), head.weight, head.bias).softmax(dim=-1)


def in_order_of(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the weights under timm's names.

    Other implementations name the same layers differently but list them in the same order.

    Args:
        expected: State dict of timm's model.
        state: Weights of another implementation.
        path: Their file, for messages.

    Raises:
        ExtractorError: The number or the shapes of the tensors differ.
    """
    same = len(expected) == len(state) and all(
        wanted.shape == given.shape for wanted, given in zip(expected.values(), state.values(), strict=True)
    )
    if not same:
        raise ExtractorError(f"The file {path} does not hold an EfficientNet-lite0 classifier: give another one.")
    return {
        name: tensor.to(wanted.dtype) for (name, wanted), tensor in zip(expected.items(), state.values(), strict=True)
    }
