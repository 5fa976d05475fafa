"""Images of the features that Gaussians carry."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.features.lifting import upsample
from f3rm_ext.splat.memory.allocator import count_fitting_rows
from f3rm_ext.splat.rasterize.camera import TILE_PX, Composite, Strips
from f3rm_ext.splat.rendering import SplatScene, prepare_view

CHANNELS = 64
"""Channels composited at a time."""
STRIP_NUMBERS = 1 << 25
"""Most numbers in a strip of rendered features (128 MiB of float32); more on a GPU, if they fit in its memory."""
COMPARED_COPIES = 8
"""Tensors as large as a strip's features that it takes to compare them with a feature map."""


class FeatureRender:
    """Renders the features that Gaussians carry from one camera, one strip of rows at a time.

    The Gaussians are projected once, and listed by tile once for each strip.
    """

    def __init__(self, scene: SplatScene, heads: Mapping[str, LiftedHead], view: PinholeCameras) -> None:
        self._scene, self._heads, self._view = scene, heads, view
        self.width, self.height = int(view.widths[0]), int(view.heights[0])
        self._strip: tuple[tuple[int, int], Composite] | None = None

    @cached_property
    def _projection(self) -> Strips:
        return prepare_view(self._scene, self._view)

    def strips(self, copies: int = 1) -> list[tuple[int, int]]:
        """Returns the first row of each strip and the row after its last. On a GPU they fill the memory there is.

        Args:
            copies: how many tensors as large as a strip's features are needed.
        """
        dim = sum(head.dim for head in self._heads.values()) or 1
        # Beside the features, there is a slice of their channels and its copy in float32.
        row_bytes = 4 * self.width * TILE_PX * (copies * dim + 2 * CHANNELS)
        least = max(1, STRIP_NUMBERS // (self.width * dim * TILE_PX))
        tiles = count_fitting_rows(self._view.Ks.device, row_bytes, least, max(least, -(-self.height // TILE_PX)))
        return [(top, min(top + tiles * TILE_PX, self.height)) for top in range(0, self.height, tiles * TILE_PX)]

    def _composite(self, rows: tuple[int, int]) -> Composite:
        if self._strip is None or self._strip[0] != rows:
            self._strip = None  # before the next one takes memory
            self._strip = rows, self._projection(rows)
        return self._strip[1]

    def strip(self, name: str, rows: tuple[int, int]) -> Float[Tensor, "rays feat"]:
        """Renders a feature in the rows of a strip; rays are in row order."""
        codes, composite = self._heads[name].codes, self._composite(rows)
        rendered = torch.empty(rows[1] - rows[0], self.width, codes.shape[1], device=codes.device)
        for first in range(0, codes.shape[1], CHANNELS):
            part = slice(first, first + CHANNELS)
            rendered[..., part] = composite(codes[:, part].float())
        return rendered.flatten(0, 1)

    def display(self, name: str) -> Float[Tensor, "h w 3"]:
        """Renders a feature as display colours: linear in the feature, so only three channels are composited."""
        head = self._heads[name]
        colors = torch.cat([part.float() @ head.display_components.T for part in head.codes.split(1 << 18)])
        return head.shade(self._composite((0, self.height))(colors))

    def add_outputs(
        self, outputs: dict[str, Tensor], extra: Mapping[str, ExtraOutput], guard: OutputGuard
    ) -> dict[str, Tensor]:
        """Adds ``feature_pca``, ``feature_pca_NAME`` for each further feature, and extra outputs.

        Args:
            outputs: rendered images, (h, w, channels); changed in place.
            extra: functions that compute an output from the other outputs and the rendered features, strip by strip.
        """
        for index, name in enumerate(self._heads):
            suffix = f"_{name}" if index else ""
            guard.add(outputs, f"feature_pca{suffix}", lambda name=name: self.display(name))
        parts: dict[str, list[Tensor]] = defaultdict(list)
        strips = self.strips() if extra else []
        for rows in strips:
            flat = {name: value[rows[0] : rows[1]].flatten(0, 1) for name, value in outputs.items()}
            get_rendered = cache(partial(self.strip, rows=rows))
            for name, compute in extra.items():
                if (value := compute(flat, get_rendered)) is not None:
                    flat[name] = value
                    parts[name].append(value)
        for name, values in parts.items():
            if len(values) == len(strips):  # an output that failed in some strip is incomplete
                outputs[name] = torch.cat(values).view(self.height, self.width, -1)
        return outputs

    def similarity(
        self, name: str, feature_map: FeatureMap, mask: Bool[Tensor, "h w 1"] | None = None
    ) -> tuple[float, float]:
        """Compares a feature with a 2D feature map: mean cosine similarity and mean squared error over pixels.

        Args:
            feature_map: the ground truth, interpolated bilinearly between patch centres.
            mask: True for pixels that count, at least one; all count by default.
        """
        cosine = squared = 0.0
        for top, bottom in self.strips(COMPARED_COPIES):
            rendered = self.strip(name, (top, bottom))
            strip = self._view._replace(heights=torch.full_like(self._view.heights, bottom - top))
            grid = feature_map.grid
            moved = replace(grid, origin_px=(grid.origin_px[0] - top, grid.origin_px[1]))
            wanted = upsample(replace(feature_map, grid=moved), slice(None), strip).flatten(0, 1)
            if mask is not None:
                kept = mask[top:bottom].flatten().to(rendered.device)
                rendered, wanted = rendered[kept], wanted[kept]
            cosine += float(functional.cosine_similarity(rendered, wanted, dim=-1).sum())
            squared += float((rendered - wanted).square().mean(dim=-1).sum())
        pixels = self.width * self.height if mask is None else int(mask.sum())
        return cosine / pixels, squared / pixels
