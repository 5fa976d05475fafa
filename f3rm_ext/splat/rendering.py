"""Rendering of Gaussians: colours, depth, normals, and the outputs of the viewer and of evaluation."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat.gaussians import Ellipsoids, Gaussians
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.mip import MipOptions, smooth
from f3rm_ext.splat.rasterize import Backend, Rasterization, prepare, rasterize
from f3rm_ext.splat.rasterize.camera import Camera, Strips
from f3rm_ext.splat.rasterize.sharded import rasterize_sharded
from f3rm_ext.splat.regularization.normals import (
    expected_depth,
    facing_normals,
    facing_planes,
    normals_from_depth,
    plane_depth,
    unit_normals,
)

SOLID = 0.5
"""Pixels have a normal where the accumulation exceeds this."""
_TRANSPARENT = -30.0
"""Logit of an opacity that no rasteriser draws."""


@dataclass(frozen=True)
class SplatScene:
    """Gaussians, and all that rendering them takes beside a camera."""

    gaussians: Gaussians
    """The Gaussians as optimised, without the 3D filter."""
    mip: MipOptions
    """Options of the 2D and the 3D filter."""
    filter_3d: Float[Tensor, " gaussians"] | None = None
    """Standard deviations of the 3D filter, scene units; None for no filter."""
    sh_degree: int | None = None
    """SH degree of the colours; higher coefficients are ignored. None for that of the Gaussians."""
    background: Float[Tensor, "3"] | None = None
    """Colour behind the Gaussians; black if None."""
    near_plane: float = 0.01
    """Gaussians whose centres are nearer are not rendered, scene units."""
    backend: Backend = "auto"
    """The rasteriser."""
    sharded: bool = False
    """Whether every rank holds a part of the Gaussians; all ranks then render at the same time."""

    def shapes(self) -> Ellipsoids:
        """Returns the Gaussians without colours, with the 3D filter if it is on."""
        gaussians, sizes, alphas = self.gaussians, self.gaussians.sizes(), self.gaussians.alphas()
        if self.mip.filter_3d and self.filter_3d is not None:
            sizes, alphas = smooth(sizes, alphas, self.filter_3d, self.mip.area)
        return Ellipsoids(gaussians.means, gaussians.quats, sizes, alphas)

    def camera(self, view: PinholeCameras) -> Camera:
        """Returns one camera with the settings of the rasteriser."""
        return Camera(
            view.viewmats[0],
            view.Ks[0],
            int(view.widths[0]),
            int(view.heights[0]),
            near_plane=self.near_plane,
            eps2d=self.mip.eps2d,
            antialiased=self.mip.filter_2d,
        )

    def take(self, kept: Bool[Tensor, " gaussians"]) -> "SplatScene":
        """Returns some of the Gaussians."""
        filter_3d = None if self.filter_3d is None else self.filter_3d[kept]
        return replace(self, gaussians=self.gaussians[kept], filter_3d=filter_3d)

    def hide(self, hidden: Bool[Tensor, " gaussians"]) -> "SplatScene":
        """Returns all Gaussians, some of them too transparent to be drawn: nothing but opacities is copied."""
        opacities = self.gaussians.opacities.masked_fill(hidden[:, None], _TRANSPARENT)
        return replace(self, gaussians=replace(self.gaussians, opacities=opacities))


@dataclass
class RenderOutput:
    """A rendered image and its by-products for training."""

    rasterization: Rasterization
    """Composited colours, normals and distances of planes (what of them was requested), depth and accumulation."""
    rgb: Float[Tensor, "h w 3"] | None = None
    """Composited colours; None if they were left out."""
    normals: Float[Tensor, "h w 3"] | None = None
    """Σ w n in the camera's frame, OpenCV axes; None unless requested."""
    plane_depth: Float[Tensor, "h w"] | None = None
    """Depth of the Gaussians' planes (:mod:`f3rm_ext.splat.regularization.normals`), along the camera's axis, scene
    units; 0 where there is none. None unless requested."""

    def outputs(self) -> dict[str, Any]:
        """Returns ``rgb``, ``accumulation`` and ``depth`` (divided by the accumulation; 0 where that is below 1e-3) of
        what was rendered with colours."""
        depth = expected_depth(self.rasterization.depth, self.rasterization.alpha, divide=True, min_alpha=1e-3)
        return {"rgb": self.rgb, "accumulation": self.rasterization.alpha[..., None], "depth": depth[..., None]}


def render(
    scene: SplatScene,
    view: PinholeCameras,
    *,
    rgb: bool = True,
    normals: bool = False,
    planes: bool = False,
    absgrad: bool = False,
) -> RenderOutput:
    """Renders one view; differentiable.

    Args:
        rgb: composite colours; may be left out where there is something else to composite.
        planes: composite normals and distances of planes too, for the depth of the planes.
    """
    gaussians, background, viewmat = scene.gaussians, scene.background, view.viewmats[0]
    shapes, camera = scene.shapes(), scene.camera(view)
    sh_degree = gaussians.sh_degree if scene.sh_degree is None else scene.sh_degree
    if scene.sharded:
        if normals or planes or absgrad:
            raise ValueError("neither normals nor absolute gradients can be had of Gaussians divided over ranks")
        colors = gaussians.features_dc, gaussians.features_rest
        sharded = rasterize_sharded(shapes, *colors, sh_degree, camera, background)
        return RenderOutput(sharded, sharded.colors)
    payload: list[Tensor] = []
    widths: dict[str, int] = {}
    """Channels of what is composited, in this order."""
    if rgb:
        widths["rgb"] = 3
        directions = gaussians.means.detach() - view.positions
        payload.append(packed_sh_colors(sh_degree, directions, gaussians.features_dc, gaussians.features_rest))
    if planes:
        widths |= {"normals": 3, "distances": 1}
        payload.append(facing_planes(gaussians, viewmat))
    elif normals:
        widths["normals"] = 3
        payload.append(facing_normals(gaussians.normals(), gaussians.means, viewmat))
    first = 3 if rgb else 0
    colors = payload[0] if len(payload) == 1 else torch.cat(payload, dim=1)
    if background is not None and colors.shape[1] > first:
        background = torch.cat([background[:first], background.new_zeros(colors.shape[1] - first)])
    rasterization = rasterize(shapes, colors, camera, background, absgrad=absgrad, backend=scene.backend)
    # One split, because the gradient of each slice would be a picture of all channels.
    composited = dict(zip(widths, rasterization.colors.split(list(widths.values()), dim=-1), strict=True))
    output = RenderOutput(rasterization, composited.get("rgb"), composited.get("normals"))
    if planes:
        # A part of the picture's channels, which each kernel would have to copy for itself.
        output.normals = composited["normals"].contiguous()
        output.plane_depth = plane_depth(output.normals, composited["distances"][..., 0], camera.K)
    return output


def composite(
    scene: SplatScene, view: PinholeCameras, values: Float[Tensor, "gaussians channels"]
) -> Float[Tensor, "h w channels"]:
    """Composites values that Gaussians carry: Σ w v over 0, with the same weights as colours; differentiable in the
    values alone."""
    shapes = scene.shapes().map(Tensor.detach)
    return rasterize(shapes, values, scene.camera(view), backend=scene.backend).colors


@torch.no_grad()
def prepare_view(scene: SplatScene, view: PinholeCameras) -> Strips:
    """Prepares one view to :func:`composite` many channels by strips; see :func:`~f3rm_ext.splat.rasterize.prepare`."""
    return prepare(scene.shapes(), scene.camera(view), scene.backend)


@torch.no_grad()
def render_nearby(
    scene: SplatScene, view: PinholeCameras, *, rgb: bool = True
) -> tuple[Float[Tensor, "h w"], Float[Tensor, "h w 3"] | None]:
    """Renders what another view is compared with, without gradient: depth of planes and colours.

    Returns:
        The depth, 0 where the accumulation is at most ½, and the colours.
    """
    rendered = render(scene, view, rgb=rgb, planes=True)
    assert rendered.plane_depth is not None
    solid = rendered.rasterization.alpha > SOLID
    return torch.where(solid, rendered.plane_depth, 0), rendered.rgb


def render_outputs(scene: SplatScene, view: PinholeCameras, guard: OutputGuard) -> dict[str, Tensor]:
    """Renders the outputs of one camera, outside training.

    Returns:
        (h, w, channels): ``rgb``, ``accumulation`` and ``depth``; ``plane_depth``, the unbiased depth of the Gaussians'
        planes, 0 where the accumulation is at most ½ or the plane is edge-on; ``normal`` (normal_colors) and
        ``normal_from_depth`` as colours: scene-frame normals mapped from −1..1 to 0..1, black where the accumulation is
        at most ½. Without ``plane_depth`` and ``normal`` if the Gaussians are divided over ranks.
    """
    with torch.no_grad():
        rendered = render(scene, view, planes=not scene.sharded)
        outputs = rendered.outputs()
        outputs["rgb"] = outputs["rgb"].clamp(0, 1)
        solid = outputs["accumulation"] > SOLID
        turn, K = view.viewmats[0, :3, :3], view.Ks[0]
        planes, normals = rendered.plane_depth, rendered.normals

        def colors(normals: Tensor, valid: Tensor) -> Tensor:
            return torch.where(valid[..., None] & solid, (normals @ turn + 1) / 2, 0)

        if planes is not None and normals is not None:
            guard.add(outputs, "plane_depth", lambda: torch.where(solid, planes[..., None], 0))
            guard.add(outputs, "normal", lambda: colors(*unit_normals(normals, rebuild_z=False)))
        guard.add(outputs, "normal_from_depth", lambda: colors(*normals_from_depth(outputs["depth"][..., 0], K)))
    return outputs
