"""Splats with features as a target of queries: see :class:`~f3rm_ext.query.queryable.Queryable`."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.models.base_model import Model
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.engine.cost import reset_peak
from f3rm_ext.errors import UserError
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.memory.shortage import is_out_of_memory
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.query.queryable import GroupedPoints
from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.query.run import view_clusters
from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads
from f3rm_ext.splat.features.lifting import count_lifting_steps, lift
from f3rm_ext.splat.features.rendering import CHANNELS, FeatureRender
from f3rm_ext.splat.knn import NearestGaussians
from f3rm_ext.splat.regularization.frames import pixel_rays
from f3rm_ext.splat.rendering import SplatScene, composite, prepare_view, render_outputs
from f3rm_ext.utils.colormaps import heat_overlay
from f3rm_ext.utils.console import image_progress
from f3rm_ext.viewer.panel import QueryPanel

_LEAST_SHARE = 0.2
"""Share of a pixel from which it shows a group: what is clicked is lit."""
NEIGHBOURS = 16
"""Gaussians that contribute to the features at a point."""


class QueryableSplats(Model):
    """A model of Gaussians that is :class:`~f3rm_ext.query.queryable.Queryable`; subclasses hold the Gaussians."""

    lifted: LiftedHeads
    """Features of the Gaussians."""
    queries: QueryPanel
    guard: OutputGuard
    confidence: Tensor | None
    """How well the photos fix each Gaussian, 0 to 1 (:mod:`f3rm_ext.data.confidence`), (gaussians,); None where
    `f3rm-ext splats confidence` has not measured it."""
    _nearest: NearestGaussians | None = None

    @abstractmethod
    def _scene(self) -> SplatScene:
        """Returns the Gaussians as they are to be rendered now."""

    def _inside(self, obb_box: OrientedBox | None) -> tuple[SplatScene, Bool[Tensor, " gaussians"] | slice]:
        """Returns the Gaussians whose centres lie in a box, and which they are; without a box, all of them."""
        scene = self._scene()
        if obb_box is None:
            return scene, slice(None)
        kept = obb_box.within(scene.gaussians.means)
        return scene.take(kept), kept

    def query_heads(self) -> dict[str, LiftedHead]:
        """Returns the features of the Gaussians by name, the primary one first."""
        return self.lifted.to_dict()

    def grouped_points(self, name: str) -> GroupedPoints | None:
        """Returns the Gaussians in groups by the feature of this name; None where they are not known."""
        head = self.lifted.to_dict().get(name)
        if head is None or head.groups is None:
            return None
        return GroupedPoints(self._scene().gaussians.means.detach(), head.codes, head.groups)

    @torch.no_grad()
    def group_map(self, camera: Cameras, name: str, obb_box: OrientedBox | None = None) -> Int64[np.ndarray, "h w"]:
        """Returns the group that most of each pixel shows, by the feature of this name; -1 for none."""
        scene, kept = self._inside(obb_box)
        groups = self.lifted.to_dict()[name].groups
        assert groups is not None
        view, count = PinholeCameras.to_render(camera, self.device), int(groups.max()) + 1
        height, width = int(view.heights[0]), int(view.widths[0])
        image, groups = prepare_view(scene, view)((0, height)), groups[kept].long()
        best = torch.full((height, width), OTHER, device=groups.device)
        most = torch.full(best.shape, _LEAST_SHARE, device=groups.device)
        for first in range(0, count, CHANNELS):
            own = (groups >= first) & (groups < first + CHANNELS)
            marks = torch.zeros(len(groups), CHANNELS, device=groups.device)
            marks[own, groups[own] - first] = 1.0
            share, number = image(marks).max(dim=-1)
            best = torch.where(share > most, number + first, best)
            most = torch.maximum(share, most)
        return best.cpu().numpy()

    def render_features(self, camera: Cameras, obb_box: OrientedBox | None = None) -> FeatureRender:
        """Prepares images of the features."""
        (scene, kept), heads = self._inside(obb_box), self.query_heads()
        if isinstance(kept, Tensor):
            heads = {name: head.select(kept) for name, head in heads.items()}
        return FeatureRender(scene, heads, PinholeCameras.to_render(camera, self.device))

    @torch.no_grad()
    def render_with_features(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Renders a camera with the images of its features; depth is along the camera's axis.

        Where confidence was measured, ``confidence`` (h, w, 1) is that of the Gaussians, composited over 0.

        Args:
            extra: further outputs, see :class:`~f3rm_ext.query.queryable.Queryable`.
        """
        view, (scene, kept) = PinholeCameras.to_render(camera, self.device), self._inside(obb_box)
        outputs = render_outputs(scene, view, self.guard)

        def light(own: Bool[Tensor, " gaussians"] | None) -> Float[Tensor, "h w 3"]:
            """Lights the pixels that show some Gaussians; without any, returns the plain picture."""
            if own is None:
                return outputs["rgb"]
            share = composite(scene, view, own[kept][:, None].float())
            return heat_overlay(outputs["rgb"], share[..., 0], _LEAST_SHARE, 1.0)

        if (confidence := self.confidence) is not None:
            self.guard.add(outputs, "confidence", lambda: composite(scene, view, confidence[kept][:, None]))
        for name, lit in self.queries.lit_points().items():
            self.guard.add(outputs, name, lambda lit=lit: light(lit))
        if not (self.query_heads() or extra):
            return outputs
        return self.render_features(camera, obb_box).add_outputs(outputs, extra, self.guard)

    @torch.no_grad()
    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        """Renders all outputs. In the viewer's render thread a failure gives a black image instead of a frozen page."""
        reset_peak(self.device)
        return self.guard.picture(
            camera,
            self.device,
            lambda: self.render_with_features(camera, self.queries.extra_outputs(camera, obb_box), obb_box),
        )

    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Renders all outputs of one camera, (h, w, channels) each, and computes further ones strip by strip.

        As for a field, ``depth`` and ``expected_depth`` (equal here) are along the rays. In the viewer, depth is along
        the camera's axis.
        """
        outputs = self.render_with_features(camera, extra, obb_box)
        height, width = outputs["depth"].shape[:2]
        x, y = pixel_rays((height, width), PinholeCameras.to_render(camera, self.device).Ks[0])
        lengths = (1 + x.square() + y[:, None].square()).sqrt()
        outputs["depth"] = outputs["depth"] * lengths[..., None]
        outputs["expected_depth"] = outputs["depth"]
        return outputs

    @torch.no_grad()
    def render_points(self, points: Float[Tensor, "points 3"]) -> dict[str, Float[Tensor, "points hidden"]]:
        """Returns features at points of the scene frame.

        Each is a mean over the 16 Gaussians with the nearest centres, weighted by opacity times density at the point.
        Far from all of them, the Gaussian whose density falls off last dominates.
        """
        scene = self._scene()
        if self._nearest is None or not self._nearest.matches(scene.gaussians.means):
            self._nearest = NearestGaussians(scene.gaussians.means)
        near = self._nearest(points, NEIGHBOURS)
        means, _, sizes, alphas = scene.shapes()
        away = points[:, None] - means[near]
        own = torch.einsum("pkji,pkj->pki", scene.gaussians.rotations()[near], away) / sizes[near].clamp_min(1e-12)
        # By logarithms, since all densities far from the Gaussians are 0 in float32.
        shares = (alphas[near].clamp_min(1e-12).log() - 0.5 * own.square().sum(dim=-1)).softmax(dim=-1)
        return {
            name: torch.einsum("pk,pkc->pc", shares, head.codes[near].float())
            for name, head in self.query_heads().items()
        }

    def lift_features(
        self,
        dataset: PinholeDataset,
        source: FeatureSource | None,
        *,
        required: bool = False,
        per_group: bool = True,
    ) -> None:
        """Replaces the features of the Gaussians by those of the training views; see
        :mod:`f3rm_ext.splat.features.lifting`.

        Args:
            source: their 2D features; None changes nothing.
            required: raise errors. Otherwise they are logged, since a failure at the end must not cost the training.
        """
        if source is None:
            return
        self.lifted.clear()
        try:
            with image_progress("views") as progress:
                task = progress.add_task("Lifting features", total=count_lifting_steps(self._scene(), dataset, source))
                for head in lift(self._scene(), dataset, source, lambda: progress.advance(task), per_group=per_group):
                    self.lifted.add(head.to(self.device))
                    if head.groups is not None:  # the scene is whole
                        clusters = view_clusters(self, head, dataset.cameras)
                        head.clusters = torch.from_numpy(clusters).to(self.device)
        except Exception as error:
            self.lifted.clear()
            if required or not (isinstance(error, UserError | OSError) or is_out_of_memory(error)):
                raise
            CONSOLE.log(f"No features were lifted: {error} Then run `f3rm-ext features lift`.", markup=False)
        if self.queries.ask_02_status.is_installed:
            self.queries.sync()

    def feature_metrics(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Computes metrics of the features against a photo; pixels that ``mask`` leaves out do not count.

        Returns:
            ``feature_cosine_NAME`` and ``feature_mse_NAME`` if the photo has 2D features.
        """
        metrics: dict[str, float] = {}
        mask = batch.get("mask")
        if masks.is_empty(mask):
            return metrics
        maps = batch.get("feature_maps") or {}
        for name in self.query_heads():
            if name in maps:
                pair = self.render_features(batch["camera"]).similarity(name, maps[name], mask)
                metrics[f"feature_cosine_{name}"], metrics[f"feature_mse_{name}"] = pair
        return metrics
