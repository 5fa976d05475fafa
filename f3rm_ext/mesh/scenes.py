"""What a mesh is extracted from: a trained run, or splats in a file with the capture that they are of."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.stereo.sweep import PhotoStereo
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.splat_depth import front_plane_depth, median_depth
from f3rm_ext.mesh.views import Depth, RenderedView, SceneViews, pinhole, rendered_view
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions, sampling_intervals
from f3rm_ext.splat.rendering import SplatScene, render_outputs
from f3rm_ext.splat.start_from import read_start

if TYPE_CHECKING:
    from f3rm_ext.query.run import Run


@dataclass
class SurfaceScene:
    """A trained scene, ready for extraction."""

    views: SceneViews
    """Training views of the scene."""
    gaussians: Gaussians | None
    """Its Gaussians as optimised, without the 3D filter, float32, on the CPU; None for a field."""
    frame: CaptureFrame
    """The map to the frame of the capture."""
    origin: dict[str, object]
    """Run and checkpoint of the scene, as JSON."""
    stereo: SceneViews | None = None
    """The views with the depth of stereo, which tsdf takes where it is sure; None leaves rendered depth."""


def run_scene(run: "Run", scale: float = 1.0, depth: Depth | None = None, stereo_width: int = 0) -> SurfaceScene:
    """Returns the scene of a run of f3rm-ext or sugar-ext.

    Args:
        scale: factor on the size of the rendered views.
        depth: where the surface is along a ray; None takes ``planes`` for splats trained to be flat (regularisation
            planar), else ``median``.
        stereo_width: width of the photos for stereo, px; 0 does without.
    """
    from f3rm_ext.export.splats import SplatRun
    from f3rm_ext.splat.gaussian_model import GaussianModel

    cameras = run.cameras("train")
    outputs = run.manager.train_dataparser_outputs
    frame, stereo = CaptureFrame.from_outputs(outputs, run.data), _stereo(outputs, stereo_width)
    if not isinstance(run.model, GaussianModel):
        depth = depth or "median"
        origin = {**run.describe(), "depth": depth}
        return SurfaceScene(SceneViews.from_field(run.model, cameras, scale, depth), None, frame, origin, stereo)
    splats = SplatRun(run.model, run.manager, run.config, run.checkpoint, run.step)  # type: ignore[arg-type]
    mip = replace(run.model.config.mip, filter_3d=False)  # it is in the Gaussians
    depth = depth or ("planes" if getattr(run.model.config, "regularization", "none") == "planar" else "median")
    views = splat_views(splats.splats(fused=True), mip, pinhole(cameras, scale), depth)
    origin = {**run.describe(), "depth": depth}
    return SurfaceScene(views, splats.splats(fused=False).to("cpu"), frame, origin, stereo)


def open_splat_scene(
    splats: Path,
    data: Path,
    frame: Literal["auto", "scene", "capture"] = "auto",
    scale: float = 1.0,
    depth: Depth | None = None,
    device: torch.device | str = "cpu",
    stereo_width: int = 0,
) -> SurfaceScene:
    """Opens splats of a file, seen from the training cameras of a capture.

    Args:
        splats: .ply, .spz, .sog, .splat, a checkpoint of sugar-ext, splatfacto or SuGaR, or a folder of 3DGS or SuGaR.
        frame: frame of the splats; auto is the usual one of such files.
        scale: as for :func:`run_scene`, like stereo_width.
        depth: where the surface is along a ray; None takes ``median``.

    Raises:
        UserError: one of them cannot be read, or no camera sees the splats.
    """
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    outputs = CaptureDataParserConfig(data=data).setup().get_dataparser_outputs("train")
    start = read_start(splats).as_drawn()
    gaussians = start.to_scene(outputs, frame).gaussians
    cameras = pinhole(outputs.cameras, scale)
    if not bool(sampling_intervals(gaussians.means, PinholeCameras.of(cameras))[1].any()):
        frame_name = start.frame if frame == "auto" else frame
        other = "capture" if frame_name == "scene" else "scene"
        raise MeshError(
            f"No camera of {data} sees any of the {len(gaussians)} Gaussians of {splats}, taken to be in the frame of "
            f"the {frame_name}, so they are of another capture or in another frame: try --splats-frame {other}."
        )
    depth = depth or "median"
    origin: dict[str, object] = {"splats": str(splats.resolve()), "capture": str(data.resolve()), "depth": depth}
    frames = CaptureFrame.from_outputs(outputs, data)
    mip = MipOptions(filter_3d=False, filter_2d=False)
    views = splat_views(gaussians.to(device), mip, cameras, depth)
    return SurfaceScene(views, gaussians, frames, origin, _stereo(outputs, stereo_width))


def _stereo(outputs: DataparserOutputs, width_px: int) -> SceneViews | None:
    if not width_px:
        return None
    stereo = PhotoStereo.from_dataset(PinholeDataset(outputs, min(1.0, width_px / int(outputs.cameras.width.max()))))
    return SceneViews(stereo.cameras, lambda index: RenderedView(stereo.color(index), stereo.depth(index)))


def splat_views(gaussians: Gaussians, mip: MipOptions, cameras: Cameras, depth: Depth) -> SceneViews:
    """Returns the views of splats, over black.

    Args:
        gaussians: with their 3D filter, on the device to render on.
        mip: the 2D filter; without a 3D filter.
    """
    device = gaussians.means.device
    scene, guard = SplatScene(gaussians, mip), OutputGuard()

    @torch.inference_mode()
    def render(index: int) -> RenderedView:
        view = PinholeCameras.to_render(cameras[index : index + 1], device)
        outputs = render_outputs(scene, view, guard)
        distance = outputs["depth"]
        if depth == "planes":
            distance = front_plane_depth(scene, view)[..., None]
        elif depth == "median":
            distance = median_depth(scene, view, distance[..., 0])[..., None]
        return rendered_view(outputs, distance)

    return SceneViews(PinholeCameras.of(cameras), render)
