"""A diffusion transformer over the patches of all images, conditioned by adaLN-Zero (Peebles and Xie 2023, arXiv
2212.09748)."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.features.extractors.vit import NORM_EPS, Attention

_FREQUENCIES = 128
_PERIOD = 10_000.0
IMAGE_BASE, PATCH_BASE = 10_000.0, 70_007.0
"""Longest wavelengths (over 2π) of the codes of an image's and of a patch's number."""


def number_codes(count: int, width: int, base: float, like: Tensor) -> Float[Tensor, "count width"]:
    """Returns sinusoidal codes of 0 … count - 1: sines at even, cosines at odd places (Vaswani et al. 2017)."""
    places = torch.arange(width, device=like.device, dtype=torch.float64)
    rates = base ** (-2 * (places // 2) / width)
    angles = torch.arange(count, device=like.device, dtype=torch.float64)[:, None] * rates
    return torch.where(places % 2 == 0, angles.sin(), angles.cos()).to(like.dtype)


class StepEmbedding(nn.Sequential):
    """A vector for a step of the schedule: cosines and sines of it, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2 * _FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        for layer in (self[0], self[2]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, steps: Int64[Tensor, " batch"]) -> Float[Tensor, "batch width"]:
        rates = torch.exp(-math.log(_PERIOD) * torch.arange(_FREQUENCIES, device=steps.device) / _FREQUENCIES)
        angles = steps[:, None].float() * rates
        return super().forward(torch.cat([angles.cos(), angles.sin()], dim=-1))


def modulate(
    x: Float[Tensor, "batch tokens width"], shift: Float[Tensor, "batch width"], scale: Float[Tensor, "batch width"]
) -> Float[Tensor, "batch tokens width"]:
    """Returns the layer-normalised tokens, scaled and shifted by the condition."""
    return functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and an MLP, each with a scale, a shift and a gate from the condition. It begins as the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, qkv_bias=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        _init_xavier(self)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], condition: Float[Tensor, "batch width"]
    ) -> Float[Tensor, "batch tokens width"]:
        parts = self.modulation(functional.silu(condition)).chunk(6, dim=1)
        x = x + parts[2][:, None] * self.attention(modulate(x, parts[0], parts[1]))
        return x + parts[5][:, None] * self.mlp(modulate(x, parts[3], parts[4]))


class OutputLayer(nn.Module):
    """A modulated norm and a linear layer. It does not begin at zero, unlike DiT's."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, channels)
        self.modulation = nn.Linear(width, 2 * width)
        _init_xavier(self)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], condition: Float[Tensor, "batch width"]
    ) -> Float[Tensor, "batch tokens channels"]:
        return self.linear(modulate(x, *self.modulation(functional.silu(condition)).chunk(2, dim=1)))


class RayTransformer(nn.Module):
    """Full attention over the patches of all images, in ``depth`` blocks, a multiple of 4."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.input = nn.Linear(inputs, width)
        _init_xavier(self.input)
        self.step = StepEmbedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.output = OutputLayer(width, outputs)

    def forward(
        self, patches: Float[Tensor, "batch images inputs rows cols"], steps: Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch images outputs rows cols"], list[Float[Tensor, "batch images width rows cols"]]]:
        """Predicts from all patches. Returns the prediction, and the tokens after three quarters of the blocks and
        after the last one."""
        batch, images, _, rows, cols = patches.shape
        x = self.input(patches.flatten(3).permute(0, 1, 3, 2))
        x = x + number_codes(images, self.width, IMAGE_BASE, x)[:, None]
        x = (x + number_codes(rows * cols, self.width, PATCH_BASE, x)).flatten(1, 2)
        condition = self.step(steps)
        taps = []
        for index, block in enumerate(self.blocks):
            x = block(x, condition)
            if index + 1 in (len(self.blocks) * 3 // 4, len(self.blocks)):
                taps.append(_as_images(x, (batch, images, rows, cols)))
        return _as_images(self.output(x, condition), (batch, images, rows, cols)), taps


def _as_images(
    tokens: Float[Tensor, "batch tokens feat"], shape: tuple[int, int, int, int]
) -> Float[Tensor, "batch images feat rows cols"]:
    return tokens.unflatten(1, shape[1:]).permute(0, 1, 4, 2, 3)


def _init_xavier(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
