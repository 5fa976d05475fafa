"""DINO (Caron et al. 2021, arXiv 2104.14294) and DINOv2 (Oquab et al. 2023, arXiv 2304.07193) patch features."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import ExtractorIdentity, FeatureSize, PatchGrid
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.vit import Facet, VisionTransformer
from f3rm_ext.features.extractors.weights import Weights, WeightsStatus, file_hash, load_state_dict, resolve, status

_DINO_URL = "https://dl.fbaipublicfiles.com/dino"
_DINOV2_URL = "https://dl.fbaipublicfiles.com/dinov2"
_DINO_FILES = {
    "vits8": ("facebook/dino-vits8", "dino_deitsmall8_pretrain"),
    "vits16": ("facebook/dino-vits16", "dino_deitsmall16_pretrain"),
    "vitb8": ("facebook/dino-vitb8", "dino_vitbase8_pretrain"),
    "vitb16": ("facebook/dino-vitb16", "dino_vitbase16_pretrain"),
}
_WIDTHS = {"vits": 384, "vitb": 768, "vitl": 1024, "vitg": 1536}
_PUBLISHED = re.compile(r"(vit.)(\d+)")
"""Size and patch size in the name of a published model."""
_DINOV2_SIZES = {"vits14": "small", "vitb14": "base", "vitl14": "large", "vitg14": "giant"}

DinoModel = Literal["vits8", "vits16", "vitb8", "vitb16"]
Dinov2Model = Literal["vits14", "vitb14", "vitl14", "vitg14", "vits14_reg", "vitb14_reg", "vitl14_reg", "vitg14_reg"]


@dataclass
class DinoConfig:
    """Options of ``dino``; the defaults are F3RM's."""

    model: DinoModel = "vits8"
    """Published model whose weights are used, unless `weights` gives a file."""
    weights: Path | None = None
    """State dict of a ViT (.pth, .pt or .safetensors) with the parameter names of DINO, timm or transformers."""
    short_side_px: int = 224
    """Length in pixels to which the short side of an image is resized, ≥ 32. Both sides are rounded to whole
    patches."""
    stride_px: int | None = 4
    """Distance between patch centres in pixels of the resized image, 1 to the patch size. Below the patch size the
    patches overlap and the map is finer. None means the patch size."""
    facet: Facet = "key"
    """Features to extract: token (output of the block), or key, query or value of its attention."""
    layers: tuple[int, ...] = (-1,)
    """Blocks whose features are averaged, written as 6+7+8+9; negative numbers count from the last block."""

    def __post_init__(self) -> None:
        preprocess.check_short_side(self.short_side_px)
        if self.stride_px is not None and self.stride_px < 1:
            raise ExtractorError(f"stride_px is {self.stride_px}: it must be at least 1, or none for the patch size.")


@dataclass
class Dinov2Config(DinoConfig):
    """Options of ``dinov2``."""

    model: Dinov2Model = "vits14"  # type: ignore[assignment]
    short_side_px: int = 448
    stride_px: int | None = None
    facet: Facet = "token"


class _VitExtractor(preprocess.PatchExtractor):
    """The common part of DINO and DINOv2: a plain ViT whose patch tokens, or one facet of them, are the features."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Name for people."""

    def __init__(self, config: DinoConfig, *, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._path = resolve(self.weights_source(config))
        self._vit = VisionTransformer.from_state_dict(load_state_dict(self._path))
        depth = self._vit.depth
        for layer in config.layers:
            if not -depth <= layer < depth:
                raise ExtractorError(
                    f"Layer {layer} does not exist in {self._path.name}: its {depth} blocks are 0 to {depth - 1}."
                )
        self.stride_px = config.stride_px or self.patch_px
        if self.stride_px > self.patch_px:
            raise ExtractorError(
                f"stride_px is {self.stride_px}, above the patch size {self.patch_px}: parts of the image would be "
                "skipped."
            )
        self._half = device.type == "cuda"
        self._vit.to(device=device, dtype=torch.float16 if self._half else torch.float32)

    @classmethod
    def weights_source(cls, config: DinoConfig) -> Weights:
        repository, url = cls.published(config.model)
        return Weights(
            model=f"{cls.title} {config.model}",
            option="weights",
            local=config.weights,
            hub_files=((repository, "model.safetensors"), (repository, "pytorch_model.bin")),
            urls=(url,),
        )

    @staticmethod
    @abstractmethod
    def published(model: str) -> tuple[str, str]:
        """Returns the repository on the hub and the address that have the weights of a published model."""

    @classmethod
    def weights_status(cls, config: DinoConfig) -> WeightsStatus:
        return status(cls.weights_source(config))

    @classmethod
    def feature_size(cls, config: DinoConfig, height_px: int, width_px: int) -> FeatureSize:
        """Tells the size of an image's features; without weights, unless a file of them is given."""
        if config.weights is not None:
            extractor = cls(config, device=torch.device("cpu"))
            grid = extractor.patch_grid(height_px, width_px)
            return FeatureSize(grid.rows, grid.cols, extractor.dim)
        match = _PUBLISHED.match(config.model)
        assert match is not None
        patch = int(match[2])
        stride = config.stride_px or patch
        height, width = preprocess.whole_patches(height_px, width_px, config.short_side_px, patch)
        return FeatureSize((height - patch) // stride + 1, (width - patch) // stride + 1, _WIDTHS[match[1]])

    @property
    def identity(self) -> ExtractorIdentity:
        layers = "+".join(str(layer % self._vit.depth) for layer in self.config.layers)
        return ExtractorIdentity(
            extractor=self.name,
            model=f"ViT {self._vit.width}x{self._vit.depth}/{self._vit.patch_px}",
            weights=file_hash(self._path),
            resolution=f"short side {self.config.short_side_px} px in whole patches, stride {self.stride_px}",
            preprocessing=f"bicubic antialiased, ImageNet mean and std; {self.config.facet} of blocks {layers}, "
            "last tokens with the final norm, earlier ones with a plain norm, mean over blocks",
        )

    @property
    def patch_px(self) -> int:
        return self._vit.patch_px

    @property
    def dim(self) -> int:
        return self._vit.width

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the geometry of the patches, which tile the image or, with a smaller stride, overlap."""
        height, width = self._input_size(height_px, width_px)
        patch, stride = self.patch_px, self.stride_px
        rows, cols = (height - patch) // stride + 1, (width - patch) // stride + 1
        grid = PatchGrid(rows, cols, origin_px=(patch / 2, patch / 2), stride_px=(float(stride), float(stride)))
        return grid.scale(height_px / height, width_px / width)

    def _forward(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
        pixels = preprocess.normalise(pixels, preprocess.IMAGENET_MEAN, preprocess.IMAGENET_STD)
        maps = self._vit(
            pixels.half() if self._half else pixels,
            self.config.layers,
            facet=self.config.facet,
            stride_px=self.stride_px,
        )
        return torch.stack([features.float() for features in maps]).mean(dim=0)


class DinoExtractor(_VitExtractor):
    """DINO ViT patch features (key facet of the last block, as in F3RM)."""

    name, title = "dino", "DINO"
    config_class = DinoConfig

    @staticmethod
    def published(model: str) -> tuple[str, str]:
        repository, stem = _DINO_FILES[model]
        return repository, f"{_DINO_URL}/{stem}/{stem}.pth"


class Dinov2Extractor(_VitExtractor):
    """DINOv2 ViT patch features (tokens of chosen blocks)."""

    name, title = "dinov2", "DINOv2"
    config_class = Dinov2Config

    @staticmethod
    def published(model: str) -> tuple[str, str]:
        size, _, registers = model.partition("_")
        repository = f"facebook/dinov2-{'with-registers-' if registers else ''}{_DINOV2_SIZES[size]}"
        stem = f"dinov2_{size}" + ("_reg4" if registers else "")
        return repository, f"{_DINOV2_URL}/dinov2_{size}/{stem}_pretrain.pth"
