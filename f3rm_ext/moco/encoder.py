"""The networks: backbones with the heads of MoCo v2 and v3, and the key encoder's moving average."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from f3rm_ext.moco.options import Algorithm, Architecture
from f3rm_ext.moco.vit import VitBackbone

if TYPE_CHECKING:
    from torchvision.models.resnet import ResNet

DIM = {"v2": 128, "v3": 256}
"""Dimension of embeddings and keys."""
_HIDDEN = {"v2": 2048, "v3": 4096}


class Backbone(nn.Module):
    """A ResNet of torchvision without its classifier, with torchvision's parameter names.

    Args:
        use_grad_checkpointing: Recompute the inside of residual blocks in the backward pass: less memory, more time.
    """

    def __init__(self, architecture: Architecture, use_grad_checkpointing: bool = False) -> None:
        super().__init__()
        from torchvision.models import get_model

        network = cast("ResNet", get_model(architecture, weights=None))
        self.dim: int = network.fc.in_features
        self.use_grad_checkpointing = use_grad_checkpointing
        self.conv1, self.bn1 = network.conv1, network.bn1
        self.layer1, self.layer2 = network.layer1, network.layer2
        self.layer3, self.layer4 = network.layer3, network.layer4

    def maps(self, images: Float[Tensor, "batch 3 h w"]) -> list[Float[Tensor, "batch _ _ _"]]:
        """Returns the feature maps of layers 1 to 4, with strides of 4, 8, 16 and 32 px."""
        features = functional.relu(self.bn1(self.conv1(images)))
        features = functional.max_pool2d(features, 3, 2, 1)
        maps = []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                features = self._block(block, features)
            maps.append(features)
        return maps

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch feat"]:
        return self.maps(images)[-1].mean(dim=(2, 3))

    def _block(self, block: nn.Module, inputs: Tensor) -> Tensor:
        if not (self.use_grad_checkpointing and self.training and torch.is_grad_enabled()):
            return block(inputs)
        return checkpoint(
            block, inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _frozen_statistics(block))
        )


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Freezes running statistics while a block is recomputed."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


class Encoder(nn.Module):
    """A backbone and a projector to unit embeddings; the query encoder of v3 also has a predictor.

    The v2 projector has two layers. In v3 it has two with ResNets and three with ViTs, without biases, with batch norm
    after each; so does the predictor, which with ResNets has none after the last.

    Args:
        image_size: Side of the views, px.
    """

    def __init__(
        self,
        architecture: Architecture,
        algorithm: Algorithm,
        image_size: int = 224,
        use_grad_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = make_backbone(architecture, image_size, use_grad_checkpointing)
        width, hidden, dim = self.backbone.dim, _HIDDEN[algorithm], DIM[algorithm]
        if algorithm == "v2":
            self.projector = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))
            return
        layers = 3 if is_vit(architecture) else 2
        self.projector = _v3_head([width, *[hidden] * (layers - 1), dim], last_norm=True)

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch dim"]:
        return functional.normalize(self.projector(self.backbone(images)).float(), dim=1)


def predictor(architecture: Architecture) -> nn.Sequential:
    """Returns v3's predictor, which the query encoder has and the key encoder lacks."""
    return _v3_head([DIM["v3"], _HIDDEN["v3"], DIM["v3"]], last_norm=is_vit(architecture))


def _v3_head(widths: list[int], last_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU()]
    layers.append(nn.Linear(widths[-2], widths[-1], bias=False))
    if last_norm:
        layers.append(nn.BatchNorm1d(widths[-1], affine=False))
    return nn.Sequential(*layers)


def cosine_momentum(start: float, progress: float) -> float:
    """Returns v3's momentum, which rises from `start` to 1 along half a cosine (arXiv 2104.02057, section 4).

    >>> [round(cosine_momentum(0.99, part), 4) for part in (0.0, 0.5, 1.0)]
    [0.99, 0.995, 1.0]
    """
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def update_momentum(key: nn.Module, query: nn.Module, momentum: float) -> None:
    """Sets the key encoder to m·θ_key + (1 − m)·θ_query; its buffers stay, see :func:`update_statistics`."""
    for average, value in zip(key.parameters(), query.parameters(), strict=True):
        average.lerp_(value, 1 - momentum)


@torch.no_grad()
def update_statistics(key: nn.Module, query: nn.Module, momentum: float) -> None:
    """Averages the running statistics of batch norms in the same way (EMAN, arXiv 2101.08482).

    The key encoder must be in evaluation mode.
    """
    for average, value in zip(key.buffers(), query.buffers(), strict=True):
        if average.is_floating_point():
            average.lerp_(value, 1 - momentum)
        else:
            average.copy_(value)


def is_vit(architecture: str) -> bool:
    return architecture.startswith("vit")


def make_backbone(
    architecture: Architecture, image_size: int, use_grad_checkpointing: bool = False
) -> Backbone | VitBackbone:
    if is_vit(architecture):
        return VitBackbone(architecture, image_size, use_grad_checkpointing)
    return Backbone(architecture, use_grad_checkpointing)
