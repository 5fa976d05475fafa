"""PSNR, SSIM, L1 and LPIPS of a rendered image, optionally under a mask; LPIPS only if its weights are available."""

import functools
import importlib.resources
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor
from torch.nn import functional

from f3rm_ext import events
from f3rm_ext.errors import WeightsNotFoundError, reason_of
from f3rm_ext.features.extractors.weights import Weights, resolve
from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.model_components import masks

ALEXNET_URL = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
MIN_LPIPS_SIDE_PX = 31

# Index in AlexNet's features, stride, padding, and whether max pooling comes first; LPIPS compares after each layer.
_STAGES = ((0, 4, 2, False), (3, 1, 2, True), (6, 1, 1, True), (8, 1, 1, False), (10, 1, 1, False))
# Channels out and in, and side of the kernel, of these layers.
_KERNELS = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
# What LPIPS makes of colours in [-1, 1] before AlexNet sees them (its ScalingLayer).
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class Lpips:
    """LPIPS with AlexNet, version 0.1 (Zhang et al., CVPR 2018): the value that torchmetrics and nerfstudio report.

    It holds plain tensors instead of modules: nothing ends up in a checkpoint, and building it draws no random numbers.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        """Takes weights named as in the ``lpips`` package (``net.slice1.0.weight`` to ``lin4.model.1.weight``).

        Raises:
            KeyError: a weight is missing.
        """
        self._convs = [
            tuple(state[f"net.slice{stage + 1}.{layer}.{part}"].detach().float() for part in ("weight", "bias"))
            for stage, (layer, *_) in enumerate(_STAGES)
        ]
        self._heads = [state[f"lin{stage}.model.1.weight"].detach().float() for stage in range(len(_STAGES))]

    @classmethod
    def make_empty(cls) -> "Lpips":
        """Returns LPIPS with empty weights, to trace its memory."""
        state: dict[str, Tensor] = {}
        for stage, ((layer, *_), (out, channels, side)) in enumerate(zip(_STAGES, _KERNELS, strict=True)):
            state[f"net.slice{stage + 1}.{layer}.weight"] = torch.empty(out, channels, side, side)
            state[f"net.slice{stage + 1}.{layer}.bias"] = torch.empty(out)
            state[f"lin{stage}.model.1.weight"] = torch.empty(1, out, 1, 1)
        return cls(state)

    def __call__(
        self,
        pred: Float[Tensor, "h w 3"],
        target: Float[Tensor, "h w 3"],
        mask: Bool[Tensor, "h w 1"] | None = None,
    ) -> float:
        """Returns the distance of two images in [0, 1] with sides of at least 31 px; 0 for equal images.

        Args:
            mask: False for pixels that do not count. Both images are padded there as beyond their borders, and the
                network's maps are averaged with the share of kept pixels as weight.
        """
        with torch.no_grad():
            pair = torch.stack([pred, target]).permute(0, 3, 1, 2).float()
            shift, scale = (pair.new_tensor(values).view(1, 3, 1, 1) for values in (_SHIFT, _SCALE))
            maps = (2 * pair - 1 - shift) / scale
            kept = None if mask is None else mask.permute(2, 0, 1)[None].to(maps)
            if kept is not None:
                maps = torch.where(kept > 0, maps, 0.0)  # as the network pads
            total = pair.new_zeros(())
            for (_, stride, padding, pool), (weight, bias), head in zip(_STAGES, self._convs, self._heads, strict=True):
                if pool:
                    maps = functional.max_pool2d(maps, kernel_size=3, stride=2)
                maps = functional.conv2d(maps, weight.to(maps), bias.to(maps), stride=stride, padding=padding).relu()
                unit = maps / (maps.square().sum(dim=1, keepdim=True) + 1e-8).sqrt()
                distance = functional.conv2d((unit[:1] - unit[1:]).square(), head.to(maps))
                if kept is not None:
                    share = functional.adaptive_avg_pool2d(kept, (distance.shape[2], distance.shape[3]))
                    distance = distance * share / share.mean()
                total = total + distance.mean()
        return float(total)


class ImageMetrics:
    """Metrics of rendered images. Not a module, so that nothing of it is in checkpoints or parameter groups."""

    def __init__(self, lpips_weights: Path | None = None) -> None:
        """Loads nothing yet.

        Args:
            lpips_weights: file with LPIPS weights (``lpips_alex_v0.1.pth``) or with torchvision's AlexNet. By default,
                the AlexNet of torchvision's cache ($TORCH_HOME), downloaded once if it is not there.
        """
        self.lpips_weights = lpips_weights

    def __call__(
        self,
        pred: Float[Tensor, "h w 3"],
        target: Float[Tensor, "h w 3"],
        mask: Bool[Tensor, "h w 1"] | None = None,
    ) -> dict[str, float]:
        """Compares a rendering with the photo, both in [0, 1].

        Args:
            mask: False for pixels that do not count; see :func:`~f3rm_ext.model_components.masks.ssim` and
                :class:`Lpips`.

        Returns:
            ``psnr`` (dB, at most 100), ``ssim`` (as nerfacto computes it), ``l1`` (mean absolute difference) and, if
            its weights are available, ``lpips``: the same keys for every image of a run. Empty if the mask keeps no
            pixel.
        """
        if masks.is_empty(mask):
            return {}
        pred, target = pred.float().clamp(0, 1), target.float().clamp(0, 1)
        mask = None if mask is None or bool(mask.all()) else mask.to(pred.device)
        metrics = {
            "psnr": float(masks.psnr(pred, target, mask)),
            "ssim": float(masks.ssim(pred, target, mask)),
            "l1": float(masks.masked_mean((pred - target).abs(), mask)),
        }
        lpips = self._lpips(pred)
        if lpips is not None:
            metrics["lpips"] = lpips(pred, target, mask)
        return metrics

    def _lpips(self, pred: Tensor) -> Lpips | None:
        if lacks_values(pred):
            return Lpips.make_empty()
        if min(pred.shape[:2]) < MIN_LPIPS_SIDE_PX:
            _say_once(f"LPIPS is left out: it needs images of at least {MIN_LPIPS_SIDE_PX} px, these have fewer.")
            return None
        lpips = find_lpips(self.lpips_weights)
        if isinstance(lpips, Lpips):
            return lpips
        _say_once(lpips)
        return None


@functools.cache
def _say_once(text: str) -> None:
    events.note(text)
    CONSOLE.print(f"Warning: {text}", style="bold yellow", markup=False, soft_wrap=True)


@functools.cache
def find_lpips(weights: Path | None) -> Lpips | str:
    """Returns LPIPS, or a sentence that says why it is not available; tries once per process."""
    source = Weights("AlexNet", "--pipeline.model.lpips-weights", weights, urls=(ALEXNET_URL,))
    try:
        return _read(resolve(source))
    except WeightsNotFoundError as error:
        return f"LPIPS is left out: {error}"


def find_alexnet() -> Path:
    """Returns the path at which torchvision caches AlexNet; the file need not exist."""
    return Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET_URL.rsplit("/", 1)[-1]


def _read(path: Path) -> Lpips:
    """Reads a file that holds weights of either LPIPS or AlexNet.

    Raises:
        WeightsNotFoundError: the file holds neither.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if "features.0.weight" in state:  # torchvision's AlexNet; torchmetrics brings the five small heads
            heads = importlib.resources.files("torchmetrics.functional.image") / "lpips_models" / "alex.pth"
            with heads.open("rb") as file:
                full = dict(torch.load(file, map_location="cpu", weights_only=True))
            for stage, (layer, *_) in enumerate(_STAGES):
                for part in ("weight", "bias"):
                    full[f"net.slice{stage + 1}.{layer}.{part}"] = state[f"features.{layer}.{part}"].clone()
            state = full
        return Lpips(state)
    except Exception as error:  # pickle, zip and I/O errors of many types
        raise WeightsNotFoundError(
            f"{path} holds neither LPIPS nor AlexNet weights ({reason_of(error)}): replace the file."
        ) from error
