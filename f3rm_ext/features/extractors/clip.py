"""CLIP through open_clip: dense image features by MaskCLIP's value path, and text embeddings for queries.

Dense features are those of MaskCLIP (Zhou et al. 2022, "Extract Free Dense Labels from CLIP", arXiv 2112.01071), as in
F3RM: the last block is reduced to the value path ``out_proj(v_proj(ln_1(x)))``, without residual and MLP, and followed
by ``ln_post`` and the projection into the space shared with text.

Prompt ensembles put a prompt into several sentences and average their embeddings (Radford et al. 2021, §3.1.4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import ExtractorIdentity, FeatureSize, PatchGrid
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.clip_models import RANDOM, ClipModel, load_clip
from f3rm_ext.features.extractors.weights import NO_WEIGHTS, WeightsStatus, file_hash, resolve, status

_TEMPLATES = {
    "none": ("{}",),
    "photo": ("a photo of a {}.",),
    "simple": (
        "itap of a {}.",
        "a bad photo of the {}.",
        "a origami {}.",
        "a photo of the large {}.",
        "a {} in a video game.",
        "art of the {}.",
        "a photo of the small {}.",
    ),
}


@dataclass
class ClipConfig:
    """Options of ``clip``; the defaults are F3RM's."""

    model: str = "ViT-L-14-336"
    """Architecture: any ViT of open_clip, e.g. ViT-B-16, ViT-L-14 or ViT-H-14."""
    pretrained: str = "openai"
    """open_clip's tag for the weights (openai, laion2b_s34b_b88k ...), or the path of a local weights file.
    The word random gives seeded random weights, for tests only."""
    tag: str = ""
    """open_clip's tag for the weights in a local file, which tells their activation and colours: openai, for instance.
    Without it they are taken as those of OpenAI's archive, if it is one, or else of a model without QuickGELU."""
    short_side_px: int = 336
    """Length in pixels to which the short side of an image is resized, ≥ 32. Both sides are rounded to whole
    patches."""
    templates: Literal["none", "photo", "simple", "imagenet"] = "none"
    """Sentences into which each text prompt is put and whose embeddings are averaged: none (the prompt alone),
    photo (1 sentence), simple (7) or imagenet (80). They affect text queries only, not image features."""

    def __post_init__(self) -> None:
        preprocess.check_short_side(self.short_side_px)


class ClipExtractor(preprocess.PatchExtractor):
    """CLIP patch features in the space of its text embeddings (open_clip, MaskCLIP's value path).

    The constructor finds the weights; they are loaded on first use.
    """

    config_class = ClipConfig
    gpu_batch_size = 32

    def __init__(self, config: ClipConfig, *, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._architecture = ClipModel.from_name(config.model)
        self._tag = config.tag or config.pretrained
        weights = self._architecture.weights(config.pretrained)
        self._path: Path | None = None if weights is None else resolve(weights)
        self._half = device.type == "cuda"
        self._model: Any = None

    @classmethod
    def weights_status(cls, config: ClipConfig) -> WeightsStatus:
        weights = ClipModel.from_name(config.model).weights(config.pretrained)
        return NO_WEIGHTS if weights is None else status(weights)

    @classmethod
    def feature_size(cls, config: ClipConfig, height_px: int, width_px: int) -> FeatureSize:
        architecture = ClipModel.from_name(config.model)
        patch = architecture.patch_px
        height, width = preprocess.whole_patches(height_px, width_px, config.short_side_px, patch)
        return FeatureSize(height // patch, width // patch, architecture.dim)

    @property
    def model(self) -> Any:
        """open_clip's model on this extractor's device: float32 on the CPU, half precision on a GPU."""
        if self._model is None:
            model = load_clip(self._architecture, self._tag, self._path)
            self._model = model.to(device=self.device, dtype=torch.float16 if self._half else torch.float32)
        return self._model

    @property
    def identity(self) -> ExtractorIdentity:
        mean, std = self._architecture.normalisation(self._tag)
        return ExtractorIdentity(
            extractor="clip",
            model=self.config.model,
            weights=f"{RANDOM}-0" if self._path is None else file_hash(self._path),
            resolution=f"short side {self.config.short_side_px} px in whole patches",
            preprocessing=f"bicubic antialiased, mean {mean}, std {std}; value path of the last block, "
            "ln_post, projection",
        )

    @property
    def patch_px(self) -> int:
        return self._architecture.patch_px

    @property
    def dim(self) -> int:
        return self._architecture.dim

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the geometry of the patches, which tile the whole image."""
        height, width = self._input_size(height_px, width_px)
        return PatchGrid.covering(height // self.patch_px, width // self.patch_px, height_px, width_px)

    def encode_text(self, prompts: Sequence[str]) -> Float[Tensor, "prompts feat"]:
        """Returns unit-norm embeddings of the prompts, averaged over the config's templates, float32 on the CPU."""
        return encode_ensemble(self._encode_sentences, prompts, prompt_templates(self.config.templates))

    def _encode_sentences(self, sentences: Sequence[str]) -> Float[Tensor, "sentences feat"]:
        import open_clip

        tokens = open_clip.get_tokenizer(self.config.model)(list(sentences)).to(self.device)
        with torch.inference_mode():
            embeddings = torch.cat([self.model.encode_text(part).float().cpu() for part in tokens.split(64)])
        return functional.normalize(embeddings, dim=-1).clone()

    def _forward(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
        pixels = preprocess.normalise(pixels, *self._architecture.normalisation(self._tag))
        return value_path(self.model.visual, pixels.half() if self._half else pixels)


def prompt_templates(name: str) -> tuple[str, ...]:
    """Returns the sentences of a prompt ensemble, with one ``{}`` each.

    ``simple`` holds the seven that do most of the work according to CLIP's authors; ``imagenet`` all 80 of open_clip.

    >>> prompt_templates("photo")
    ('a photo of a {}.',)
    """
    if name == "imagenet":
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES)
    return _TEMPLATES[name]


def encode_ensemble(
    encode: Callable[[Sequence[str]], Float[Tensor, "sentences feat"]],
    prompts: Sequence[str],
    templates: Sequence[str],
) -> Float[Tensor, "prompts feat"]:
    """Returns unit-norm embeddings of prompts: the mean direction over templates, sentences with one ``{}`` each."""
    if not prompts:
        return encode([""])[:0]
    embeddings = encode([template.replace("{}", prompt) for prompt in prompts for template in templates])
    means = torch.stack([group.mean(dim=0) for group in embeddings.split(len(templates))])
    return functional.normalize(means, dim=-1)


def tokens_before_last_block(visual: Any, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch tokens width"]:
    """Returns the class token and patch tokens that enter the last block of open_clip's `visual`, at any image size."""
    patches = visual.conv1(pixels)
    rows, cols = patches.shape[-2:]
    cls = visual.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
    tokens = torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)
    tokens = visual.ln_pre(tokens + position_embedding(visual, rows, cols).to(tokens.dtype))
    for block in visual.transformer.resblocks[:-1]:
        tokens = block(tokens)
    return tokens


def position_embedding(visual: Any, rows: int, cols: int) -> Float[Tensor, "tokens width"]:
    """Returns the position embedding of `visual`, bicubically interpolated to a rows x cols grid of patches."""
    native = tuple(visual.grid_size)
    embedding = visual.positional_embedding
    if native == (rows, cols):
        return embedding
    image = embedding[1:].unflatten(0, native).permute(2, 0, 1)[None].float()
    image = functional.interpolate(image, size=(rows, cols), mode="bicubic", align_corners=False)
    return torch.cat([embedding[:1].float(), image[0].flatten(1).T])


def last_block_values(block: Any, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
    """Applies the value path of an attention block, out_proj(v_proj(ln_1(x))): tokens do not mix, no residual."""
    attention, width = block.attn, tokens.shape[-1]
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias[2 * width :]
    values = functional.linear(block.ln_1(tokens), attention.in_proj_weight[2 * width :], bias)
    return block.ls_1(attention.out_proj(values))


def value_path(visual: Any, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
    """Returns MaskCLIP's dense features of normalised images whose sides are whole patches."""
    patch_height, patch_width = visual.patch_size
    rows, cols = pixels.shape[-2] // patch_height, pixels.shape[-1] // patch_width
    tokens = last_block_values(visual.transformer.resblocks[-1], tokens_before_last_block(visual, pixels))
    return (visual.ln_post(tokens[:, 1:]) @ visual.proj).unflatten(1, (rows, cols))
