"""The network: published sizes, names of released checkpoints, and what it depends on."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import CheckpointError
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN, IMAGENET_STD, normalise
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.diffusion import checkpoint
from f3rm_ext.sfm.diffusion.dense_head import DenseHead, ResidualUnit
from f3rm_ext.sfm.diffusion.encoder import EncodedImages, FeatureCache, ImageEncoder
from f3rm_ext.sfm.diffusion.model import SIZES, ModelSize, RayDiffuser, Stage, masked_loss, upsample
from f3rm_ext.sfm.diffusion.plan import build_encoder, set_trained
from f3rm_ext.sfm.diffusion.transformer import number_codes

SMALL = ModelSize(width=64, depth=4, heads=1, head_width=16)


def published(stage: str) -> RayDiffuser:
    with torch.device("meta"):
        return RayDiffuser(build_encoder(), SIZES["published"], stage)  # type: ignore[arg-type]


def released_shapes(
    dense: bool, width: int = 1152, depth: int = 16, feat: int = 384, head: int = 256
) -> dict[str, tuple]:
    """Names and shapes of a released checkpoint, written down from the published architecture."""

    def linear(name: str, rows: int, cols: int) -> dict[str, tuple]:
        return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}

    def conv(name: str, rows: int, cols: int, side: int) -> dict[str, tuple]:
        return {f"{name}.weight": (rows, cols, side, side), f"{name}.bias": (rows,)}

    shapes: dict[str, tuple] = {"noise_scheduler.betas": (100,), "noise_scheduler.alphas_cumprod": (100,)}
    dino = "feature_extractor.model."
    with torch.device("meta"):
        vit = VisionTransformer.from_size(feat, 12, 37, 14, layer_scale=True)
    shapes |= {dino + name: tuple(value.shape) for name, value in vit.state_dict().items()}
    shapes[dino + "mask_token"] = (1, feat)
    predictor = "ray_predictor."
    shapes |= conv(predictor + "x_embedder.proj", width, 2 * feat + 2, 1)
    shapes[predictor + "x_pos_enc.image_pos_table"] = (1, 8, width)
    shapes[predictor + "x_pos_enc.token_pos_table"] = (1, 256, width)
    shapes |= linear(predictor + "t_embedder.mlp.0", width, 256) | linear(predictor + "t_embedder.mlp.2", width, width)
    for index in range(depth):
        block = f"{predictor}blocks.{index}."
        shapes |= linear(block + "attn.qkv", 3 * width, width) | linear(block + "attn.proj", width, width)
        shapes |= linear(block + "mlp.fc1", 4 * width, width) | linear(block + "mlp.fc2", width, 4 * width)
        shapes |= linear(block + "adaLN_modulation.1", 6 * width, width)
    shapes |= linear(predictor + "final_layer.linear", 8, width)
    shapes |= linear(predictor + "final_layer.adaLN_modulation.1", 2 * width, width)
    if not dense:
        return shapes | linear("scratch.input_conv", feat, 9)
    shapes |= conv("scratch.input_conv", feat, 9, 16)
    for level, channels in enumerate((feat, feat, width, width), start=1):
        shapes[f"scratch.layer{level}_rn.weight"] = (head, channels, 3, 3)
        fusion = f"scratch.refinenet{level}."
        shapes |= conv(fusion + "out_conv", head, head, 1)
        for unit in ("resConfUnit1", "resConfUnit2"):
            shapes |= conv(f"{fusion}{unit}.conv1", head, head, 3) | conv(f"{fusion}{unit}.conv2", head, head, 3)
        timed = fusion + "resConfUnit2."
        shapes |= linear(timed + "t_embedder.mlp.0", head, 256) | linear(timed + "t_embedder.mlp.2", head, head)
        shapes |= linear(timed + "adaLN_modulation.1", 3 * head, head)
    shapes |= conv("scratch.output_conv.0", head // 2, head, 3) | conv("scratch.output_conv.2", 32, head // 2, 3)
    shapes |= conv("scratch.output_conv.4", 8, 32, 1)
    for index in range(2):
        shapes |= linear(f"project_opers.{index}.project.0", feat, 2 * feat)
    return shapes


@pytest.mark.parametrize(("stage", "millions"), [("sparse", 409.7), ("dense", 429.6)])
def test_published_sizes_have_the_published_numbers_of_parameters(stage: str, millions: float) -> None:
    model = published(stage)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / 1e6 - millions) < 0.1
    block = next(iter(model.transformer.blocks))
    assert abs(sum(parameter.numel() for parameter in block.parameters()) / 1e6 - 23.905) < 1e-3
    assert abs(sum(parameter.numel() for parameter in model.transformer.parameters()) / 1e6 - 387.66) < 0.02


@pytest.mark.parametrize("dense", [False, True])
def test_every_parameter_of_a_released_checkpoint_has_its_place(dense: bool) -> None:
    released = {name: torch.empty(shape, device="meta") for name, shape in released_shapes(dense).items()}
    state = checkpoint.to_our_names(released)
    expected = published("dense" if dense else "sparse").state_dict()
    assert state.keys() == expected.keys()
    assert all(state[name].shape == expected[name].shape for name in expected)
    size, stage = checkpoint.model_size(state)
    assert stage == ("dense" if dense else "sparse") and (size.width, size.depth, size.heads) == (1152, 16, 16)


def test_a_released_file_becomes_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    released = {name: torch.randn(shape) for name, shape in released_shapes(False, 144, 4, 64).items()}
    # As the released training writes it: the weights beside other plain values.
    torch.save(
        {"state_dict": released, "iteration": 7, "elapsed": 1.5, "gradscaler": {"scale": 2.0}}, tmp_path / "a.pth"
    )
    model = checkpoint.build_model(checkpoint.read_weights(tmp_path / "a.pth"))
    assert model.size.heads == 2 and model.stage == "sparse"
    torch.testing.assert_close(
        model.transformer.input.weight, released["ray_predictor.x_embedder.proj.weight"][..., 0, 0]
    )
    first = model.transformer.blocks[0]
    torch.testing.assert_close(first.modulation.bias, released["ray_predictor.blocks.0.adaLN_modulation.1.bias"])
    torch.testing.assert_close(model.encoder.vit.pos_embed, released["feature_extractor.model.pos_embed"])


def test_bad_checkpoints_are_told_in_one_sentence(tmp_path: Path, small_vit: VisionTransformer) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pth"):
        checkpoint.read_weights(tmp_path / "none.pth")
    (tmp_path / "bad.pth").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(CheckpointError, match=r"bad\.pth"):
        checkpoint.read_weights(tmp_path / "bad.pth")
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="DiffusionSfM"):
        checkpoint.build_model(checkpoint.read_weights(tmp_path / "other.pth"))
    state = RayDiffuser(small_vit, SMALL, "sparse").state_dict()
    state.pop("transformer.input.bias")
    with pytest.raises(CheckpointError, match=r"transformer\.input\.bias"):
        checkpoint.build_model(state)


def inputs(model: RayDiffuser, batch: int = 2, images: int = 3, patches: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    cells = patches * model.cells
    photos = torch.rand(batch, images, 3, 14 * patches, 14 * patches, generator=generator)
    noisy = torch.randn(batch, images, 8, cells, cells, generator=generator)
    ndc = torch.rand(batch, images, 2, patches, patches, generator=generator)
    return photos, noisy, torch.tensor([3, 80]), ndc


MODELS: list[tuple[Stage, bool]] = [("sparse", False), ("dense", False), ("dense", True)]
"""Stage, and whether the head's prediction is added to the sparse one."""


def awake(model: RayDiffuser) -> RayDiffuser:
    """The model with blocks that are not the identity any more."""
    for block in model.transformer.blocks:
        torch.nn.init.normal_(block.modulation.weight, std=0.1)
        torch.nn.init.normal_(block.modulation.bias, std=0.5)
    return model.eval()


@pytest.mark.parametrize(("stage", "residual"), MODELS)
def test_predictions_depend_on_everything(small_vit: VisionTransformer, stage: Stage, residual: bool) -> None:
    torch.manual_seed(0)
    model = awake(RayDiffuser(small_vit, SMALL, stage, residual))
    if model.head is not None:  # that of a residual begins at 0
        torch.nn.init.normal_(model.head.output[-1].weight)  # type: ignore[arg-type]
    photos, noisy, steps, ndc = inputs(model)
    with torch.no_grad():
        encoded = model.encoder(photos)
        made = model(noisy, steps, encoded, ndc)
        assert made.shape == noisy.shape
        known = torch.ones_like(noisy[:, :, 0])
        torch.testing.assert_close(model(noisy, steps, encoded, ndc, known), made)
        known[0, 0, 0, 0] = 0
        changes = {
            "noisy": model(noisy + 0.1, steps, encoded, ndc),
            "steps": model(noisy, steps + 1, encoded, ndc),
            "ndc": model(noisy, steps, encoded, ndc + 0.1),
            "images": model(noisy, steps, model.encoder(1 - photos), ndc),
            "known": model(noisy, steps, encoded, ndc, known),
        }
        other = noisy.clone()
        other[:, 2] += 1
        changes["other images"] = model(other, steps, encoded, ndc)[:, :2]
        again = checkpoint.build_model(model.state_dict()).eval()
        assert torch.equal(again(noisy, steps, encoded, ndc), made), "a checkpoint tells what its head predicts"
    for name, changed in changes.items():
        assert (changed[0] - made[0, : changed.shape[1]]).abs().max() > 1e-6, name
    assert torch.equal(changes["known"][1], made[1]), "scenes of a batch are apart"


def test_a_dense_model_with_a_residual_head_predicts_at_first_what_the_sparse_one_does(
    small_vit: VisionTransformer,
) -> None:
    torch.manual_seed(0)
    sparse, dense = awake(RayDiffuser(small_vit, SMALL, "sparse")), RayDiffuser(small_vit, SMALL, "dense", True).eval()
    checkpoint.dense_from_sparse(dense, sparse.state_dict())
    photos, noisy, steps, ndc = inputs(dense)
    known = (torch.rand(noisy[:, :, 0].shape, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    middle = (..., slice(8, None, 16), slice(8, None, 16))
    with torch.no_grad():
        encoded = dense.encoder(photos)
        wanted = sparse(noisy[middle], steps, encoded, ndc, known[middle])
        made = dense(noisy, steps, encoded, ndc, known)
        torch.testing.assert_close(made, upsample(wanted), atol=1e-6, rtol=1e-5)
        torch.nn.init.normal_(dense.head.output[-1].weight)  # type: ignore[arg-type]
        assert (dense(noisy, steps, encoded, ndc, known) - made).abs().max() > 1e-3, "the head adds to it"


@pytest.mark.parametrize("residual", [False, True])
def test_residual_heads_see_tokens_of_any_size_alike(residual: bool) -> None:
    torch.manual_seed(0)
    head = DenseHead(6, 6, 8, 8, residual)
    for parameter in head.output[-1].parameters():
        torch.nn.init.normal_(parameter)
    taps = [torch.randn(1, 2, 6, 2, 2) for _ in range(2)]
    encoded = EncodedImages(torch.randn(1, 2, 6, 2, 2), torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 6))
    with torch.no_grad():
        made, large = (head(encoded, [size * tap for tap in taps], torch.tensor([3])) for size in (1, 1000))
    assert torch.allclose(made, large, atol=1e-2) == residual


def test_maps_are_upsampled_about_the_centres_of_their_cells() -> None:
    ramp = torch.arange(3.0).expand(1, 1, 8, 3, 3)
    larger = upsample(ramp)[0, 0, 0]
    assert larger.shape == (48, 48)
    # Cell i of 16 per patch lies at (i + 1/2) / 16 - 1/2, in units of patches from the centre of the first one.
    wanted = ((torch.arange(48) + 0.5) / 16 - 0.5).clamp(0, 2)
    torch.testing.assert_close(larger, wanted.expand(48, 48))


def test_a_dense_model_begins_as_a_sparse_one(small_vit: VisionTransformer) -> None:
    torch.manual_seed(0)
    sparse, dense = (RayDiffuser(small_vit, SMALL, stage) for stage in ("sparse", "dense"))
    head = {name: value.clone() for name, value in dense.state_dict().items() if name.startswith("head.")}
    checkpoint.dense_from_sparse(dense, sparse.state_dict())
    maps = torch.randn(1, 9, 32, 32)
    means = torch.nn.functional.avg_pool2d(maps, 16)
    torch.testing.assert_close(dense.rays(maps), sparse.rays(means), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(dense.transformer.input.weight, sparse.transformer.input.weight)
    assert all(torch.equal(dense.state_dict()[name], value) for name, value in head.items())
    with pytest.raises(CheckpointError, match="dense"):
        checkpoint.dense_from_sparse(dense, dense.state_dict())
    with pytest.raises(CheckpointError, match="same size"):
        checkpoint.dense_from_sparse(RayDiffuser(small_vit, ModelSize(128, 4, 2, 16), "dense"), sparse.state_dict())


@pytest.mark.parametrize(("stage", "residual"), MODELS)
@pytest.mark.parametrize("frozen", [False, True])
def test_exactly_what_is_trained_gets_a_gradient(
    small_vit: VisionTransformer, stage: Stage, residual: bool, frozen: bool
) -> None:
    """Processes that average gradients wait for every trained parameter."""
    torch.manual_seed(0)
    model = RayDiffuser(small_vit, SMALL, stage, residual)
    set_trained(model, frozen, frozen)
    photos, noisy, steps, ndc = inputs(model)
    model(noisy, steps, model.encoder(photos), ndc).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_codes_of_numbers() -> None:
    codes = number_codes(3, 4, 100.0, torch.zeros(1))
    wanted = [[0, 1, 0, 1], [math.sin(1), math.cos(1), math.sin(0.1), math.cos(0.1)]]
    torch.testing.assert_close(codes[:2], torch.tensor(wanted))


def test_the_loss_is_a_mean_over_known_and_unknown() -> None:
    clean = torch.zeros(1, 2, 8, 2, 2)
    known = torch.zeros(1, 2, 2, 2)
    known[0, 0, 0, 0] = 1
    predicted = torch.full_like(clean, 3.0)
    assert float(masked_loss(predicted, clean, known)) == pytest.approx(9 / 8)
    assert float(masked_loss(predicted, clean, known, absolute=True)) == pytest.approx(3 / 8)


def test_the_order_of_images_and_patches_counts(small_vit: VisionTransformer) -> None:
    torch.manual_seed(0)
    model = RayDiffuser(small_vit, SMALL, "sparse").eval()
    photos, noisy, steps, ndc = inputs(model)
    swapped = [0, 2, 1]
    with torch.no_grad():
        made = model(noisy, steps, model.encoder(photos), ndc)
        other = model(noisy[:, swapped], steps, model.encoder(photos[:, swapped]), ndc[:, swapped])
        assert not torch.allclose(other[:, swapped], made, atol=1e-4), "images have numbers"
        encoded = model.encoder(photos)
        noisier = torch.cat([noisy[:, :2], noisy[:, 2:] + 1], dim=1)
        assert torch.equal(model(noisier, steps, encoded, ndc)[:, :2], made[:, :2]), "blocks begin as the identity"
        mirrored = dataclasses.replace(encoded, patches=encoded.patches.flip(-1))
        other = model(noisy.flip(-1), steps, mirrored, ndc.flip(-1))
        assert not torch.allclose(other.flip(-1), made, atol=1e-4), "patches have numbers"


def test_the_encoder_is_the_vit(small_vit: VisionTransformer) -> None:
    photos = torch.rand(1, 2, 3, 42, 42)
    pixels = normalise(photos[0], IMAGENET_MEAN, IMAGENET_STD)
    with torch.no_grad():
        encoded = ImageEncoder(small_vit)(photos)
        (wanted,) = small_vit(pixels)
        (middle,) = small_vit(pixels, [0], normed=False)
    torch.testing.assert_close(encoded.patches[0].permute(0, 2, 3, 1), wanted)
    torch.testing.assert_close(encoded.middle[0, :, 1:].unflatten(1, (3, 3)), middle)


def test_positions_are_interpolated_as_dinov2_does() -> None:
    """Its scale is (16 + 0.1) / 37: a ramp over the 37 cells is read at (i + 1/2) · 37 / 16.1 - 1/2."""
    vit = VisionTransformer.from_size(64, 1, 37, 14)
    ramp = torch.arange(37.0).repeat(37)
    vit.pos_embed.data[0, 1:] = ramp[:, None]
    found = ImageEncoder(vit)._positions(16, 16)[0, 1:, 0].unflatten(0, (16, 16))[8]
    wanted = (torch.arange(16) + 0.5) * 37 / 16.1 - 0.5
    # Bicubic interpolation bends a ramp by up to 0.05; without the 0.1 the last cells would be 0.2 off.
    torch.testing.assert_close(found[1:-1], wanted[1:-1], atol=0.06, rtol=0)


def test_the_step_scales_shifts_and_gates_a_unit_of_the_head() -> None:
    unit = ResidualUnit(2, conditioned=True)
    with torch.no_grad():
        for conv in (unit.conv1, unit.conv2):
            conv.weight.zero_()[:, :, 1, 1] = torch.eye(2)  # hands on what it gets
            conv.bias.zero_()  # type: ignore[union-attr]
        unit.modulation.weight.zero_()
        unit.modulation.bias.copy_(torch.tensor([0.5, -0.25, 1.0, 2.0, 3.0, -4.0]))  # shifts, scales, gates
        found = unit(torch.tensor([2.0, 5.0]).view(1, 2, 1, 1), torch.tensor([7]))
    moved = torch.tensor([2 * (1 + 1) + 0.5, 5 * (1 + 2) - 0.25])
    torch.testing.assert_close(found.flatten(), moved * torch.tensor([1 + 3.0, 1 - 4.0]))


def test_each_image_is_encoded_once(small_vit: VisionTransformer) -> None:
    encoder = ImageEncoder(small_vit)
    seen: list[int] = []
    encoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    photos = torch.rand(4, 3, 42, 42, generator=torch.Generator().manual_seed(0))
    for dense in (False, True):
        seen.clear()
        cache = FeatureCache(encoder, dense)
        for numbers in ([[0, 1], [1, 2]], [[3, 0], [2, 2]]):
            found = cache.encode(photos[torch.tensor(numbers)], torch.tensor(numbers))
            wanted = encoder(photos[torch.tensor(numbers)])
            torch.testing.assert_close(found.patches, wanted.patches)
            if dense:
                torch.testing.assert_close(found.middle, wanted.middle)
                torch.testing.assert_close(found.last, wanted.last)
        assert seen.count(1) == 4, "one image at a time"
        kept = sum(value.numel() * 4 for part in cache._known.values() for value in vars(part).values())
        assert kept == 4 * FeatureCache.bytes_per_image(encoder.width, 3, dense)
