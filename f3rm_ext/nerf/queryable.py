"""What the viewer, queries and exports need of a field; see :class:`~f3rm_ext.query.queryable.Queryable`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.model_components.ray_samplers import ProposalNetworkSampler
from nerfstudio.models.base_model import Model
from torch import Tensor

from f3rm_ext.data.ray_generators import picture_rays
from f3rm_ext.engine.cost import reset_peak
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.model_components.chunked_rendering import ChunkedRenderer
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.nerf.feature_field import FeatureField, FeatureHead
from f3rm_ext.nerf.fields import SceneField
from f3rm_ext.viewer.panel import QueryPanel
from f3rm_ext.viewer.passes import picture_passes


class QueryableField(Model, ABC):
    """A radiance field with features that renders images in chunks and answers queries at rays and points."""

    field: SceneField
    feature_field: FeatureField
    proposal_sampler: ProposalNetworkSampler
    density_fns: list[Callable[[Tensor], Tensor]]
    chunked: ChunkedRenderer
    guard: OutputGuard
    queries: QueryPanel
    needs_autograd: bool
    """Whether an output is a gradient, as normals are."""

    @abstractmethod
    def get_outputs(
        self, ray_bundle: RayBundle | Cameras, extra: Mapping[str, ExtraOutput] | None = None
    ) -> dict[str, Any]:
        """Renders rays, and further outputs by name from hidden values rendered along them."""

    # --- images ------------------------------------------------------------------------------------------------------

    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        """Renders an image. On the viewer's render thread a failure gives a black image instead of a frozen page."""
        reset_peak(self.device)

        def render() -> dict[str, Tensor]:
            rays, extra = picture_rays(camera, camera.device, obb_box), self.queries.extra_outputs(camera, obb_box)
            passes = picture_passes(camera)
            if passes is None:
                return self.get_outputs_for_camera_ray_bundle(rays, extra)
            return passes.render(rays, lambda rest: self.get_outputs_for_camera_ray_bundle(rest, extra))

        return self.guard.picture(camera, self.device, render)

    def get_outputs_for_camera_ray_bundle(
        self, camera_ray_bundle: RayBundle, extra: Mapping[str, ExtraOutput] | None = None
    ) -> dict[str, Tensor]:
        """Renders an (h, w) bundle of rays in chunks.

        See :class:`~f3rm_ext.model_components.chunked_rendering.ChunkedRenderer`.
        """

        def forward(rays: RayBundle) -> dict[str, Any]:
            return self.get_outputs(rays if self.collider is None else self.collider(rays), extra)

        # Tensors made in inference mode can never have gradients.
        with torch.no_grad() if self.needs_autograd else torch.inference_mode():
            outputs = self.chunked.render(camera_ray_bundle, forward, self.device)
        # Clones made outside inference mode are ordinary tensors, which callers may change in place (ns-render does).
        return {name: value.clone() for name, value in outputs.items()}

    # --- queries -----------------------------------------------------------------------------------------------------

    def query_heads(self) -> dict[str, FeatureHead]:
        return {name: self.feature_field.head(name) for name in self.feature_field.names}

    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Renders all outputs for one camera, (h, w, channels) each.

        Unlike :meth:`get_outputs_for_camera` it raises every error.
        """
        rays = picture_rays(camera, self.device, obb_box)
        return self.get_outputs_for_camera_ray_bundle(rays, extra)

    def render_features(self, ray_bundle: RayBundle) -> dict[str, Float[Tensor, "rays feat"]]:
        """Renders the features of rays by head, float32; for evaluation."""
        if self.collider is not None:
            ray_bundle = self.collider(ray_bundle)
        ray_samples, _, _ = self.proposal_sampler(ray_bundle, density_fns=self.density_fns)
        positions = ray_samples.frustums.get_positions()
        density, _ = self.field.density(positions)
        hidden = self.feature_field.render_hidden(positions, ray_samples.get_weights(density))
        return {name: self.feature_field.head(name).decode(value) for name, value in hidden.items()}

    @torch.inference_mode()
    def render_points(self, points: Float[Tensor, "points 3"]) -> dict[str, Float[Tensor, "points hidden"]]:
        """Returns the hidden values of each head at points of the scene frame, as if rays ended there."""
        return self.feature_field.render_hidden(points[:, None], torch.ones_like(points[:, None, :1]))

    @torch.inference_mode()
    def density_at(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points"]:
        """Returns the density, per scene unit, at points of the scene frame."""
        return self.field.density(points[:, None])[0][:, 0, 0]
