"""A Vision Transformer built from its weights: DINO, DINOv2 (also with registers) and timm's ViT.

:meth:`VisionTransformer.from_state_dict` reads the architecture from the shapes of the weights, after
:func:`to_common_names` has renamed them as in timm.

Architecture: Dosovitskiy et al. 2021 (arXiv 2010.11929); LayerScale: Touvron et al. 2021 (arXiv 2103.17239);
register tokens: Darcet et al. 2024 (arXiv 2309.16588).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors.weights import explain_misfit

HEAD_WIDTH = 64
"""Width of one attention head in every published DINO and DINOv2 model."""
NORM_EPS = 1e-6
Facet = Literal["token", "key", "query", "value"]

_IGNORED = re.compile(r"^(head|head_dist|fc_norm|pooler|classifier)\.|^(mask_token|dist_token)$|^projection_head\.")
"""Parameters that dense features do not depend on."""

_FROM_TRANSFORMERS = (
    (r"^(vit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    (r"^layernorm\.", "norm."),
)
_REQUIRED = ("patch_embed.proj.weight", "pos_embed", "cls_token", "blocks.0.attn.qkv.weight")


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for query, key and value."""

    def __init__(self, width: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def facets(self, x: Float[Tensor, "b t c"]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value, each of shape (b, t, c) with the heads side by side."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return query, key, value

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        query, key, value = (facet.unflatten(-1, (self.heads, -1)).transpose(1, 2) for facet in self.facets(x))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        return self.fc2(functional.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    """The gated MLP of DINOv2's giant (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        gate, content = self.w12(x).chunk(2, dim=-1)
        return self.w3(functional.silu(gate) * content)


class LayerScale(nn.Module):
    """A learned factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, state: Mapping[str, Tensor], width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, heads, qkv_bias="blocks.0.attn.qkv.bias" in state)
        self.ls1 = LayerScale(width) if "blocks.0.ls1.gamma" in state else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        if "blocks.0.mlp.w12.weight" in state:
            self.mlp = SwiGlu(width, state["blocks.0.mlp.w12.weight"].shape[0] // 2)
        else:
            self.mlp = Mlp(width, state["blocks.0.mlp.fc1.weight"].shape[0])
        self.ls2 = LayerScale(width) if "blocks.0.ls2.gamma" in state else nn.Identity()

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Linear embedding of square patches."""

    def __init__(self, width: int, patch_px: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch_px, stride=patch_px)

    def forward(self, pixels: Float[Tensor, "b 3 h w"], stride_px: int) -> Float[Tensor, "b c rows cols"]:
        return functional.conv2d(pixels, self.proj.weight, self.proj.bias, stride=stride_px)


class VisionTransformer(nn.Module):
    """Dense features of a ViT at any image size; build it with :meth:`from_state_dict`."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.width, _, self.patch_px, _ = state["patch_embed.proj.weight"].shape
        self.depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
        self.heads = self.width // HEAD_WIDTH
        if self.heads == 0 or self.width % self.heads:
            raise ExtractorError(
                f"A ViT of width {self.width} cannot be split into attention heads of {HEAD_WIDTH}: "
                "these weights are not of a DINO or DINOv2 model."
            )
        self.patch_embed = PatchEmbed(self.width, self.patch_px)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.width))
        registers = state["register_tokens"].shape[1] if "register_tokens" in state else 0
        self.register_tokens = nn.Parameter(torch.zeros(1, registers, self.width)) if registers else None
        self.pos_embed = nn.Parameter(torch.zeros(state["pos_embed"].shape))
        positions = self.pos_embed.shape[1]
        # In some models the class token has a position embedding, in others it has none.
        self.cls_positions = next((n for n in (1, 0) if math.isqrt(positions - n) ** 2 == positions - n), -1)
        if self.cls_positions < 0:
            raise ExtractorError(
                f"The position embedding of these weights has {positions} entries, which is no square grid: "
                "use weights trained on square images."
            )
        self.blocks = nn.ModuleList(Block(state, self.width, self.heads) for _ in range(self.depth))
        self.norm = nn.LayerNorm(self.width, eps=NORM_EPS)

    @classmethod
    def from_size(
        cls, width: int, depth: int, side: int, patch_px: int, *, layer_scale: bool = False
    ) -> "VisionTransformer":
        """Builds a model of this size with initial weights, for images of side x side patches."""
        shapes = {
            "patch_embed.proj.weight": (width, 3, patch_px, patch_px),
            "pos_embed": (1, 1 + side**2, width),
            "blocks.0.attn.qkv.bias": (3 * width,),
            "blocks.0.mlp.fc1.weight": (4 * width, width),
            f"blocks.{depth - 1}.norm1.weight": (width,),
            **({"blocks.0.ls1.gamma": (width,), "blocks.0.ls2.gamma": (width,)} if layer_scale else {}),
        }
        return cls({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})

    @classmethod
    def from_state_dict(cls, weights: Mapping[str, Tensor]) -> "VisionTransformer":
        """Builds the model that these weights belong to, in float32 on the CPU, for inference.

        Args:
            weights: State dict with the parameter names of timm, DINO, DINOv2 or ``transformers``; any float type.

        Raises:
            ExtractorError: Parameters are missing or unknown, or their shapes do not fit together.
        """
        state = to_common_names(weights)
        with torch.device("meta"):
            model = cls(state)
        if misfit := explain_misfit(model.state_dict(), state):
            raise ExtractorError(f"The weights {misfit}: this is no plain ViT as in DINO, DINOv2 or timm.")
        model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
        return model.eval().requires_grad_(False)

    def positions(self, rows: int, cols: int) -> Float[Tensor, "1 tokens c"]:
        """Returns the position embeddings, bicubically interpolated to a rows x cols grid of patches."""
        side = math.isqrt(self.pos_embed.shape[1] - self.cls_positions)
        grid = self.pos_embed[:, self.cls_positions :]
        if (rows, cols) == (side, side):
            return grid
        image = grid.unflatten(1, (side, side)).permute(0, 3, 1, 2).float()
        image = functional.interpolate(image, size=(rows, cols), mode="bicubic", align_corners=False)
        return image.flatten(2).transpose(1, 2).to(grid.dtype)

    def _normalize(self, x: Float[Tensor, "b t c"], index: int) -> Float[Tensor, "b t c"]:
        return self.norm(x) if index == self.depth - 1 else functional.layer_norm(x, (self.width,), eps=NORM_EPS)

    def embed(self, pixels: Float[Tensor, "b 3 h w"], stride_px: int) -> tuple[Float[Tensor, "b t c"], int, int]:
        """Returns the token sequence before the first block, and the rows and columns of its patch grid."""
        patches = self.patch_embed(pixels, stride_px)
        batch, _, rows, cols = patches.shape
        tokens = patches.flatten(2).transpose(1, 2) + self.positions(rows, cols)
        prefix = [self.cls_token + self.pos_embed[:, :1] if self.cls_positions else self.cls_token]
        if self.register_tokens is not None:
            prefix.append(self.register_tokens)
        return torch.cat([*(token.expand(batch, -1, -1) for token in prefix), tokens], dim=1), rows, cols

    def forward(
        self,
        pixels: Float[Tensor, "b 3 h w"],
        layers: Sequence[int] = (-1,),
        *,
        facet: Facet = "token",
        normed: bool = True,
        stride_px: int | None = None,
    ) -> list[Float[Tensor, "b rows cols c"]]:
        """Returns dense patch features from some of the blocks, one map per layer.

        Args:
            layers: Numbers of the blocks, 0 to depth - 1, or negative from the end.
            facet: ``token`` for the block's output, or ``key``, ``query`` or ``value`` of its attention.
            normed: Whether to normalise tokens. Those of the last block pass the model's final LayerNorm. It was not
                trained for earlier blocks, whose tokens pass a LayerNorm without weights.
            stride_px: Distance between patches, by default the patch size. Patches overlap if it is smaller.
        """
        indices = [layer % self.depth for layer in layers]
        last = max(indices)
        x, rows, cols = self.embed(pixels, stride_px or self.patch_px)
        blocks: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks[: last + 1]):
            assert isinstance(block, Block)
            if facet != "token" and index in indices:
                blocks[index] = block.attn.facets(block.norm1(x))[("query", "key", "value").index(facet)]
                if index == last:
                    break  # Nothing reads the output of this block.
            x = block(x)
            if facet == "token" and index in indices:
                blocks[index] = self._normalize(x, index) if normed else x
        return [blocks[index][:, -rows * cols :].unflatten(1, (rows, cols)) for index in indices]


def to_common_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames parameters as in timm, with fused query, key and value; drops classifier heads and mask tokens.

    Raises:
        ExtractorError: The weights do not belong to a ViT.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        common = _common_name(name)
        if not _IGNORED.search(common):
            state[common] = tensor
    _fuse_query_key_value(state)
    missing = [name for name in _REQUIRED if name not in state]
    if not any(f"blocks.0.mlp.{name}.weight" in state for name in ("fc1", "w12")):
        missing.append("blocks.0.mlp.fc1.weight")
    if missing:
        raise ExtractorError(
            f"The weights lack {', '.join(missing)}: give the state dict of a ViT as in DINO, DINOv2 or timm."
        )
    return state


def _common_name(name: str) -> str:
    for pattern, replacement in _FROM_TRANSFORMERS:
        name = re.sub(pattern, replacement, name)
    # DINOv2's giant was saved in chunks of blocks: blocks.<chunk>.<block>.
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
    return "register_tokens" if name == "reg_token" else name


def _fuse_query_key_value(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if ".attn.query." in name]:
        parts = [name.replace(".attn.query.", f".attn.{part}.") for part in ("query", "key", "value")]
        if all(part in state for part in parts):
            state[name.replace(".attn.query.", ".attn.qkv.")] = torch.cat([state.pop(part) for part in parts])
