"""The dense head: four feature maps fused to 16 times their resolution (DPT; Ranftl et al. 2021, arXiv 2103.13413).

Residual units that add nothing but a fused map are conditioned on the step of the schedule, as the transformer is.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.sfm.diffusion.encoder import EncodedImages
from f3rm_ext.sfm.diffusion.transformer import StepEmbedding

UPSAMPLING = 16
"""Cells of the prediction along each side of a patch."""
_LAST_WIDTH = 32


class ResidualUnit(nn.Module):
    """ReLU and 3 × 3 convolution, twice, added to the input; scaled, shifted and gated by the step if conditioned."""

    def __init__(self, width: int, conditioned: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_uniform_(conv.weight)
        self.step = StepEmbedding(width) if conditioned else None
        self.modulation = nn.Linear(width, 3 * width) if conditioned else None

    def forward(
        self, x: Float[Tensor, "maps width h w"], steps: Int64[Tensor, " maps"]
    ) -> Float[Tensor, "maps width h w"]:
        gate: Tensor | float = 1.0
        if self.step is not None and self.modulation is not None:
            shift, scale, gate = self.modulation(functional.silu(self.step(steps)))[..., None, None].chunk(3, dim=1)
            x = x * (1 + scale) + shift
        return x + gate * self.conv2(functional.relu(self.conv1(functional.relu(x))))


class Fusion(nn.Module):
    """Adds a feature map to the path, refines it and doubles its resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lateral = ResidualUnit(width, conditioned=False)
        self.refine = ResidualUnit(width, conditioned=True)
        self.output = nn.Conv2d(width, width, 1)
        nn.init.kaiming_uniform_(self.output.weight)

    def forward(
        self,
        path: Float[Tensor, "maps width h w"],
        lateral: Float[Tensor, "maps width h w"] | None,
        steps: Int64[Tensor, " maps"],
    ) -> Float[Tensor, "maps width h2 w2"]:
        if lateral is not None:
            path = path + self.lateral(lateral, steps)
        path = self.refine(path, steps)
        larger = functional.interpolate(path.float(), scale_factor=2, mode="bilinear", align_corners=True)
        return self.output(larger)


class Readout(nn.Sequential):
    """Joins the class token to every patch token."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2 * width, width), nn.GELU())

    def forward(self, tokens: Float[Tensor, "maps tokens feat"]) -> Float[Tensor, "maps patches feat"]:
        patches = tokens[:, 1:]
        return super().forward(torch.cat([patches, tokens[:, :1].expand_as(patches)], dim=-1))


class DenseHead(nn.Module):
    """Predicts maps of 16 × 16 cells per patch.

    Args:
        residual: what it predicts is added to something. The last layer begins at 0, and tokens are normalised: those
            of the transformer may be a thousand times as large as the encoder's, and steps of the last layer are
            as large as what it sees. The published head does neither.
    """

    def __init__(
        self, encoder_width: int, transformer_width: int, width: int, outputs: int, residual: bool = False
    ) -> None:
        super().__init__()
        self.has_norm = residual
        self.readouts = nn.ModuleList(Readout(encoder_width) for _ in range(2))
        inputs = (encoder_width, encoder_width, transformer_width, transformer_width)
        self.inputs = nn.ModuleList(nn.Conv2d(channels, width, 3, padding=1, bias=False) for channels in inputs)
        self.fusions = nn.ModuleList(Fusion(width) for _ in inputs)
        self.output = nn.Sequential(
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.LeakyReLU(),
            nn.Conv2d(width // 2, _LAST_WIDTH, 3, padding=1),
            nn.LeakyReLU(),
            last := nn.Conv2d(_LAST_WIDTH, outputs, 1),
        )
        if residual:
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self,
        encoded: EncodedImages,
        taps: list[Float[Tensor, "batch images width rows cols"]],
        steps: Int64[Tensor, " batch"],
    ) -> Float[Tensor, "batch images outputs h w"]:
        """Predicts from the encoder's tokens after its middle and last block and from two taps of the transformer."""
        batch, images, _, rows, cols = taps[0].shape
        steps = steps.repeat_interleave(images)
        middle, last = encoded.middle, encoded.last
        if self.has_norm:
            middle, last = (functional.layer_norm(tokens, tokens.shape[-1:]) for tokens in (middle, last))
            taps = [functional.layer_norm(tap.movedim(2, -1), tap.shape[2:3]).movedim(-1, 2) for tap in taps]
        maps = [
            readout(tokens.flatten(0, 1)).mT.unflatten(2, (rows, cols))
            for readout, tokens in zip(self.readouts, (middle, last), strict=True)
        ]
        maps += [tap.flatten(0, 1) for tap in taps]
        path = None
        for level in (3, 2, 1, 0):
            # Upsampled first, as in the released head, whose weights are read: the other order is another function.
            map_in = functional.interpolate(maps[level], scale_factor=2.0 ** (3 - level), mode="nearest")
            lateral = self.inputs[level](map_in)
            path = (
                self.fusions[level](lateral, None, steps) if path is None else self.fusions[level](path, lateral, steps)
            )
        return self.output(path).unflatten(0, (batch, images))
