"""CLIP's dense path against open_clip's own output, on a small model of open_clip's own classes."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.clip import (
    ClipConfig,
    ClipExtractor,
    encode_ensemble,
    last_block_values,
    position_embedding,
    prompt_templates,
    tokens_before_last_block,
    value_path,
)
from f3rm_ext.features.extractors.clip_models import ClipModel, load_clip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchvision's import warns on new versions of torch.
    import open_clip

CPU = torch.device("cpu")
WIDTH, PATCH, GRID, DIM = 128, 16, 4, 48
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
VISION = {"image_size": GRID * PATCH, "layers": 3, "width": WIDTH, "patch_size": PATCH}
MODELS = {
    "ViT-unit": {"embed_dim": DIM, "vision_cfg": VISION, "text_cfg": TEXT},
    "ViT-unit-quickgelu": {"embed_dim": DIM, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "ViT-unit-scaled": {"embed_dim": DIM, "vision_cfg": VISION | {"ls_init_value": 0.3}, "text_cfg": TEXT},
    "ViT-unit-no-ln-pre": {"embed_dim": DIM, "vision_cfg": VISION | {"no_ln_pre": True}, "text_cfg": TEXT},
}


@pytest.fixture(autouse=True, scope="module")
def models() -> Iterator[None]:
    """Adds the small models to open_clip's for the time of this module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, config in MODELS.items():
            patch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
        yield


def build(name: str) -> Any:
    """The model with all parameters of its image tower random."""
    model = load_clip(ClipModel.from_name(name), "random", None)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.visual.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter == 1))
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    with torch.no_grad():
        return build(request.param)


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(1))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class TestAgainstOpenClip:
    @torch.no_grad()
    def test_tokens_before_the_last_block(self, model, pixels) -> None:
        seen: list[Tensor] = []
        last = model.visual.transformer.resblocks[-1]
        hook = last.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        model.encode_image(pixels)
        hook.remove()
        torch.testing.assert_close(tokens_before_last_block(model.visual, pixels), seen[0], atol=1e-4, rtol=1e-4)

    @torch.no_grad()
    def test_value_path_is_attention_over_one_token(self, model, pixels) -> None:
        # The softmax over a single token is 1: attention is its value path there.
        block = model.visual.transformer.resblocks[-1]
        tokens = tokens_before_last_block(model.visual, pixels)
        single = tokens.flatten(0, 1)[:, None]
        expected = block.ls_1(block.attention(block.ln_1(single)))
        found = last_block_values(block, tokens).flatten(0, 1)[:, None]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    @torch.no_grad()
    def test_dense_output_equals_the_pooled_one_where_tokens_attend_to_themselves(self, pixels) -> None:
        # Bend open_clip's model until its own forward pass is the value path: each token attends to itself alone,
        # and residual, MLP and class token drop out. Its own tokens output must then be the dense features.
        model = build("ViT-unit")
        visual = model.visual
        dense = value_path(visual, pixels)

        class SelfOnly(torch.nn.Module):
            def __init__(self, block: Any) -> None:
                super().__init__()
                self.block = block

            def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
                own = torch.full((x.shape[1], x.shape[1]), -torch.inf).fill_diagonal_(0)
                return self.block.attention(self.block.ln_1(x), attn_mask=own)

        visual.transformer.resblocks[-1] = SelfOnly(visual.transformer.resblocks[-1])
        visual.output_tokens = True
        _, tokens = visual(pixels)
        torch.testing.assert_close(dense.flatten(1, 2), tokens @ visual.proj, atol=1e-4, rtol=1e-4)


class TestPositions:
    def test_native_grid_is_untouched(self, model) -> None:
        assert torch.equal(position_embedding(model.visual, GRID, GRID), model.visual.positional_embedding)

    @torch.no_grad()
    def test_follow_the_axes_of_the_image(self) -> None:
        visual = build("ViT-unit").visual
        ramp = torch.arange(float(GRID)).repeat_interleave(GRID)
        visual.positional_embedding.copy_(torch.cat([torch.tensor([99.0]), ramp])[:, None].expand(-1, WIDTH))
        found = position_embedding(visual, 7, 5)
        assert (found[0] == 99).all()
        grid = found[1:, 0].unflatten(0, (7, 5))
        torch.testing.assert_close(grid, grid[:, :1].expand(-1, 5))
        assert (grid.diff(dim=0) > 0).all()


@pytest.fixture
def extractor() -> ClipExtractor:
    return ClipExtractor(ClipConfig(model="ViT-unit", pretrained="random", short_side_px=64), device=CPU)


class TestExtractor:
    @pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 100), (333, 100), (32, 250)])
    def test_grid_tiles_the_image(self, extractor, height, width) -> None:
        (features,) = extractor.extract([noise(height, width)])
        grid = extractor.patch_grid(height, width)
        assert features.shape == (grid.rows, grid.cols, DIM)
        assert features.dtype == torch.float32
        assert min(grid.rows, grid.cols) == GRID
        assert grid.rows * grid.stride_px[0] == pytest.approx(height)
        assert grid.cols * grid.stride_px[1] == pytest.approx(width)

    def test_f3rms_geometry(self) -> None:
        extractor = ClipExtractor(ClipConfig(pretrained="random"), device=CPU)
        grid = extractor.patch_grid(720, 1280)
        assert (grid.rows, grid.cols) == (24, 43)  # 597 px round to 43 patches; F3RM cuts to 42
        assert extractor.dim == 768

    def test_features_are_the_models(self, extractor) -> None:
        image = noise(64, 80)
        (found,) = extractor.extract([image])
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        pixels = preprocess.normalise(pixels, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        torch.testing.assert_close(found, value_path(extractor.model.visual, pixels)[0], atol=1e-4, rtol=1e-4)

    def test_random_weights_are_the_same_each_time_and_leave_the_generator_alone(self) -> None:
        config = ClipConfig(model="ViT-unit", pretrained="random", short_side_px=64)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        first, second = (ClipExtractor(config, device=CPU).extract([noise(64, 64)])[0] for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.rand(3), expected)
        assert "random" in ClipExtractor(config, device=CPU).identity.weights


class TestText:
    def test_agrees_with_open_clip(self, extractor) -> None:
        prompts = ["a red chair", "the lamp on the left"]
        with torch.no_grad():
            expected = extractor.model.encode_text(open_clip.tokenize(prompts), normalize=True)
        found = extractor.encode_text(prompts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert not found.is_inference()

    def test_templates_change_queries_but_not_the_identity_of_the_features(self) -> None:
        plain, ensemble = (
            ClipExtractor(ClipConfig(model="ViT-unit", pretrained="random", templates=templates), device=CPU)
            for templates in ("none", "simple")
        )
        assert plain.identity == ensemble.identity
        assert not torch.allclose(plain.encode_text(["chair"]), ensemble.encode_text(["chair"]))

    def test_no_prompts(self, extractor) -> None:
        assert extractor.encode_text([]).shape == (0, DIM)


class TestWeights:
    def test_local_file(self, tmp_path) -> None:
        with torch.no_grad():
            model = build("ViT-unit")
        path = tmp_path / "mine.pt"
        torch.save(model.state_dict(), path)
        config = ClipConfig(model="ViT-unit", pretrained=str(path), short_side_px=64)
        extractor = ClipExtractor(config, device=CPU)
        assert torch.equal(extractor.model.visual.proj, model.visual.proj)
        random = ClipExtractor(ClipConfig(model="ViT-unit", pretrained="random", short_side_px=64), device=CPU)
        assert extractor.identity.key() != random.identity.key()

    def test_weights_are_looked_up_at_once_but_loaded_when_needed(self, tmp_path) -> None:
        path = tmp_path / "broken.pt"
        path.write_bytes(b"nothing of use")
        extractor = ClipExtractor(ClipConfig(model="ViT-unit", pretrained=str(path)), device=CPU)
        assert extractor.dim == DIM
        assert extractor.identity.weights
        with pytest.raises(ExtractorError, match="ViT-unit"):
            extractor.extract([noise(64, 64)])

    def test_weights_of_another_model(self, tmp_path) -> None:
        path = tmp_path / "other.pt"
        torch.save({"visual.proj": torch.zeros(3, 3)}, path)
        extractor = ClipExtractor(ClipConfig(model="ViT-unit", pretrained=str(path)), device=CPU)
        with pytest.raises(ExtractorError, match="model= and pretrained=") as caught:
            extractor.encode_text(["chair"])
        assert "\n" not in str(caught.value)

    def test_openais_archive_is_read_and_gets_quick_gelu(self, tmp_path, pixels) -> None:
        with torch.no_grad():
            model = build("ViT-unit-quickgelu")
        for name in ("input_resolution", "context_length", "vocab_size"):
            vars(model).pop(name, None)
            model.register_buffer(name, torch.tensor(1))
        del model.attn_mask  # Not in OpenAI's archives.
        path = tmp_path / "ViT-unit.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, but it is what OpenAI published.
            torch.jit.save(torch.jit.trace_module(model, {"encode_image": pixels}), path)
        loaded = load_clip(ClipModel.from_name("ViT-unit"), str(path), path)
        with torch.no_grad():
            torch.testing.assert_close(loaded.encode_image(pixels), model.encode_image(pixels), atol=1e-4, rtol=1e-4)

    def test_tags_trained_with_quick_gelu_get_it(self, tmp_path, pixels, monkeypatch) -> None:
        with torch.no_grad():
            model = build("ViT-unit-quickgelu")
        path = tmp_path / "w.pt"
        torch.save(model.state_dict(), path)
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "ViT-unit", {"openai": {"quick_gelu": True}})
        described = ClipModel.from_name("ViT-unit")
        with torch.no_grad():
            expected = model.encode_image(pixels)
            torch.testing.assert_close(load_clip(described, "openai", path).encode_image(pixels), expected)
            assert not torch.allclose(load_clip(described, "plain", path).encode_image(pixels), expected, atol=1e-3)
            options = {"model": "ViT-unit", "pretrained": str(path)}
            files = [
                ClipExtractor(ClipConfig(**options, tag=tag), device=torch.device("cpu")) for tag in ("openai", "")
            ]
            same = [torch.allclose(file.model.encode_image(pixels), expected, atol=1e-5) for file in files]
            assert same == [True, False]

    def test_sizes_are_read_without_importing_open_clip(self, monkeypatch) -> None:
        """Which would double the time of a plan; what is read is the config that open_clip gives."""
        configs = {name: open_clip.get_model_config(name) for name in ("ViT-B-16", "ViT-L-14-336", "ViT-H-14")}
        monkeypatch.delattr(open_clip, "get_model_config")
        for name, config in configs.items():
            model = ClipModel.from_name(name)
            assert (model.dim, model.patch_px) == (config["embed_dim"], config["vision_cfg"]["patch_size"])

    def test_places_of_published_weights(self) -> None:
        weights = ClipModel.from_name("ViT-L-14-336").weights("openai")
        assert weights is not None
        repository = "timm/vit_large_patch14_clip_336.openai"
        files = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        assert weights.hub_files == tuple((repository, name) for name in files)
        assert weights.urls[0].endswith("/ViT-L-14-336px.pt")


class TestMistakes:
    @pytest.mark.parametrize(
        ("model", "words"),
        [
            ("ViT-B16", "no model 'ViT-B16'.*did you mean ViT-B-16"),
            ("RN50", "is a ResNet"),
            ("ViT-B-16-SigLIP", "is timm's vit_base_patch16_siglip_224"),
            ("coca_ViT-B-32", "attentional pooling"),
        ],
    )
    def test_models_without_value_path(self, model, words) -> None:
        with pytest.raises(ExtractorError, match=words):
            ClipExtractor(ClipConfig(model=model, pretrained="random"), device=CPU)

    def test_unknown_tag_lists_the_known_ones(self) -> None:
        with pytest.raises(ExtractorError, match="laion2b_s34b_b88k") as caught:
            ClipExtractor(ClipConfig(model="ViT-B-16", pretrained="laion2b_s34b"), device=CPU)
        assert "did you mean" in str(caught.value)

    def test_missing_file(self) -> None:
        with pytest.raises(WeightsNotFoundError, match="correct pretrained="):
            ClipExtractor(ClipConfig(model="ViT-B-16", pretrained="./nowhere.bin"), device=CPU)

    def test_too_small_a_side(self) -> None:
        with pytest.raises(ExtractorError, match="short_side_px is 16"):
            ClipConfig(short_side_px=16)


# Prompt ensembles.


def encode_by_length(sentences):
    """Unit vectors on the circle, by the sentence's length."""
    angle = torch.tensor([0.1 * len(sentence) for sentence in sentences])
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def test_each_prompt_is_the_mean_direction_over_its_own_sentences() -> None:
    found = encode_ensemble(encode_by_length, ["a", "abcd"], ("{}", "{}{}"))
    # Lengths 1 and 2 have the mean direction 0.15; 4 and 8 have 0.6.
    expected = torch.tensor([0.15, 0.6])
    torch.testing.assert_close(found, torch.stack([expected.cos(), expected.sin()], dim=-1))


def test_braces_in_a_prompt_are_text() -> None:
    seen: list[str] = []

    def record(sentences):
        seen.extend(sentences)
        return encode_by_length(sentences)

    encode_ensemble(record, ["a {0} b"], ("the {}.",))
    assert seen == ["the a {0} b."]


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("photo", 1), ("simple", 7), ("imagenet", 80)])
def test_template_sets(name, count) -> None:
    templates = prompt_templates(name)
    assert len(templates) == count and all(template.count("{}") == 1 for template in templates)
