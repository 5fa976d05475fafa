"""The networks: ResNet backbones of torchvision with the heads of MoCo v2 and v3."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from f3rm_ext.moco.options import Algorithm, Architecture

if TYPE_CHECKING:
    from torchvision.models.resnet import ResNet

DIM = {"v2": 128, "v3": 256}
"""Dimension of embeddings and keys."""
_HIDDEN = {"v2": 2048, "v3": 4096}


class Backbone(nn.Module):
    """A ResNet of torchvision without its classifier, with torchvision's parameter names.

    Args:
        architecture: Name of the network.
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
        found = functional.relu(self.bn1(self.conv1(images)))
        found = functional.max_pool2d(found, 3, 2, 1)
        maps = []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                found = self._block(block, found)
            maps.append(found)
        return maps

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch feat"]:
        """Returns the mean of the last feature map."""
        return self.maps(images)[-1].mean(dim=(2, 3))

    def _block(self, block: nn.Module, inputs: Tensor) -> Tensor:
        if not (self.use_grad_checkpointing and self.training and torch.is_grad_enabled()):
            return block(inputs)

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            return nullcontext(), _kept_statistics(block)

        return checkpoint(block, inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _kept_statistics(block: nn.Module) -> Iterator[None]:
    """Keeps running statistics as they are while a block is computed for the second time."""
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
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

    The v2 projector has two layers; those of v3 (and its predictor) have no biases and batch norm between layers.

    Args:
        architecture: Name of the backbone.
        algorithm: Which heads.
        use_grad_checkpointing: See :class:`Backbone`.
    """

    def __init__(self, architecture: Architecture, algorithm: Algorithm, use_grad_checkpointing: bool = False) -> None:
        super().__init__()
        self.backbone = Backbone(architecture, use_grad_checkpointing)
        width, hidden, dim = self.backbone.dim, _HIDDEN[algorithm], DIM[algorithm]
        if algorithm == "v2":
            self.projector = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))
            return
        self.projector = nn.Sequential(
            nn.Linear(width, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim, bias=False),
            nn.BatchNorm1d(dim, affine=False),
        )

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch dim"]:
        """Returns unit embeddings, float32."""
        return functional.normalize(self.projector(self.backbone(images)).float(), dim=1)


def predictor() -> nn.Sequential:
    """Returns v3's predictor, which the query encoder has and the key encoder lacks."""
    hidden, dim = _HIDDEN["v3"], DIM["v3"]
    return nn.Sequential(
        nn.Linear(dim, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim, bias=False)
    )
