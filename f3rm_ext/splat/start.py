"""Splats that a run begins with, from a file or from a checkpoint."""

from pathlib import Path
from typing import NamedTuple

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.splat.files import read_splats
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, Gaussians, sh_rest_count
from f3rm_ext.splat.mip import MipOptions, sampling_intervals, smoothing_filter, unfuse
from f3rm_ext.splat.views import Views

CHECKPOINTS = (".ckpt", ".pt")
_PREFIXES = ("_model.gauss_params.", "gauss_params.")
_SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "features_rest": ()}
_REST = tuple(map(sh_rest_count, range(MAX_SH_DEGREE + 1)))


class Start(NamedTuple):
    """Splats to begin with."""

    gaussians: Gaussians
    """As they are in the file."""
    fused: bool
    """Whether the 3D filter is in them."""

    def seen_by(self, views: Views, options: MipOptions) -> Gaussians:
        """The splats as a run begins with them: seen by its cameras, and without a 3D filter, which it applies itself.

        The filter is taken out as the run's cameras make it. Where these cannot be those it was made with, for
        Gaussians would be left without a size, the splats stay as they are, and that is said.

        Args:
            views: the training cameras; the splats go to their device.
            options: of the filter; nothing is taken out where the run has none.

        Raises:
            ConfigError: no camera sees any of them.
        """
        gaussians = self.gaussians.to(views.viewmats.device)
        if not bool(sampling_intervals(gaussians.means, *views)[1].any()):
            raise ConfigError(
                f"No training camera sees any of the {len(gaussians)} Gaussians to start from, so they are of another "
                "scene or in another frame: give splats in nerfstudio's frame, as `f3rm-ext export splats` and "
                "`ns-export gaussian-splat` write them."
            )
        if not (self.fused and options.filter_3d):
            return gaussians
        try:
            return unfuse(gaussians, smoothing_filter(gaussians.means, *views, options=options))
        except ConfigError:
            CONSOLE.log(
                "The 3D filter is in the splats already, made for other cameras than these, and is applied again, so "
                "that they begin too wide: export them with --no-fused to go on where they were."
            )
            return gaussians


def read_start(path: Path) -> Start:
    """The splats of ``--pipeline.model.start-from``.

    Args:
        path: .ply, .spz, .splat, or a checkpoint of `sugar-ext` or splatfacto.

    Raises:
        UserError: there is no such file, or it holds no usable Gaussians.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path} to start from: give a .ply, .spz, .splat or .ckpt file.")
    if path.suffix in CHECKPOINTS:
        return Start(_of_checkpoint(path), fused=False)
    gaussians, info = read_splats(path)
    for notice in info.notices:
        CONSOLE.log(notice, markup=False)
    return Start(gaussians, bool(info.filters_fused))


def _of_checkpoint(path: Path) -> Gaussians:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read ({type(error).__name__}), it is damaged or needs code to be run: "
            "export it as .ply with the program that made it."
        ) from error
    state = content.get("pipeline", content) if isinstance(content, dict) else {}
    for prefix in _PREFIXES:
        found = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix) and isinstance(value, torch.Tensor)
        }
        if found:
            missing = [name for name in _SHAPES if name not in found]
            if missing:
                raise CheckpointError(
                    f"The checkpoint {path} lacks {', '.join(missing)} of its Gaussians: export it as .ply instead."
                )
            _require_shapes(found, path)
            return Gaussians.of(found).checked(str(path))
    raise CheckpointError(f"The checkpoint {path} holds no Gaussians: give one of sugar-ext or splatfacto.")


def _require_shapes(found: dict[str, torch.Tensor], path: Path) -> None:
    """Raises CheckpointError unless all tensors are of as many Gaussians, with the right shape for each."""
    rest = found["features_rest"].shape
    if len(rest) != 3 or rest[1] not in _REST or rest[2] != 3:
        raise CheckpointError(
            f"The colours' coefficients in {path} have the shape {tuple(rest)}, which belongs to no degree of "
            f"spherical harmonics from 0 to {MAX_SH_DEGREE}: export it as .ply with the program that made it."
        )
    for name, shape in _SHAPES.items():
        value = tuple(found[name].shape)
        if value[:1] != rest[:1] or (shape and value[1:] != shape):
            raise CheckpointError(
                f"The {name} in {path} have the shape {value}, which does not fit the {rest[0]} Gaussians there: "
                "export it as .ply with the program that made it."
            )
