"""Opening a trained run of splats, and exporting its splats to a file."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nerfstudio.engine.trainer import TrainerConfig

from f3rm_ext.data.eval_dataloaders import NO_EVAL_IMAGES
from f3rm_ext.data.image_datamanager import ImageDataManager
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.engine.opening import open_run
from f3rm_ext.errors import CaptureError
from f3rm_ext.query.run import Run
from f3rm_ext.splat.files import BadValues, SplatInfo, export_splats
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.files.spz import Axes, SpzVersion
from f3rm_ext.splat.gaussian_model import GaussianModel
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import fuse, smoothing_filter
from f3rm_ext.splat.rendering import SplatScene

_DECIMALS = 6
"""Of the map to the capture: longer comments would take several lines of PLY files."""


@dataclass
class SplatRun(Run):
    """A trained run of splats, opened for evaluation or export."""

    model: GaussianModel
    manager: ImageDataManager  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def photos(self) -> PinholeDataset:
        """The held-out photos.

        Raises:
            CaptureError: there are none.
        """
        if self.manager.eval_dataset is None:
            raise CaptureError(NO_EVAL_IMAGES)
        return self.manager.eval_dataset

    def set_filters(self, filter_2d: bool | None, filter_3d: bool | None) -> None:
        """Switches the filters of the model on or off; None keeps the state of training.

        If the run was trained without 3D filter, switching it on computes it from the training cameras.

        Raises:
            ConfigError: the model cannot have the filter.
        """
        mip = self.model.config.mip
        wanted = {"filter_2d": filter_2d, "filter_3d": filter_3d}
        changed = replace(mip, **{name: value for name, value in wanted.items() if value is not None})
        self.model.config = replace(self.model.config, mip=changed)
        if filter_3d and not mip.filter_3d:
            views = PinholeCameras.of(self.manager.train_dataset.cameras).to(self.model.device)
            means = self.model.gaussians.means.detach()
            self.model.filter_3d = smoothing_filter(means, views, options=mip)

    def splats(self, fused: bool = True) -> Gaussians:
        """Returns the Gaussians with the SH degree in use at the last training step; float32, which all formats store.

        If ``fused``, the 3D filter is in sizes and opacities, where the run has one.
        """
        model, mip = self.model, self.model.mip
        tensors = {name: value.detach().float() for name, value in model.gaussians.tensors().items()}
        gaussians = Gaussians.from_tensors(tensors).to_sh_degree(model.current_sh_degree)
        return fuse(gaussians, model.filter_3d, mip.area) if fused and mip.filter_3d else gaussians

    def scene(self, gaussians: Gaussians) -> SplatScene:
        """Returns Gaussians of :meth:`splats`, or some of them, as the run draws them."""
        mip, model = replace(self.model.config.mip, filter_3d=False), self.model
        return SplatScene(gaussians, mip, background=model.background, near_plane=model.config.near_plane)


def load_splat_run(load_config: Path, change: Callable[[TrainerConfig], None] = lambda config: None) -> SplatRun:
    """Opens a run of splats; ``change`` may edit its options first.

    Raises:
        ConfigError: the file does not exist, is no valid config, or is of a method without splats.
        CheckpointError: the run has no checkpoint yet, or all are damaged.
    """
    opened = open_run(
        load_config,
        lambda config: issubclass(config.pipeline.model._target, GaussianModel),
        "which has no splats: give a run of sugar-ext",
        change,
    )
    model, manager = opened.pipeline.model, opened.pipeline.datamanager
    assert isinstance(model, GaussianModel) and isinstance(manager, ImageDataManager)
    return SplatRun(model, manager, opened.config, opened.checkpoint, opened.step)


def export_run(
    run: SplatRun,
    out: Path,
    fused: bool = True,
    bad_values: BadValues = "error",
    spz_axes: Axes = "rub",
    spz_version: SpzVersion = 3,
    scores: GaussianScores | None = None,
    splats: Gaussians | None = None,
) -> SplatInfo:
    """Writes the splats of a run, in the format given by the file name and in the scene frame.

    Args:
        out: file name that ends in one of :data:`~f3rm_ext.splat.files.SUFFIXES`.
        scores: of queries on the Gaussians that are written, to go with them.
        splats: those of the run's Gaussians to write; by default all of them.

    Returns:
        Contents of the file; its notices are for the user.

    Raises:
        SplatFileError: see :func:`~f3rm_ext.splat.files.export_splats`.
        ConfigError: the file cannot be written.
    """
    mip = run.model.config.mip
    info = SplatInfo(
        render_mode="mip" if mip.filter_2d else "default", filters_fused=mip.filter_3d and fused, scores=scores
    )
    frame = run.frame.describe(_DECIMALS)
    record = {**run.describe(), "frame": "scene", **frame, "dilation_px2": mip.eps2d}
    splats = run.splats(fused) if splats is None else splats
    return export_splats(splats, out, info, record, bad_values, spz_axes, spz_version)
