"""The own ViT against timm's, with random weights; names, sizes and what does not fit."""

import warnings

import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors.vit import VisionTransformer

timm_vit = pytest.importorskip("timm.models.vision_transformer")

WIDTH, DEPTH, PATCH, GRID = 128, 3, 14, 4


def random_timm(**options) -> torch.nn.Module:
    """timm's ViT with every parameter random, so that nothing drops out of the comparison."""
    torch.manual_seed(0)
    model = timm_vit.VisionTransformer(
        img_size=GRID * PATCH, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=2, num_classes=0, **options
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return random_timm(init_values=1.0)


@pytest.fixture(scope="module")
def vit(reference: torch.nn.Module) -> VisionTransformer:
    return VisionTransformer.from_state_dict(reference.state_dict())


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(1))


def test_shape_is_taken_from_the_weights(vit) -> None:
    assert (vit.width, vit.depth, vit.patch_px, vit.heads) == (WIDTH, DEPTH, PATCH, 2)


@pytest.mark.parametrize(
    "options", [{"init_values": 1.0}, {"init_values": None}, {"qkv_bias": False}, {"mlp_ratio": 3}]
)
@torch.no_grad()
def test_last_block_equals_timm(options, pixels) -> None:
    reference = random_timm(**options)
    (found,) = VisionTransformer.from_state_dict(reference.state_dict())(pixels)
    expected = reference.forward_features(pixels)[:, 1:].unflatten(1, (GRID, GRID))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_every_block_equals_timm(reference, vit, pixels) -> None:
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, output: seen.append(output)) for block in reference.blocks]
    reference.forward_features(pixels)
    for hook in hooks:
        hook.remove()
    raw = vit(pixels, (0, 1, -1), normed=False)
    normed = vit(pixels, (2, 0))
    for found, expected in zip(raw, seen, strict=True):
        torch.testing.assert_close(found.flatten(1, 2), expected[:, 1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(normed[0].flatten(1, 2), reference.norm(seen[2])[:, 1:], atol=1e-4, rtol=1e-4)
    plain = torch.nn.functional.layer_norm(seen[0], (WIDTH,), eps=1e-6)
    torch.testing.assert_close(normed[1].flatten(1, 2), plain[:, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("facet", "part"), [("query", 0), ("key", 1), ("value", 2)])
@torch.no_grad()
def test_facets_equal_timms_attention(reference, vit, pixels, facet, part) -> None:
    seen: list[Tensor] = []
    hook = reference.blocks[1].attn.qkv.register_forward_hook(lambda _m, _i, output: seen.append(output))
    reference.forward_features(pixels)
    hook.remove()
    (found,) = vit(pixels, (1,), facet=facet)
    expected = seen[0][:, 1:, part * WIDTH : (part + 1) * WIDTH]
    torch.testing.assert_close(found.flatten(1, 2), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_overlapping_patches_hold_the_others(vit, pixels) -> None:
    whole, _, _ = vit.embed(pixels, PATCH)
    overlapping, rows, cols = vit.embed(pixels, PATCH // 2)
    assert (rows, cols) == (2 * GRID - 1, 2 * GRID - 1)
    bare = whole[:, 1:].unflatten(1, (GRID, GRID)) - vit.positions(GRID, GRID).unflatten(1, (GRID, GRID))
    finer = overlapping[:, 1:].unflatten(1, (rows, cols)) - vit.positions(rows, cols).unflatten(1, (rows, cols))
    torch.testing.assert_close(finer[:, ::2, ::2], bare, atol=1e-5, rtol=1e-4)


class TestPositions:
    def test_native_grid_is_untouched(self, vit) -> None:
        assert torch.equal(vit.positions(GRID, GRID), vit.pos_embed[:, 1:])

    def test_follow_the_axes_of_the_image(self, vit) -> None:
        # A ramp from top to bottom stays one on a wide grid: rows differ, columns do not.
        state = dict(vit.state_dict())
        ramp = torch.arange(float(GRID)).repeat_interleave(GRID)
        state["pos_embed"] = torch.cat([torch.tensor([99.0]), ramp])[None, :, None].expand(1, -1, WIDTH).clone()
        found = VisionTransformer.from_state_dict(state).positions(8, 5).unflatten(1, (8, 5))[0, ..., 0]
        torch.testing.assert_close(found, found[:, :1].expand(-1, 5))
        assert (found.diff(dim=0) > 0).all()

    def test_class_token_without_position(self, vit) -> None:
        state = dict(vit.state_dict())
        state["pos_embed"] = state["pos_embed"][:, 1:].clone()
        tokens, _, _ = VisionTransformer.from_state_dict(state).embed(torch.zeros(1, 3, 2 * PATCH, 3 * PATCH), PATCH)
        torch.testing.assert_close(tokens[:, :1], vit.cls_token)


@pytest.mark.parametrize("name", ["register_tokens", "reg_token"])
@torch.no_grad()
def test_registers_take_part_but_are_not_patches(vit, pixels, name) -> None:
    state = dict(vit.state_dict()) | {name: torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(3))}
    model = VisionTransformer.from_state_dict(state)
    tokens, rows, cols = model.embed(pixels, PATCH)
    assert tokens.shape[1] == 1 + 4 + rows * cols
    torch.testing.assert_close(tokens[:, 1:5], state[name].expand(2, -1, -1))
    (found,) = model(pixels)
    assert found.shape == (2, GRID, GRID, WIDTH)
    assert not torch.allclose(found, vit(pixels)[0])


@torch.no_grad()
def test_half_precision_weights_become_single(vit, pixels) -> None:
    state = {name: tensor.half() for name, tensor in vit.state_dict().items()}
    model = VisionTransformer.from_state_dict(state)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    torch.testing.assert_close(model(pixels)[0], vit(pixels)[0], atol=0.05, rtol=0.05)


def test_heads_and_mask_tokens_are_left_out(vit) -> None:
    extra = {
        "mask_token": torch.zeros(1, WIDTH),
        "head.weight": torch.zeros(10, WIDTH),
        "head.mlp.0.bias": torch.zeros(3),
    }
    VisionTransformer.from_state_dict(dict(vit.state_dict()) | extra)


def test_blocks_saved_in_chunks(vit) -> None:
    chunked = {name.replace("blocks.", "blocks.0."): tensor for name, tensor in vit.state_dict().items()}
    assert VisionTransformer.from_state_dict(chunked).depth == DEPTH


def split_attention(vit: VisionTransformer) -> dict[str, Tensor]:
    """Weights with a matrix each for query, key and value."""
    state: dict[str, Tensor] = {}
    for name, tensor in vit.state_dict().items():
        parts = dict(zip(("query", "key", "value"), tensor.chunk(3), strict=True)) if ".qkv." in name else {}
        state |= {name.replace(".qkv.", f".{part}."): value for part, value in parts.items()} or {name: tensor}
    return state


@torch.no_grad()
def test_query_key_and_value_may_be_apart(vit, pixels) -> None:
    apart = VisionTransformer.from_state_dict(split_attention(vit))
    torch.testing.assert_close(apart(pixels)[0], vit(pixels)[0])


class TestMisfits:
    def test_a_key_without_its_query_is_missed(self, vit) -> None:
        state = split_attention(vit)
        del state["blocks.0.attn.key.weight"]
        with pytest.raises(ExtractorError, match=r"blocks\.0\.attn\.qkv\.weight"):
            VisionTransformer.from_state_dict(state)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"blocks.1.attn.q_norm.weight": torch.zeros(64)}, "unknown parameters .*q_norm"),
            ({"blocks.2.norm1.weight": None}, "lack parameters .*blocks.2.norm1.weight"),
            ({"blocks.1.mlp.fc1.weight": torch.zeros(3, 3)}, "ill-fitting parameters .*blocks.1.mlp.fc1.weight"),
            ({"patch_embed.proj.weight": None}, "lack patch_embed.proj.weight"),
            ({"cls_token": None}, "lack cls_token"),
            ({"pos_embed": torch.zeros(1, 13, WIDTH)}, "13 entries"),  # no square
        ],
    )
    def test_are_named(self, vit, change, words) -> None:
        state = {name: tensor for name, tensor in (dict(vit.state_dict()) | change).items() if tensor is not None}
        with pytest.raises(ExtractorError, match=words):
            VisionTransformer.from_state_dict(state)

    def test_other_networks(self) -> None:
        with pytest.raises(ExtractorError, match="ViT"):
            VisionTransformer.from_state_dict({"conv1.weight": torch.zeros(1)})

    def test_width_that_has_no_whole_heads(self) -> None:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tiny = timm_vit.VisionTransformer(img_size=28, patch_size=14, embed_dim=32, depth=1, num_heads=2)
        with pytest.raises(ExtractorError, match="width 32"):
            VisionTransformer.from_state_dict(tiny.state_dict())
