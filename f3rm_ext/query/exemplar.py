"""Queries by example: a pixel, a box or a crop of a photo is the question. They work with any extractor."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.query.embeddings import Embeddings


@dataclass(frozen=True)
class Region:
    """A place in an image: a pixel, a box, or all of it."""

    image: str
    """Name of a photo of the capture, or path of an image file."""
    x_px: float | None = None
    """Left edge, or the pixel's place; continuous, to the right, 0 is the left edge of the image. None: the whole."""
    y_px: float | None = None
    """Top edge, or the pixel's place; down."""
    width_px: float | None = None
    """Width of a box; None for a pixel."""
    height_px: float | None = None
    """Height of a box; None for a pixel."""

    @classmethod
    def parse(cls, text: str) -> "Region":
        """``IMAGE``, ``IMAGE:x,y`` or ``IMAGE:x,y,w,h``.

        Raises:
            ConfigError: it is none of these, or a box without extent.
        """
        image, colon, numbers = text.rpartition(":")
        if not colon or "/" in numbers or "\\" in numbers:
            image, numbers = text, ""
        try:
            values = [float(part) for part in numbers.split(",")] if numbers else []
        except ValueError:
            values = [np.nan]
        if not image or len(values) not in (0, 2, 4) or not np.isfinite(values).all():
            raise ConfigError(
                f"The exemplar {text!r} is not understood: give an image and a place in it in pixels, "
                "IMAGE:x,y for a point or IMAGE:x,y,w,h for a box, or an image alone."
            )
        if len(values) == 4 and min(values[2:]) <= 0:
            raise ConfigError(f"The box of the exemplar {text!r} is empty: its width and height have to be above 0.")
        return cls(image, *values)

    def __str__(self) -> str:
        values = [value for value in (self.x_px, self.y_px, self.width_px, self.height_px) if value is not None]
        return f"{self.image}:{','.join(f'{value:g}' for value in values)}" if values else self.image

    def scaled(self, by_x: float, by_y: float) -> "Region":
        """The same place in the image at another size."""
        x, y, width, height = (
            None if value is None else value * by
            for value, by in ((self.x_px, by_x), (self.y_px, by_y), (self.width_px, by_x), (self.height_px, by_y))
        )
        return Region(self.image, x, y, width, height)

    @property
    def is_point(self) -> bool:
        """Whether it is one pixel's place, without extent."""
        return self.x_px is not None and self.width_px is None

    def box_px(self, width_px: int, height_px: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in an image of this size; without extent for a point."""
        if self.x_px is None or self.y_px is None:
            return 0.0, 0.0, float(width_px), float(height_px)
        return self.x_px, self.y_px, self.x_px + (self.width_px or 0.0), self.y_px + (self.height_px or 0.0)

    def middle_px(self, width_px: int, height_px: int) -> tuple[float, float]:
        """Its middle (x, y) in an image of this size."""
        left, top, right, bottom = self.box_px(width_px, height_px)
        return (left + right) / 2, (top + bottom) / 2

    def require_inside(self, width_px: int, height_px: int) -> None:
        """Raises ConfigError where any of it lies outside an image of this size."""
        left, top, right, bottom = self.box_px(width_px, height_px)
        if not (0 <= left <= right <= width_px and 0 <= top <= bottom <= height_px):
            raise ConfigError(
                f"The exemplar {self} lies outside the image, which has {width_px} x {height_px} pixels: "
                "choose a place inside."
            )


def exemplar(feature_map: FeatureMap, region: Region) -> Embeddings:
    """The feature of a region: interpolated at a point, or the mean direction of a box or of the whole image.

    Args:
        feature_map: of the photo, in the distilled space.
        region: in pixels of the image the map was made from, inside of it.

    Raises:
        ConfigError: the feature there is zero.
    """
    packed = PackedMaps.pack([with_residual(feature_map)])
    places = torch.from_numpy(_places(feature_map.grid, region))
    sampled = packed.sample(torch.zeros(len(places), dtype=torch.long), places)
    unit = sampled / sampled.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    mean = unit.mean(dim=0, keepdim=True)
    if feature_map.residual_norm is None:
        return Embeddings.of_codes(mean, (str(region),))
    return Embeddings.of_codes(mean[:, :-1], (str(region),), mean[:, -1])


def with_residual(feature_map: FeatureMap) -> FeatureMap:
    """The map with the norm of what codes leave out as a last channel, where there is one."""
    if feature_map.residual_norm is None:
        return feature_map
    values = np.concatenate([feature_map.values, feature_map.residual_norm[..., None]], axis=-1)
    return FeatureMap(values=values, grid=feature_map.grid)


def patches_in(grid: PatchGrid, region: Region) -> Bool[np.ndarray, " points"]:
    """Which patches have their centre in a box, or in the whole image; none for a point."""
    centres = grid.centres_px().reshape(-1, 2)
    if region.x_px is None or region.y_px is None:
        return np.ones(len(centres), dtype=bool)
    low = np.asarray([region.y_px, region.x_px])
    high = low + (region.height_px or 0.0, region.width_px or 0.0)
    inside = ((centres >= low) & (centres <= high)).all(axis=1)
    return inside if region.width_px is not None else np.zeros_like(inside)


def _places(grid: PatchGrid, region: Region) -> Float32[np.ndarray, "points 2"]:
    """Where a region is sampled (y, x): its point; or in a box the patch centres, or where it has none its middle."""
    inside = patches_in(grid, region)
    if inside.any():
        return grid.centres_px().reshape(-1, 2)[inside]
    left, top, right, bottom = region.box_px(0, 0)
    return np.asarray([[(top + bottom) / 2, (left + right) / 2]], dtype=np.float32)
