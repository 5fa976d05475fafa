"""``conse``: dense features for text queries, made from a plain image classifier and a text encoder."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from f3rm_ext.errors import ExtractorError, WeightsNotFoundError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors import preprocess
from f3rm_ext.features.extractors.weights import WeightsStatus, file_hash
from f3rm_ext_conse.text import MODEL_FILE, TOKENIZER_FILE, SentenceEncoder
from f3rm_ext_conse.vision import STRIDE_PX, DenseClassifier

WEIGHTS_VARIABLE = "F3RM_EXT_CONSE_WEIGHTS"
CLASSIFIER_FILE, CLASSES_FILE, TEXT_FOLDER = "efficientnet_lite0_imagenet_fp16.pth", "imagenet_classes.json", "minilm"
FILES = (CLASSIFIER_FILE, CLASSES_FILE, f"{TEXT_FOLDER}/{MODEL_FILE}", f"{TEXT_FOLDER}/{TOKENIZER_FILE}")


@dataclass
class ConseConfig:
    """Options of ``conse``."""

    weights: Path | None = None
    """Folder of the weights; by default $F3RM_EXT_CONSE_WEIGHTS."""
    short_side_px: int = 448
    """Length in pixels to which the short side of an image is resized, ≥ 32. Each 32 x 32 px give one feature."""
    top_classes: int = 10
    """Number of most probable classes that are combined, 1 to 1000."""

    def __post_init__(self) -> None:
        if self.short_side_px < STRIDE_PX:
            raise ExtractorError(f"short_side_px is {self.short_side_px}: conse needs at least {STRIDE_PX}.")
        if not 1 <= self.top_classes <= 1000:
            raise ExtractorError(f"top_classes is {self.top_classes}, outside 1 to 1000: 10 is a good choice.")


class ConseExtractor:
    """Text-queryable features without CLIP: ImageNet posteriors weight the embeddings of class names.

    Convex combination of semantic embeddings (Norouzi et al. 2014, arXiv 1312.5650): the feature of a patch is
    Σ p(class) · embedding(class name) over its most probable classes, with p renormalised over them. Its norm is at
    most 1, and small where the classifier hesitates between dissimilar classes.
    """

    config_class = ConseConfig
    resizes = True

    def __init__(self, config: ConseConfig, *, device: torch.device) -> None:
        self.config = config
        self.device = device
        check = self.weights_status(config)
        if check.path is None:
            raise WeightsNotFoundError(check.advice)
        self._folder = check.path

    @classmethod
    def weights_status(cls, config: ConseConfig) -> WeightsStatus:
        """Tells whether all files are in the folder."""
        place = config.weights or (Path(given) if (given := os.environ.get(WEIGHTS_VARIABLE)) else None)
        if place is None:
            advice = f"conse has no weights: give their folder by weights=FOLDER or ${WEIGHTS_VARIABLE}."
            return WeightsStatus(path=None, advice=advice, missing=True)
        absent = [name for name in FILES if not (place / name).is_file()]
        if absent:
            advice = f"The weights folder {place} of conse lacks {', '.join(absent)}: put the files there."
            return WeightsStatus(path=None, advice=advice, missing=True)
        return WeightsStatus(path=place, advice=f"Weights found: {place}.")

    @cached_property
    def identity(self) -> ExtractorIdentity:
        """Hash of all four files, and the options."""
        together = "".join(file_hash(self._folder / name) for name in FILES)
        return ExtractorIdentity(
            extractor="conse",
            model="EfficientNet-lite0 + all-MiniLM-L6-v2",
            weights=hashlib.sha256(together.encode()).hexdigest()[:16],
            resolution=f"short side {self.config.short_side_px} px, stride {STRIDE_PX}",
            preprocessing=f"(rgb - 127) / 128; top {self.config.top_classes} classes, convex combination",
        )

    @property
    def dim(self) -> int:
        """Dimension of the sentence embeddings."""
        return self._class_embeddings.shape[1]

    @property
    def batch_size(self) -> int:
        """Small on the CPU, where larger batches bring nothing."""
        return 2 if self.device.type == "cpu" else 16

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the geometry of the patches, 32 x 32 px of the resized image each, which tile it."""
        height, width = self._input_size(height_px, width_px)
        return PatchGrid.covering(height // STRIDE_PX, width // STRIDE_PX, height_px, width_px)

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        """Returns the features of each image, (rows, cols, D), float32 on the CPU, norm ≤ 1."""
        return preprocess.extract_in_batches(
            images, self._input_size, self._combine, batch_size=self.batch_size, device=self.device
        )

    def encode_text(self, prompts: Sequence[str]) -> Float[Tensor, "prompts feat"]:
        """Returns unit-norm sentence embeddings, float32 on the CPU."""
        return torch.from_numpy(self._sentences.encode(prompts))

    @cached_property
    def _sentences(self) -> SentenceEncoder:
        return SentenceEncoder(self._folder / TEXT_FOLDER)

    @cached_property
    def _classifier(self) -> DenseClassifier:
        return DenseClassifier(self._folder / CLASSIFIER_FILE, self.device)

    @cached_property
    def _class_embeddings(self) -> Tensor:
        names = json.loads((self._folder / CLASSES_FILE).read_text(encoding="utf-8"))
        return torch.from_numpy(self._sentences.encode(names)).to(self.device)

    def _input_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        return preprocess.whole_patches(height_px, width_px, self.config.short_side_px, STRIDE_PX)

    def _combine(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
        probable, classes = self._classifier.posteriors(pixels).topk(self.config.top_classes, dim=-1)
        shares = probable / probable.sum(dim=-1, keepdim=True)
        return (shares[..., None] * self._class_embeddings[classes]).sum(dim=-2)
