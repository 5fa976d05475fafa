"""What a 2D feature extractor is: the protocol, its identity and the geometry of its patches."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor


@dataclass(frozen=True)
class PatchGrid:
    """Where the patches of a dense feature map lie in the image they came from.

    Pixel coordinates are continuous: pixel (row 0, column 0) covers [0, 1) × [0, 1), its centre is (0.5, 0.5).
    """

    rows: int
    """Number of patch rows, ≥ 1."""
    cols: int
    """Number of patch columns, ≥ 1."""
    origin_px: tuple[float, float]
    """Centre (y, x) of the first patch, in pixels of the source image."""
    stride_px: tuple[float, float]
    """Distance (y, x) between neighbouring patch centres, in pixels of the source image."""

    def centres_px(self) -> Float32[np.ndarray, "rows cols 2"]:
        """Patch centres (y, x) in pixels of the source image."""
        y = self.origin_px[0] + self.stride_px[0] * np.arange(self.rows)
        x = self.origin_px[1] + self.stride_px[1] * np.arange(self.cols)
        return np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).astype(np.float32)

    @classmethod
    def covering(cls, rows: int, cols: int, height_px: int, width_px: int) -> "PatchGrid":
        """The grid whose rows × cols equal patches tile an image of height_px × width_px exactly."""
        stride = (height_px / rows, width_px / cols)
        return cls(rows=rows, cols=cols, origin_px=(stride[0] / 2, stride[1] / 2), stride_px=stride)


@dataclass(frozen=True)
class ExtractorIdentity:
    """Everything that, if it changed, would change the features of the same image."""

    extractor: str
    """Name in the registry, e.g. ``clip``."""
    model: str
    """Architecture, e.g. ``ViT-B-16``."""
    weights: str
    """Hash of the weights file (first 16 hex digits of SHA-256), or ``none`` where there are no weights."""
    resolution: str
    """How the image is resized, e.g. ``short-side 448``."""
    preprocessing: str
    """Normalisation and which layer or facet is taken, in words that change when the code's behaviour does."""

    def key(self) -> str:
        """16 hex digits, stable over processes and machines."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FeatureMap:
    """The dense features of one image, as they come from the store."""

    values: Float16[np.ndarray, "rows cols feat"]
    """Features (or PCA codes), memory-mapped; not normalised."""
    grid: PatchGrid
    """Where they lie in the image."""
    residual_norm: Float16[np.ndarray, "rows cols"] | None = None
    """With PCA codes: norm of what the codes leave out, per patch."""


@runtime_checkable
class Extractor(Protocol):
    """Turns images into dense patch features.

    Implementations are built once per process and hold their weights on one device. They never crop the image.
    """

    @property
    def identity(self) -> ExtractorIdentity:
        """What these features are; part of the key under which they are stored."""
        ...

    @property
    def dim(self) -> int:
        """Feature dimension D."""
        ...

    @property
    def batch_size(self) -> int:
        """How many images :meth:`extract` should be given at a time."""
        ...

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Geometry of the features of an image of this size."""
        ...

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        """Features of each image, shape (rows, cols, D) as :meth:`patch_grid` says, float32 on the CPU.

        Images may differ in size. Values are the model's own, not normalised.
        """
        ...


@runtime_checkable
class FileExtractor(Protocol):
    """An extractor that has to know which file an image came from, such as one that reads labels beside it."""

    def extract_files(
        self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]], files: Sequence[Path]
    ) -> list[Float[Tensor, "_ _ feat"]]:
        """As :meth:`Extractor.extract`, which is not called then.

        Args:
            images: as for :meth:`Extractor.extract`.
            files: of each image.
        """
        ...


@runtime_checkable
class TextExtractor(Protocol):
    """An extractor whose feature space text can be embedded into."""

    def encode_text(self, prompts: Sequence[str]) -> Float[Tensor, "prompts feat"]:
        """Unit-norm embeddings, float32 on the CPU."""
        ...
