"""Splats that a run begins with, from a file or from a checkpoint."""

from pathlib import Path

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.splat.files import read_splats
from f3rm_ext.splat.gaussians import Gaussians

CHECKPOINTS = (".ckpt", ".pt")
_PREFIXES = ("_model.gauss_params.", "gauss_params.")


def read_start(path: Path) -> Gaussians:
    """The splats of ``--pipeline.model.start-from``.

    Args:
        path: .ply, .spz, .splat, or a checkpoint of `sugar-ext` or splatfacto.

    Raises:
        UserError: there is no such file, or it holds no usable Gaussians.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path} to start from: give a .ply, .spz, .splat or .ckpt file.")
    if path.suffix in CHECKPOINTS:
        return _of_checkpoint(path)
    gaussians, info = read_splats(path)
    for notice in info.notices:
        CONSOLE.log(notice, markup=False)
    return gaussians


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
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if found:
            try:
                gaussians = Gaussians.of(found)
            except KeyError as error:
                raise CheckpointError(
                    f"The checkpoint {path} lacks {error} of its Gaussians: export it as .ply instead."
                ) from error
            return gaussians.checked(str(path))
    raise CheckpointError(f"The checkpoint {path} holds no Gaussians: give one of sugar-ext or splatfacto.")
