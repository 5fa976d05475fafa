"""What to run where a command of ns-export does not know our methods."""

import shlex
from collections.abc import Callable, Sequence

from f3rm_ext.errors import ConfigError


def _given(argv: Sequence[str], option: str, default: str) -> str:
    """The value of an option of a command line."""
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(argv[index + 1 :]), default)
    return default


def _ours(argv: Sequence[str], command: str, file: str) -> str:
    """Our command for the same run and the same folder."""
    config = _given(argv, "--load-config", "…/config.yml")
    folder = _given(argv, "--output-dir", "exports").rstrip("/")
    return f"`f3rm-ext export {command} --load-config {shlex.quote(config)} --output {shlex.quote(f'{folder}/{file}')}`"


def _gaussians(argv: Sequence[str]) -> str:
    return (
        "knows splatfacto's model only: "
        f"{_ours(argv, 'splats', _given(argv, '--output-filename', 'splat.ply'))} writes the same layout"
    )


def _points(argv: Sequence[str]) -> str:
    return (
        f"follows rays through a field, which splats do not have: {_ours(argv, 'splats', 'splat.ply')} writes the "
        f"Gaussians, and {_ours(argv, 'features', 'point_cloud.ply')} points on surfaces where the run has features"
    )


_SPLATS: dict[str, Callable[[Sequence[str]], str]] = {
    "gaussian-splat": _gaussians,
    "pointcloud": _points,
    "poisson": _points,
    "tsdf": _points,
    "marching-cubes": _points,
}
_FIELDS: dict[str, Callable[[Sequence[str]], str]] = {
    "gaussian-splat": lambda argv: "writes splats, and this run is a field: train sugar-ext for splats",
    "marching-cubes": lambda argv: "needs signed distances, and a field here has densities: use ns-export tsdf",
}
"""Why a command cannot do it, and what can."""


def check_export(command: str, argv: Sequence[str], *, splats: bool, normals: bool = False) -> None:
    """Names the command to use where one of ns-export's cannot export a run.

    Args:
        command: of ns-export.
        argv: the whole command line.
        splats: whether the run has splats; else it is a field.
        normals: whether a field renders normals.

    Raises:
        ConfigError: it cannot.
    """
    if not splats and command in ("pointcloud", "poisson") and not normals:
        if _given(argv, "--normal-method", "model_output") == "model_output":
            raise ConfigError(
                f"ns-export {command} asks the model for normals, which this run does not render: give it "
                "--normal-method open3d, or train with --pipeline.model.render-normals True."
            )
        return
    say = (_SPLATS if splats else _FIELDS).get(command)
    if say is not None:
        raise ConfigError(f"ns-export {command} {say(argv)}.")
