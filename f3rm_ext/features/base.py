"""The protocol of 2D feature extractors, their identity, and the geometry of their patches."""

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
    """Where the patches of a dense feature map lie in the source image.

    Pixel coordinates are continuous: pixel (row 0, column 0) covers [0, 1) × [0, 1) and its centre is (0.5, 0.5).
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
        """Returns the patch centres (y, x) in pixels of the source image."""
        y = self.origin_px[0] + self.stride_px[0] * np.arange(self.rows)
        x = self.origin_px[1] + self.stride_px[1] * np.arange(self.cols)
        return np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).astype(np.float32)

    @classmethod
    def covering(cls, rows: int, cols: int, height_px: int, width_px: int) -> "PatchGrid":
        """Returns the grid of rows × cols equal patches that tile an image exactly.

        >>> grid = PatchGrid.covering(rows=2, cols=3, height_px=20, width_px=60)
        >>> grid.origin_px, grid.stride_px
        ((5.0, 10.0), (10.0, 20.0))
        >>> grid.centres_px()[1, 2].tolist()
        [15.0, 50.0]
        """
        stride = (height_px / rows, width_px / cols)
        return cls(rows=rows, cols=cols, origin_px=(stride[0] / 2, stride[1] / 2), stride_px=stride)

    def scale(self, down: float, right: float) -> "PatchGrid":
        """Returns the same patches in pixels of an image that is this many times as high and as wide."""
        (y, x), (height, width) = self.origin_px, self.stride_px
        return PatchGrid(self.rows, self.cols, (y * down, x * right), (height * down, width * right))


@dataclass(frozen=True)
class FeatureSize:
    """Size of the features of one image."""

    rows: int
    cols: int
    dim: int
    """Numbers per patch."""

    @property
    def numbers(self) -> int:
        return self.rows * self.cols * self.dim


@dataclass(frozen=True)
class ExtractorIdentity:
    """Everything that determines the features of a given image."""

    extractor: str
    """Name in the registry, e.g. ``clip``."""
    model: str
    """Architecture, e.g. ``ViT-B-16``."""
    weights: str
    """Hash of the weights file (first 16 hex digits of SHA-256), or ``none`` for an extractor without weights."""
    resolution: str
    """Rule by which the image is resized, such as ``short-side 448``."""
    preprocessing: str
    """Normalisation, and which layer or facet is used. Its wording must change when the code's behaviour does."""

    def key(self) -> str:
        """Returns 16 hex digits that are the same in every process and on every machine."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FeatureMap:
    """The dense features of one image, as the store returns them."""

    values: Float16[np.ndarray, "rows cols feat"]
    """Features (or PCA codes), memory-mapped; not normalised."""
    grid: PatchGrid
    residual_norm: Float16[np.ndarray, "rows cols"] | None = None
    """Norm of the part of each patch's feature that PCA codes leave out; None for full features."""


@runtime_checkable
class Extractor(Protocol):
    """Turns images into dense patch features.

    An extractor is built once per process, holds its weights on one device and never crops the image.
    """

    @property
    def identity(self) -> ExtractorIdentity:
        """Identity of these features, part of the key under which they are stored."""
        ...

    @property
    def dim(self) -> int:
        """Feature dimension D."""
        ...

    @property
    def batch_size(self) -> int:
        """Best number of images per call of :meth:`extract`."""
        ...

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the patch geometry for an image of this size."""
        ...

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        """Returns the features of each image, float32 on the CPU, not normalised.

        Their shape is (rows, cols, D) with the rows and columns of :meth:`patch_grid`. Images may differ in size.
        """
        ...


@runtime_checkable
class FileExtractor(Protocol):
    """An extractor that needs the file of each image, for instance to read labels stored beside it."""

    def extract_files(
        self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]], files: Sequence[Path]
    ) -> list[Float[Tensor, "_ _ feat"]]:
        """Returns the features of each image; called instead of :meth:`Extractor.extract`."""
        ...


@runtime_checkable
class TextExtractor(Protocol):
    """An extractor that can embed text into its feature space.

    One that knows certain texts only may also have ``require_known(prompts)``, which raises an ExtractorError that says
    which others can be looked for.
    """

    def encode_text(self, prompts: Sequence[str]) -> Float[Tensor, "prompts feat"]:
        """Returns unit-norm embeddings of the prompts, float32 on the CPU."""
        ...
