"""Splats to start a run from, read from a file or a checkpoint."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.splat.files import read_splats
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, Gaussians, sh_rest_count
from f3rm_ext.splat.mip import MipOptions, fuse, sampling_intervals, smoothing_filter, unfuse
from f3rm_ext.splat.transform import to_scene

CHECKPOINTS = (".ckpt", ".pt")
_PREFIXES = ("_model.gauss_params.", "gauss_params.")
_SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "features_rest": ()}
_REST = tuple(map(sh_rest_count, range(MAX_SH_DEGREE + 1)))
_SUGAR_NAMES = {
    "means": "_points",
    "scales": "_scales",
    "quats": "_quaternions",
    "opacities": "all_densities",
    "features_dc": "_sh_coordinates_dc",
    "features_rest": "_sh_coordinates_rest",
}
"""SuGaR's names of the tensors."""
_ITERATION = re.compile(r"iteration_(\d+)")

Frame = Literal["scene", "capture"]


@dataclass(frozen=True)
class Start:
    """Splats to start from."""

    gaussians: Gaussians
    """The Gaussians of the file."""
    fused: bool
    """Whether they include the 3D filter."""
    source: Path
    """The file."""
    frame: Frame
    """Usual frame of such files: that of the capture's original poses for folders of 3DGS and for SuGaR, else the
    scene frame."""
    filter_3d: torch.Tensor | None = None
    """Standard deviations of the 3D filter that a run of this package had, (gaussians,), scene units; None without."""
    filter_area: bool = False
    """Whether that filter left the thinnest side out of its compensation; see :class:`MipOptions`."""

    def as_drawn(self) -> "Start":
        """Returns the Gaussians as their run drew them: with its 3D filter in them."""
        if self.filter_3d is None:
            return self
        return replace(self, gaussians=fuse(self.gaussians, self.filter_3d, self.filter_area), filter_3d=None)

    def to_scene(self, outputs: Any, frame: Literal["auto", "scene", "capture"]) -> "Start":
        """Transforms the splats to the scene frame.

        Args:
            frame: frame of the splats; auto is the usual one of such files.
        """
        if (self.frame if frame == "auto" else frame) == "scene":
            return replace(self, frame="scene")
        return replace(self, gaussians=to_scene(self.gaussians, outputs), frame="capture")

    def prepare_gaussians(self, views: PinholeCameras, options: MipOptions) -> Gaussians:
        """Returns the Gaussians for a run: checked to be in view, and without a fused 3D filter.

        The run applies its own filter, so a fused one is removed, computed from the run's cameras. If that would leave
        Gaussians without a size, the filter was made for other cameras; the splats then stay unchanged, and this is
        logged.

        Args:
            views: the training cameras; the Gaussians move to their device.
            options: options of the run's filter; nothing is removed if the run has none.

        Raises:
            ConfigError: no camera sees any of the Gaussians.
        """
        gaussians = self.gaussians.to(views.viewmats.device)
        if not bool(sampling_intervals(gaussians.means, views)[1].any()):
            taken, other = ("scene", "capture") if self.frame == "scene" else ("capture", "scene")
            raise ConfigError(
                f"No training camera sees any of the {len(gaussians)} Gaussians to start from, assumed to be in the "
                f"frame of the {taken}, so they are of another scene or in another frame: "
                f"try --pipeline.model.start-frame {other} (scene: as `f3rm-ext export splats` and "
                "`ns-export gaussian-splat` write them; capture: as 3DGS and SuGaR write them)."
            )
        if not (self.fused and options.filter_3d):
            return gaussians
        try:
            return unfuse(gaussians, smoothing_filter(gaussians.means, views, options=options), options.area)
        except ConfigError:
            CONSOLE.log(
                "The splats include a 3D filter made for other cameras. It is now applied a second time, so they start "
                "too wide: export them with --no-fused to avoid this."
            )
            return gaussians


def read_start(path: Path, iteration: int | None = None) -> Start:
    """Reads the splats given by ``--pipeline.model.start-from``.

    Args:
        path: .ply, .spz, .sog, .splat, a checkpoint of `sugar-ext`, splatfacto or SuGaR, or a folder of 3DGS or SuGaR.
        iteration: iteration to read from a folder; None for the newest.

    Raises:
        UserError: the file or iteration does not exist, or holds no usable Gaussians.
    """
    folder = path.is_dir()
    if folder:
        path = _find_splats(path, iteration)
    elif not path.is_file():
        raise ConfigError(
            f"There is no file {path} to start from: give a .ply, .spz, .sog, .splat, .ckpt or .pt file, or an output "
            "folder of 3DGS."
        )
    elif iteration is not None:
        raise ConfigError(
            f"--pipeline.model.start-iteration selects an iteration in a folder, but {path} is a file: leave it out."
        )
    if path.suffix in CHECKPOINTS:
        return _read_checkpoint(path)
    gaussians, info = read_splats(path)
    for notice in info.notices:
        CONSOLE.log(notice, markup=False)
    return Start(gaussians, bool(info.filters_fused), path, "capture" if folder else "scene")


def _find_splats(folder: Path, iteration: int | None) -> Path:
    """Returns the file of an iteration, the newest by default, in a folder written by 3DGS or SuGaR."""
    files = {int(path.stem): path for path in folder.glob("*.pt") if path.stem.isdigit()}
    for path in folder.glob("point_cloud/iteration_*/point_cloud.ply"):
        if number := _ITERATION.fullmatch(path.parent.name):
            files[int(number[1])] = path
    if not files:
        raise ConfigError(
            f"There are no splats to start from in the folder {folder}: give an output folder of 3DGS (with "
            "point_cloud/iteration_N/point_cloud.ply) or of SuGaR (with N.pt), or a file."
        )
    if iteration is not None and iteration not in files:
        there = ", ".join(map(str, sorted(files)))
        raise ConfigError(
            f"There is no iteration {iteration} in the folder {folder}: choose --pipeline.model.start-iteration from "
            f"{there}, or leave it out for the newest."
        )
    return files[max(files) if iteration is None else iteration]


def _read_checkpoint(path: Path) -> Start:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read ({type(error).__name__}), it is damaged or would run code: "
            "export it as .ply with the program that made it."
        ) from error
    state = content if isinstance(content, dict) else {}
    for key in ("pipeline", "state_dict"):
        if isinstance(state.get(key), dict):
            state = state[key]
    if _SUGAR_NAMES["means"] in state:
        return Start(_read_sugar(state, path), False, path, "capture")
    for prefix in _PREFIXES:
        tensors = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix) and isinstance(value, torch.Tensor)
        }
        if tensors:
            missing = [name for name in _SHAPES if name not in tensors]
            if missing:
                raise CheckpointError(
                    f"The checkpoint {path} lacks {', '.join(missing)} of its Gaussians: export it as .ply instead."
                )
            _require_shapes(tensors, path)
            gaussians = Gaussians.from_tensors(tensors).require_finite(str(path))
            filters = state.get("_model.filter_3d")
            if not (isinstance(filters, torch.Tensor) and filters.shape == (len(gaussians),) and filters.any()):
                return Start(gaussians, False, path, "scene")
            about = json.loads(state.get("_model._extra_state", {}).get("about", "{}"))
            # Runs before this was stored chose the compensation by the regularisation.
            area = about.get("filter_area", about.get("regularization") == "planar")
            return Start(gaussians, False, path, "scene", filters, area)
    raise CheckpointError(f"The checkpoint {path} holds no Gaussians: give one of sugar-ext, splatfacto or SuGaR.")


def _read_sugar(state: dict[str, Any], path: Path) -> Gaussians:
    """Returns the Gaussians of SuGaR's coarse stage."""
    if "_surface_mesh_faces" in state or (
        isinstance(state.get("_scales"), torch.Tensor) and state["_scales"].shape[1:] == (2,)
    ):
        raise CheckpointError(
            f"The checkpoint {path} is of SuGaR's refined model, whose Gaussians are bound to a mesh: give the coarse "
            "one, or the .ply that SuGaR exports of the refined one."
        )
    missing = [name for name in _SUGAR_NAMES.values() if not isinstance(state.get(name), torch.Tensor)]
    if missing:
        raise CheckpointError(f"SuGaR's checkpoint {path} lacks {', '.join(missing)}: export it as .ply instead.")
    tensors = {name: state[theirs].detach().float() for name, theirs in _SUGAR_NAMES.items()}
    tensors["features_dc"] = tensors["features_dc"].flatten(1)
    tensors["opacities"] = tensors["opacities"].reshape(len(tensors["opacities"]), -1)
    _require_shapes(tensors, path)
    return Gaussians.from_tensors(tensors).require_finite(str(path))


def _require_shapes(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises CheckpointError unless all tensors have the right shape for the same number of Gaussians."""
    rest = tensors["features_rest"].shape
    if len(rest) != 3 or rest[1] not in _REST or rest[2] != 3:
        raise CheckpointError(
            f"The colours' coefficients in {path} have the shape {tuple(rest)}, which belongs to no degree of "
            f"spherical harmonics from 0 to {MAX_SH_DEGREE}: export it as .ply with the program that made it."
        )
    for name, shape in _SHAPES.items():
        value = tuple(tensors[name].shape)
        if value[:1] != rest[:1] or (shape and value[1:] != shape):
            raise CheckpointError(
                f"The {name} in {path} have the shape {value}, which does not fit the {rest[0]} Gaussians there: "
                "export it as .ply with the program that made it."
            )
