"""The names under which ViT weights are published, brought to one: DINO's and timm's, with fused query-key-value."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from f3rm_ext.errors import ExtractorError

_IGNORED = re.compile(r"^(head|head_dist|fc_norm|pooler|classifier)\.|^(mask_token|dist_token)$|^projection_head\.")
"""Parts that dense features do not pass through."""

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


def block_count(state: Mapping[str, Tensor]) -> int:
    """Number of transformer blocks in a state dict with common names."""
    return 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))


def to_common_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under timm's names; classifier heads and mask tokens are left out.

    Raises:
        ExtractorError: The weights are not of a ViT.
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
