"""ViT backbones that train stably with MoCo v3 (arXiv 2104.02057, section 4)."""

import math
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from f3rm_ext.features.extractors.vit import VisionTransformer

if TYPE_CHECKING:
    from f3rm_ext.features.extractors.vit import Block

PATCH_PX = 16
WIDTHS = {"vit_small": 384, "vit_base": 768}
"""Width of the tokens; heads are 64 wide, as in DeiT and DINO."""
_DEPTH = 12


class VitBackbone(nn.Module):
    """A ViT with patches of 16 px and timm's parameter names, which returns the class token.

    Position embeddings are fixed sines and cosines, and the patch projection keeps its random values: training it
    makes the gradients of the first layer spike.
    """

    def __init__(self, architecture: str, image_size: int, use_grad_checkpointing: bool = False) -> None:
        super().__init__()
        self.dim, self.use_grad_checkpointing = WIDTHS[architecture], use_grad_checkpointing
        side = image_size // PATCH_PX
        self.network = VisionTransformer.from_size(self.dim, _DEPTH, side, PATCH_PX)
        self.register_state_dict_post_hook(_remove_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)
        self._draw_weights()
        self.network.pos_embed.data[:, 1:] = position_code(side, self.dim)
        self.network.pos_embed.requires_grad_(False)
        self.network.patch_embed.requires_grad_(False)

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch feat"]:
        """Returns the class token after the last block and the final layer norm."""
        tokens, _, _ = self.network.embed(images, PATCH_PX)
        for block in self.network.blocks:
            if self.use_grad_checkpointing and self.training and torch.is_grad_enabled():
                tokens = cast(Tensor, checkpoint(block, tokens, use_reentrant=False))
            else:
                tokens = block(tokens)
        return self.network.norm(tokens)[:, 0]

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draws Xavier-uniform weights, where query, key and value count as three matrices."""
        projection = self.network.patch_embed.proj
        limit = math.sqrt(6 / (3 * PATCH_PX**2 + self.dim))
        projection.weight.uniform_(-limit, limit)
        nn.init.zeros_(cast(Tensor, projection.bias))
        nn.init.normal_(self.network.cls_token, std=1e-6)
        for item in self.network.blocks:
            block = cast("Block", item)
            limit = math.sqrt(6 / (2 * self.dim))
            block.attn.qkv.weight.uniform_(-limit, limit)
            for layer in (block.attn.proj, *block.mlp.children()):
                nn.init.xavier_uniform_(cast(nn.Linear, layer).weight)
            for layer in (block.attn.qkv, block.attn.proj, *block.mlp.children()):
                nn.init.zeros_(cast(nn.Linear, layer).bias)


def position_code(side: int, width: int) -> Float[Tensor, "patches width"]:
    """Returns sines and cosines of column and row in a square grid of patches, a quarter of the channels each."""
    rate = 10_000 ** (-torch.arange(width // 4) / (width / 4))
    rows, cols = (axis.flatten()[:, None] * rate for axis in torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"))
    return torch.cat([cols.sin(), cols.cos(), rows.sin(), rows.cos()], dim=1)


def _remove_prefix(_module: nn.Module, state: dict, prefix: str, _metadata: dict) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}network.")]:
        state[prefix + name.removeprefix(f"{prefix}network.")] = state.pop(name)


def _add_prefix(_module: nn.Module, state: dict, prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}network.{name.removeprefix(prefix)}"] = state.pop(name)
