"""Refuses commands of ns-export and ns-render that cannot work with one of our runs, and names those that can."""

import os
import shlex
from collections.abc import Callable, Sequence

from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.engine.arguments import find_option
from f3rm_ext.errors import ConfigError


def export_command(argv: Sequence[str]) -> str | None:
    """Returns the command of ``ns-export`` that is running; None in every other program.

    >>> export_command(["/env/bin/ns-export", "pointcloud", "--load-config", "config.yml"])
    'pointcloud'
    """
    return _command(argv, "ns-export")


def _command(argv: Sequence[str], program: str) -> str | None:
    """Returns the command of a program of nerfstudio that is running; None in every other program."""
    if not argv or os.path.splitext(os.path.basename(argv[0]))[0] != program:
        return None
    return next((argument for argument in argv[1:] if not argument.startswith("-")), None)


def _our_command(argv: Sequence[str], command: str, file: str) -> str:
    """Returns the `f3rm-ext export` command for the same run and output folder."""
    config = find_option(argv, "--load-config", "…/config.yml")
    folder = find_option(argv, "--output-dir", "exports").rstrip("/")
    return f"`f3rm-ext export {command} --load-config {shlex.quote(config)} --output {shlex.quote(f'{folder}/{file}')}`"


def _gaussians(argv: Sequence[str]) -> str:
    return (
        "supports only splatfacto: "
        f"{_our_command(argv, 'splats', find_option(argv, '--output-filename', 'splat.ply'))} writes the same layout"
    )


def _points(argv: Sequence[str]) -> str:
    return (
        f"follows rays through a field, which splats do not have: {_our_command(argv, 'splats', 'splat.ply')} writes "
        f"the Gaussians, and {_our_command(argv, 'features', 'point_cloud.ply')} points on surfaces if the run has "
        "features"
    )


_SPLATS: dict[str, Callable[[Sequence[str]], str]] = {
    "gaussian-splat": _gaussians,
    "pointcloud": _points,
    "poisson": _points,
    "tsdf": _points,
    "marching-cubes": _points,
}
_FIELDS: dict[str, Callable[[Sequence[str]], str]] = {
    "gaussian-splat": lambda argv: "writes splats, but this run is a field: train sugar-ext for splats",
    "marching-cubes": lambda argv: "needs signed distances, but this field has densities: use ns-export tsdf",
}
"""By command of ns-export: why it cannot export such a run, and which command can."""


def check_export(command: str, argv: Sequence[str], *, splats: bool, normals: bool = False) -> None:
    """Checks that a command of ns-export can export a run of splats or of a field.

    Raises:
        ConfigError: it cannot; the message names the command to use instead.

    >>> check_export("marching-cubes", ["ns-export", "marching-cubes"], splats=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    f3rm_ext.errors.ConfigError: ns-export marching-cubes needs signed distances, ...
    """
    asks_model = find_option(argv, "--normal-method", "model_output") == "model_output"
    if not splats and command in ("pointcloud", "poisson") and asks_model and not normals:
        raise ConfigError(
            f"ns-export {command} needs normals from the model, which this run does not render: add "
            "--normal-method open3d, or train with --pipeline.model.render-normals True."
        )
    reason = (_SPLATS if splats else _FIELDS).get(command)
    if reason is not None:
        raise ConfigError(f"ns-export {command} {reason(argv)}.")


def check_image_sizes(argv: Sequence[str], cameras: Cameras) -> None:
    """Checks that a running ``ns-export tsdf`` can hold its pictures, from all training cameras, in one array.

    Raises:
        ConfigError: the cameras have several sizes; the message names the command to use instead.
    """
    sizes = set(zip(cameras.width.flatten().tolist(), cameras.height.flatten().tolist(), strict=True))
    if export_command(argv) == "tsdf" and len(sizes) > 1:
        raise ConfigError(
            f"ns-export tsdf needs photos of one size, but those of this capture have {len(sizes)} sizes: "
            f"{_our_command(argv, 'mesh', 'tsdf_mesh.ply')} takes them as they are."
        )


def check_split(argv: Sequence[str], *, holds_out: bool) -> None:
    """Checks that a running ``ns-render dataset`` has photos to render.

    Args:
        holds_out: whether the capture has evaluation images.

    Raises:
        ConfigError: it has none of the split that is asked for.

    >>> check_split(["ns-render", "dataset", "--split", "train"], holds_out=False)
    >>> check_split(["ns-render", "dataset"], holds_out=False)
    Traceback (most recent call last):
    f3rm_ext.errors.ConfigError: The capture holds out no photo for ns-render dataset to render: add --split train.
    """
    wanted = find_option(argv, "--split", "test").split("+")
    if _command(argv, "ns-render") == "dataset" and not holds_out and wanted != ["train"]:
        raise ConfigError("The capture holds out no photo for ns-render dataset to render: add --split train.")
