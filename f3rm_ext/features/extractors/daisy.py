"""Dense features without weights: DAISY descriptors for texture (Tola et al. 2010) and encoded Lab colours.

They carry no meaning, but similar patches have similar features. That is enough for exemplar queries, off-line use and
tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors.preprocess import MIN_SIDE_PX, check_image_size, resize

RINGS, HISTOGRAMS, ORIENTATIONS = 2, 6, 8
TEXTURE_DIM = (RINGS * HISTOGRAMS + 1) * ORIENTATIONS
COLOR_FREQUENCIES = ((0.5, 1.0), (1.0, 2.0), (1.0, 2.0))
"""Half turns per 100 units of L, a and b."""
BLUR_STEPS = (0.5, 1.5)
"""Standard deviations of the two colour blurs, in steps."""
COLOR_DIM = 2 * len(BLUR_STEPS) * sum(len(frequencies) for frequencies in COLOR_FREQUENCIES)
SOFT_CONTRAST = 0.6
"""Norm of a raw descriptor (of lightness in [0, 1]) at which texture has half its weight; about 1 is typical."""


@dataclass
class DaisyConfig:
    """Options of ``dense-daisy``."""

    short_side_px: int = 320
    """Length in pixels to which the short side of larger images is reduced, ≥ 32."""
    step_px: int = 8
    """Distance between descriptors in pixels of the reduced image, 2 to 32."""
    radius_px: int = 16
    """Radius of the outer ring of histograms in pixels of the reduced image, from `step_px` to 64."""

    def __post_init__(self) -> None:
        if self.short_side_px < MIN_SIDE_PX:
            raise ExtractorError(f"short_side_px is {self.short_side_px}: dense-daisy needs at least {MIN_SIDE_PX}.")
        if not 2 <= self.step_px <= 32:
            raise ExtractorError(f"step_px is {self.step_px}, outside 2 to 32: 8 is a good choice.")
        if not self.step_px <= self.radius_px <= 64:
            raise ExtractorError(
                f"radius_px is {self.radius_px}, outside step_px ({self.step_px}) to 64: "
                "twice step_px is a good choice."
            )


class DaisyExtractor:
    """DAISY texture and smoothed colour, without weights (scikit-image)."""

    config_class = DaisyConfig

    def __init__(self, config: DaisyConfig, *, device: torch.device) -> None:
        self.config = config
        self.device = device

    @property
    def identity(self) -> ExtractorIdentity:
        return ExtractorIdentity(
            extractor="dense-daisy",
            model=f"daisy {RINGS}x{HISTOGRAMS}x{ORIENTATIONS} radius {self.config.radius_px} + Lab phases 1",
            weights="none",
            resolution=f"short side ≤ {self.config.short_side_px} px, step {self.config.step_px}",
            preprocessing=f"lightness, soft contrast {SOFT_CONTRAST}; "
            f"colour blurs {BLUR_STEPS}, phases {COLOR_FREQUENCIES}",
        )

    @property
    def dim(self) -> int:
        return TEXTURE_DIM + COLOR_DIM

    @property
    def batch_size(self) -> int:
        """One: images are described one by one."""
        return 1

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        """Returns the geometry of the descriptors: one per step_px x step_px cell, at the cell's middle pixel."""
        step = self.config.step_px
        rows, cols = self._cells(height_px, width_px)
        middle = step // 2 + 0.5
        grid = PatchGrid(rows, cols, origin_px=(middle, middle), stride_px=(float(step), float(step)))
        return grid.scale(height_px / (rows * step), width_px / (cols * step))

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        """Returns the features of each image, (rows, cols, D). The texture and the colour part have norm ≤ 1 each."""
        return [torch.from_numpy(self._describe(image)) for image in images]

    def _cells(self, height_px: int, width_px: int) -> tuple[int, int]:
        check_image_size(height_px, width_px)
        scale = min(1.0, self.config.short_side_px / min(height_px, width_px)) / self.config.step_px
        return max(1, int(height_px * scale + 0.5)), max(1, int(width_px * scale + 0.5))

    def _describe(self, image: UInt8[np.ndarray, "h w 3"]) -> Float32[np.ndarray, "rows cols feat"]:
        from skimage.color import rgb2lab

        rows, cols = self._cells(*image.shape[:2])
        step = self.config.step_px
        pixels = resize(image, (rows * step, cols * step), torch.device("cpu")).permute(1, 2, 0).numpy()
        lab = rgb2lab(pixels).astype(np.float32)
        return np.concatenate([self._texture(lab[..., 0] / 100), self._color(lab)], axis=-1)

    def _texture(self, grey: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "rows cols texture"]:
        from skimage.feature import daisy

        step, radius = self.config.step_px, self.config.radius_px
        # The first descriptor lies `radius` inside the padded image, which is the middle pixel of the first cell.
        before, after = radius - step // 2, radius + step // 2
        padded = np.pad(grey, (before, after), mode="symmetric")
        descriptors = daisy(
            padded,
            step=step,
            radius=radius,
            rings=RINGS,
            histograms=HISTOGRAMS,
            orientations=ORIENTATIONS,
            normalization="off",
        )
        rows, cols = grey.shape[0] // step, grey.shape[1] // step
        descriptors = np.asarray(descriptors)[:rows, :cols].astype(np.float32)
        return descriptors / (np.linalg.norm(descriptors, axis=-1, keepdims=True) + SOFT_CONTRAST)

    def _color(self, lab: Float32[np.ndarray, "h w 3"]) -> Float32[np.ndarray, "rows cols colour"]:
        """Encodes blurred colours as points on circles: the more colours differ, the smaller their inner product."""
        from scipy.ndimage import gaussian_filter

        step = self.config.step_px
        middle = slice(step // 2, None, step)
        parts = []
        for blur in BLUR_STEPS:
            blurred = np.empty_like(lab)
            gaussian_filter(lab, (blur * step, blur * step, 0), mode="reflect", output=blurred)
            smooth = blurred[middle, middle] / 100
            for channel, frequencies in enumerate(COLOR_FREQUENCIES):
                for frequency in frequencies:
                    phase = np.pi * frequency * smooth[..., channel]
                    parts += [np.cos(phase), np.sin(phase)]
        return (np.stack(parts, axis=-1) / np.sqrt(COLOR_DIM / 2)).astype(np.float32)
