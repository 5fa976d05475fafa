"""From Gaussians and a camera to pictures: colours, depth, normals, and what may be looked at in the viewer."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.memory.packed import stored_sh_colors
from f3rm_ext.splat.mip import MipOptions, smooth
from f3rm_ext.splat.rasterize import Backend, Rendered, rasterize
from f3rm_ext.splat.surface.normals import expected_depth, facing_normals, normals_from_depth, unit_normals

SOLID = 0.5
"""Accumulation from which a pixel has a normal."""


@dataclass(frozen=True)
class Scene:
    """What there is to draw."""

    gaussians: Gaussians
    """As they are optimised."""
    filter_3d: Float[Tensor, " gaussians"]
    """Standard deviations of the 3D filter, scene units."""
    mip: MipOptions
    """Which filters are used."""

    def solids(self) -> tuple[Float[Tensor, "gaussians 3"], Float[Tensor, " gaussians"]]:
        """Standard deviations and opacities as they are drawn."""
        sizes, alphas = self.gaussians.sizes(), self.gaussians.alphas()
        return smooth(sizes, alphas, self.filter_3d) if self.mip.filter_3d else (sizes, alphas)

    def inside(self, box: OrientedBox) -> "Scene":
        """Only what has its centre in a box."""
        within = box.within(self.gaussians.means)
        return Scene(self.gaussians[within], self.filter_3d[within], self.mip)


@dataclass(frozen=True)
class RenderSettings:
    """How it is drawn."""

    near_plane: float = 0.01
    """Gaussians whose centres are nearer are not drawn, scene units."""
    backend: Backend = "auto"
    """What draws."""


@dataclass
class RenderOutput:
    """A picture with what training needs to know about it."""

    screen: Rendered
    """Colours (and normals after them), depth and accumulation as composited."""
    normals: Float[Tensor, "h w 3"] | None
    """Σ w n in the camera's frame; where they were asked for."""

    def outputs(self) -> dict[str, Any]:
        """``rgb``, ``accumulation`` and ``depth`` (divided by the accumulation; 0 where there is nothing)."""
        depth = expected_depth(self.screen.depth, self.screen.alpha, divide=True, min_alpha=1e-3)
        return {
            "rgb": self.screen.colors[..., :3],
            "accumulation": self.screen.alpha[..., None],
            "depth": depth[..., None],
        }


def draw(
    scene: Scene,
    view: PinholeCameras,
    sh_degree: int,
    background: Float[Tensor, "3"],
    how: RenderSettings,
    *,
    normals: bool = False,
    absgrad: bool = False,
) -> RenderOutput:
    """Draws one view; differentiable.

    Args:
        scene: the Gaussians.
        view: one camera.
        sh_degree: highest degree of the colours that counts.
        background: behind everything.
        how: constants.
        normals: whether to composite normals too.
        absgrad: see :func:`~f3rm_ext.splat.rasterize.rasterize`.
    """
    gaussians, viewmat = scene.gaussians, view.viewmats[0]
    sizes, alphas = scene.solids()
    directions = gaussians.means.detach() - view.positions
    colors = stored_sh_colors(sh_degree, directions, gaussians.features_dc, gaussians.features_rest)
    if normals:
        facing = facing_normals(gaussians.normals(), gaussians.means, viewmat)
        colors = torch.cat([colors, facing], dim=1)
        background = torch.cat([background, torch.zeros_like(background)])
    screen = rasterize(
        gaussians.means,
        gaussians.quats,
        sizes,
        alphas,
        colors,
        viewmat,
        view.Ks[0],
        int(view.widths[0]),
        int(view.heights[0]),
        background=background,
        near_plane=how.near_plane,
        eps2d=scene.mip.eps2d,
        antialiased=scene.mip.antialiased,
        absgrad=absgrad,
        backend=how.backend,
    )
    return RenderOutput(screen, screen.colors[..., 3:] if normals else None)


def composite(
    scene: Scene,
    view: PinholeCameras,
    values: Float[Tensor, "gaussians channels"],
    how: RenderSettings,
    rows: tuple[int, int] | None = None,
) -> Float[Tensor, "h w channels"]:
    """Σ w v of any values that Gaussians carry, with the weights that colours are drawn with, over 0.

    Args:
        scene: the Gaussians.
        view: one camera.
        values: of each Gaussian; gradients flow to them where they need any.
        how: constants.
        rows: see :func:`~f3rm_ext.splat.rasterize.rasterize`.
    """
    sizes, alphas = scene.solids()
    return rasterize(
        scene.gaussians.means.detach(),
        scene.gaussians.quats.detach(),
        sizes.detach(),
        alphas.detach(),
        values,
        view.viewmats[0],
        view.Ks[0],
        int(view.widths[0]),
        int(view.heights[0]),
        near_plane=how.near_plane,
        eps2d=scene.mip.eps2d,
        antialiased=scene.mip.antialiased,
        backend=how.backend,
        rows=rows,
    ).colors


def pictures(
    scene: Scene,
    view: PinholeCameras,
    sh_degree: int,
    background: Float[Tensor, "3"],
    how: RenderSettings,
    guard: OutputGuard,
    obb_box: OrientedBox | None = None,
) -> dict[str, Tensor]:
    """All there is to see from one camera, outside training.

    Returns:
        (h, w, channels): ``rgb``, ``accumulation``, ``depth``; ``normal`` (composited) and ``normal_from_depth``, both
        in the scene's frame, mapped from −1..1 to 0..1, black where there is nothing.
    """
    if obb_box is not None:
        scene = scene.inside(obb_box)
    with torch.no_grad():
        drawn = draw(scene, view, sh_degree, background, how, normals=True)
        outputs = drawn.outputs()
        outputs["rgb"] = outputs["rgb"].clamp(0, 1)
        solid = outputs["accumulation"] > SOLID
        turn = view.viewmats[0, :3, :3]

        def colors(normals: Tensor, valid: Tensor) -> Tensor:
            return torch.where(valid, (normals @ turn + 1) / 2, 0)

        def composited() -> Tensor:
            assert drawn.normals is not None
            normals, valid = unit_normals(drawn.normals, rebuild_z=False)
            return colors(normals, valid[..., None] & solid)

        def from_depth() -> Tensor:
            normals, valid = normals_from_depth(outputs["depth"][..., 0], view.Ks[0])
            return colors(normals, valid[..., None] & solid)

        guard.add(outputs, "normal", composited)
        guard.add(outputs, "normal_from_depth", from_depth)
    return outputs
