"""Splats with features, asked as fields are: see :class:`~f3rm_ext.query.queryable.Queryable`."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.errors import UserError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.features.store.source import FeatureSource
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads
from f3rm_ext.splat.features.lifting import lift, looks, upsampled
from f3rm_ext.splat.knn import NearestGaussians
from f3rm_ext.splat.rasterize.camera import TILE_PX
from f3rm_ext.splat.rendering import RenderSettings, Scene, composite
from f3rm_ext.utils.console import image_progress
from f3rm_ext.viewer.panel import QueryPanel

CHANNELS = 64
"""Channels composited at a time."""
STRIP_NUMBERS = 1 << 25
"""Numbers of a strip of rendered features (128 MiB): larger pictures are looked at strip by strip."""
NEIGHBOURS = 16
"""Gaussians that are asked at a point of space."""


class FeatureRender:
    """The features that Gaussians carry as one camera sees them, strip of rows by strip of rows.

    Args:
        scene: the Gaussians.
        heads: their features.
        view: one camera.
        how: how they are drawn.
    """

    def __init__(
        self, scene: Scene, heads: Mapping[str, LiftedHead], view: PinholeCameras, how: RenderSettings
    ) -> None:
        self._scene, self._heads, self._view, self._how = scene, heads, view, how
        self.width, self.height = int(view.widths[0]), int(view.heights[0])

    def strips(self) -> list[tuple[int, int]]:
        """First row of each strip and the one after its last."""
        dim = max((head.dim for head in self._heads.values()), default=1)
        tiles = max(1, STRIP_NUMBERS // (self.width * dim * TILE_PX))
        return [(top, min(top + tiles * TILE_PX, self.height)) for top in range(0, self.height, tiles * TILE_PX)]

    def strip(self, name: str, rows: tuple[int, int]) -> Float[Tensor, "rays feat"]:
        """A feature in a strip, row by row."""
        codes = self._heads[name].codes
        rendered = torch.empty(rows[1] - rows[0], self.width, codes.shape[1], device=codes.device)
        for first in range(0, codes.shape[1], CHANNELS):
            part = slice(first, first + CHANNELS)
            rendered[..., part] = composite(self._scene, self._view, codes[:, part].float(), self._how, rows)
        return rendered.flatten(0, 1)

    def display(self, name: str) -> Float[Tensor, "h w 3"]:
        """A feature as colours. They are linear in the features, so that three channels are drawn, not all."""
        head = self._heads[name]
        colors = torch.cat([part.float() @ head.display_components.T for part in head.codes.split(1 << 18)])
        return head.shade(composite(self._scene, self._view, colors, self._how))

    def add_to(
        self, outputs: dict[str, Tensor], extra: Mapping[str, ExtraOutput], guard: OutputGuard
    ) -> dict[str, Tensor]:
        """Adds ``feature_pca`` (and ``feature_pca_NAME`` of the further features), and what else is asked for.

        Args:
            outputs: of the picture, (h, w, channels); changed.
            extra: computed from rays and the features along them, strip by strip.
            guard: takes the exceptions of ``feature_pca``.

        Returns:
            ``outputs``.
        """
        for index, name in enumerate(self._heads):
            suffix = f"_{name}" if index else ""
            guard.add(outputs, f"feature_pca{suffix}", lambda name=name: self.display(name))
        parts: dict[str, list[Tensor]] = defaultdict(list)
        strips = self.strips() if extra else []
        for rows in strips:
            flat = {name: value[rows[0] : rows[1]].flatten(0, 1) for name, value in outputs.items()}
            rendered: dict[str, Tensor] = {}

            def rendered_of(name: str, rows: tuple[int, int] = rows, rendered: dict[str, Tensor] = rendered) -> Tensor:
                if name not in rendered:
                    rendered[name] = self.strip(name, rows)
                return rendered[name]

            for name, compute in extra.items():
                if (value := compute(flat, rendered_of)) is not None:
                    flat[name] = value
                    parts[name].append(value)
        for name, found in parts.items():
            if len(found) == len(strips):  # what failed in some strip has no whole picture
                outputs[name] = torch.cat(found).view(self.height, self.width, -1)
        return outputs

    def similarity(
        self, name: str, feature_map: FeatureMap, mask: Bool[Tensor, "h w 1"] | None = None
    ) -> tuple[float, float]:
        """Mean cosine similarity and mean squared error of a feature against a map, over all pixels.

        Args:
            name: of the feature.
            feature_map: the true one; between patch centres it is interpolated.
            mask: keeps the pixels that count, at least one; by default all do.
        """
        cosine = squared = 0.0
        for top, bottom in self.strips():
            rendered = self.strip(name, (top, bottom))
            strip = PinholeCameras(
                self._view.viewmats, self._view.Ks, self._view.widths, torch.full_like(self._view.heights, bottom - top)
            )
            grid = feature_map.grid
            moved = replace(grid, origin_px=(grid.origin_px[0] - top, grid.origin_px[1]))
            wanted = upsampled(replace(feature_map, grid=moved), slice(None), strip).flatten(0, 1)
            if mask is not None:
                kept = mask[top:bottom].flatten().to(rendered.device)
                rendered, wanted = rendered[kept], wanted[kept]
            cosine += float(functional.cosine_similarity(rendered, wanted, dim=-1).sum())
            squared += float((rendered - wanted).square().mean(dim=-1).sum())
        pixels = self.width * self.height if mask is None else int(mask.sum())
        return cosine / pixels, squared / pixels


class QueryableSplats:
    """What makes a splat model :class:`~f3rm_ext.query.queryable.Queryable`; a mixin in front of nerfstudio's model."""

    lifted: LiftedHeads
    queries: QueryPanel
    guard: OutputGuard
    device: torch.device
    _scene: Callable[[], Scene]
    """The Gaussians as they are drawn."""
    _how: Any
    """How they are drawn."""
    _look: Callable[..., dict[str, Tensor]]
    """Draws a camera: ``_look(camera, obb_box)``."""
    _nearest: NearestGaussians | None = None

    def query_heads(self) -> dict[str, LiftedHead]:
        """The features the Gaussians carry by name, the primary one first."""
        return self.lifted.by_name

    def feature_picture(self, camera: Cameras, obb_box: OrientedBox | None = None) -> FeatureRender:
        """The features as a camera sees them.

        Args:
            camera: one camera.
            obb_box: what lies outside is not seen.
        """
        scene, heads = self._scene(), self.query_heads()
        if obb_box is not None:
            within = obb_box.within(scene.gaussians.means)
            heads = {name: LiftedHead(head.spec, head.codes[within]) for name, head in heads.items()}
            scene = scene.inside(obb_box)
        return FeatureRender(scene, heads, PinholeCameras.of(camera.to(self.device)), self._how)

    @torch.no_grad()
    def seen(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """The pictures of a camera with those of its features; depth is along the camera's axis.

        Args:
            camera: one camera.
            extra: further outputs, see :class:`~f3rm_ext.query.queryable.Queryable`.
            obb_box: what lies outside is not seen.
        """
        outputs = self._look(camera, obb_box)
        if not (self.query_heads() or extra):
            return outputs
        return self.feature_picture(camera, obb_box).add_to(outputs, extra, self.guard)

    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """All outputs for one camera, (h, w, channels) each, and further ones computed strip by strip.

        As those of a field, ``depth`` and ``expected_depth`` (the same here) are along the rays; in pictures of the
        viewer depth is along the camera's axis.

        Args:
            camera: one camera.
            extra: further outputs, see :class:`~f3rm_ext.query.queryable.Queryable`.
            obb_box: what lies outside is not seen.
        """
        outputs = self.seen(camera, extra, obb_box)
        view = PinholeCameras.of(camera.to(self.device))
        height, width = outputs["depth"].shape[:2]
        rows, cols = (torch.arange(side, device=self.device) + 0.5 for side in (height, width))
        fx, fy, cx, cy = view.Ks[0, 0, 0], view.Ks[0, 1, 1], view.Ks[0, 0, 2], view.Ks[0, 1, 2]
        longer = (1 + ((cols - cx) / fx).square() + ((rows[:, None] - cy) / fy).square()).sqrt()
        outputs["depth"] = outputs["depth"] * longer[..., None]
        outputs["expected_depth"] = outputs["depth"]
        return outputs

    @torch.no_grad()
    def rendered_at(self, points: Float[Tensor, "points 3"]) -> dict[str, Float[Tensor, "points hidden"]]:
        """Features at points of the scene frame: those of the Gaussians around, weighted by opacity and density there.

        Of the 16 whose centres are nearest; far from all of them the one that falls off last decides.
        """
        scene = self._scene()
        if self._nearest is None or not self._nearest.is_of(scene.gaussians.means):
            self._nearest = NearestGaussians(scene.gaussians.means)
        near = self._nearest(points, NEIGHBOURS)
        sizes, alphas = scene.solids()
        away = points[:, None] - scene.gaussians.means[near]
        own = torch.einsum("pkji,pkj->pki", scene.gaussians.rotations()[near], away) / sizes[near].clamp_min(1e-12)
        shares = (alphas[near].clamp_min(1e-12).log() - 0.5 * own.square().sum(dim=-1)).softmax(dim=-1)
        return {
            name: torch.einsum("pk,pkc->pc", shares, head.codes[near].float())
            for name, head in self.query_heads().items()
        }

    def lift_features(self, dataset: PinholeDataset, source: FeatureSource | None, *, required: bool = False) -> None:
        """Lifts the features of the training views and replaces those carried before, see
        :mod:`f3rm_ext.splat.features.lifting`.

        Args:
            dataset: the training views.
            source: their features; None leaves everything as it is.
            required: whether what goes wrong is raised; at the end of a training it must not cost the training.
        """
        if source is None:
            return
        self.lifted.clear()
        try:
            with image_progress("views") as progress:
                task = progress.add_task("Lifting features", total=looks(dataset, source))
                for head in lift(self._scene(), dataset, source, self._how, lambda: progress.advance(task)):
                    self.lifted.put(head.to(self.device))
        except (UserError, OSError) as error:
            self.lifted.clear()
            if required:
                raise
            CONSOLE.log(f"No features were lifted: {error} Then run `f3rm-ext features lift`.", markup=False)
        if self.queries.ask_02_status.installed:
            self.queries.sync()

    def feature_metrics(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """feature_cosine_NAME and feature_mse_NAME against the 2D features of a photo, where there are any. Pixels that
        ``mask`` leaves out do not count.

        Args:
            batch: of an evaluation image.
        """
        metrics: dict[str, float] = {}
        mask = batch.get("mask")
        if masks.keeps_nothing(mask):
            return metrics
        maps = batch.get("feature_maps") or {}
        for name in self.query_heads():
            if name in maps:
                found = self.feature_picture(batch["camera"]).similarity(name, maps[name], mask)
                metrics[f"feature_cosine_{name}"], metrics[f"feature_mse_{name}"] = found
        return metrics
