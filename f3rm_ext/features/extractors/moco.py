"""Dense features of a network that `f3rm-ext moco train` has pre-trained, at any resolution."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import Weights, WeightsStatus, file_hash, load_state_dict, resolve, status

if TYPE_CHECKING:
    from torchvision.models.resnet import ResNet

_STAGE_STRIDE_PX = {1: 4, 2: 8, 3: 16, 4: 32}
_NETWORKS = {64: "resnet18", 256: "resnet50"}
"""Networks by the width of their first stage."""


@dataclass
class MocoConfig:
    """Options of ``moco``."""

    weights: Path | None = None
    """Needed: backbone.safetensors of a training, or a state dict of a ResNet-18 or -50 with torchvision's names or of
    a ViT with timm's."""
    short_side_px: int = 448
    """Length in pixels to which the short side of an image is resized, ≥ 32. Both sides are rounded to whole
    strides."""
    stage: Literal["2", "3", "4"] = "3"
    """Stage of a ResNet whose feature map is used: 2, 3 and 4 have one feature per 8, 16 and 32 px of the resized
    image. A ViT has one per patch, of its last block."""

    def __post_init__(self) -> None:
        preprocess.check_short_side(self.short_side_px)


class MocoExtractor(preprocess.PatchExtractor):
    """A stage of a ResNet, or the patches of a ViT, pre-trained on your own pictures (f3rm-ext moco train)."""

    config_class = MocoConfig

    def __init__(self, config: MocoConfig, *, device: torch.device) -> None:
        self.config, self.device = config, device
        self._path = resolve(_weights(config))
        self._model, self._network = _network(self._path)
        self._network.to(device).eval().requires_grad_(False)

    @classmethod
    def weights_status(cls, config: MocoConfig) -> WeightsStatus:
        if config.weights is None:
            return WeightsStatus(path=None, advice="Needs moco:weights=…/backbone.safetensors of your own training.")
        return status(_weights(config))

    @property
    def identity(self) -> ExtractorIdentity:
        source = "the last block" if isinstance(self._network, VisionTransformer) else f"stage {self.config.stage}"
        return ExtractorIdentity(
            extractor="moco",
            model=self._model,
            weights=file_hash(self._path),
            resolution=f"short side {self.config.short_side_px} px in whole strides of {self.patch_px}",
            preprocessing=f"bicubic antialiased, ImageNet mean and std; output of {source}",
        )

    @property
    def patch_px(self) -> int:
        """Distance between features in pixels of the resized image."""
        network = self._network
        return network.patch_px if isinstance(network, VisionTransformer) else _STAGE_STRIDE_PX[int(self.config.stage)]

    @property
    def dim(self) -> int:
        if isinstance(self._network, VisionTransformer):
            return self._network.width
        first = 64 if self._model == "resnet18" else 256
        return first * 2 ** (int(self.config.stage) - 1)

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the centres of what features see: of patches; of a ResNet, whose padding decides, of first pixels."""
        middle = self.patch_px / 2 if isinstance(self._network, VisionTransformer) else 0.5
        height, width = self._input_size(height_px, width_px)
        stride = self.patch_px
        grid = PatchGrid(
            height // stride, width // stride, origin_px=(middle, middle), stride_px=(float(stride), float(stride))
        )
        return grid.scale(height_px / height, width_px / width)

    def _forward(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
        network = self._network
        x = preprocess.normalise(pixels, preprocess.IMAGENET_MEAN, preprocess.IMAGENET_STD)
        if isinstance(network, VisionTransformer):
            return network(x)[0]
        x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
        stages = (network.layer1, network.layer2, network.layer3, network.layer4)
        for stage in stages[: int(self.config.stage)]:
            x = stage(x)
        return x.permute(0, 2, 3, 1)


def _weights(config: MocoConfig) -> Weights:
    if config.weights is None:
        raise ExtractorError(
            "Extractor moco needs the weights of your own training: write moco:weights=RUN/backbone.safetensors."
        )
    return Weights(model="MoCo backbone", option="weights", local=config.weights)


def _network(path: Path) -> "tuple[str, ResNet | VisionTransformer]":
    from torchvision.models import get_model

    state = {name: value for name, value in load_state_dict(path).items() if not name.startswith("fc.")}
    if "cls_token" in state:
        vit = VisionTransformer.from_state_dict(state)
        return f"ViT of width {vit.width}, depth {vit.depth}", vit
    last = state.get("layer1.1.bn2.weight" if "layer1.0.conv3.weight" not in state else "layer1.0.bn3.weight")
    name = None if last is None else _NETWORKS.get(len(last))
    if name is not None:
        network = cast("ResNet", get_model(name, weights=None))
        shapes = {key: value.shape for key, value in network.state_dict().items() if not key.startswith("fc.")}
        if shapes == {key: value.shape for key, value in state.items()}:
            network.load_state_dict(state, strict=False)
            return name, network
    raise ExtractorError(
        f"{path} is not the backbone of a ResNet-18 or -50, or of a ViT: use the backbone.safetensors of "
        "f3rm-ext moco train."
    )
