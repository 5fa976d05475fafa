"""The words of a command line of nerfstudio."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import tyro
from nerfstudio.engine.trainer import TrainerConfig

Config = TypeVar("Config", bound=TrainerConfig)


def parse_arguments(method: str, default: Config, arguments: Sequence[str]) -> Config:
    """Returns the options of a run, as ``ns-train METHOD ARGUMENTS`` would have them; ``default`` stays as it is.

    Raises:
        ConfigError: an option cannot work.
        SystemExit: from tyro, after help (0) or wrong options (2).
    """
    markers: Any = tyro.conf.SuppressFixed[tyro.conf.FlagConversionOff[type(default)]]  # as nerfstudio has it
    return tyro.cli(markers, default=default, prog=f"ns-train {method}", args=list(arguments))


def find_option(arguments: Sequence[str], option: str, default: str = "") -> str:
    """Returns the value of an option on a command line.

    >>> find_option(["ns-eval", "--load_config=old/config.yml"], "--load-config")
    'old/config.yml'
    """
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(arguments[index + 1 :]), default)
    return default


def remove_options(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns words without some options of one value.

    >>> remove_options(["--vis", "viewer", "--load_dir=old", "--load-dir", "old"], {"load-dir"})
    ['--vis', 'viewer']

    Args:
        names: names of the options, without dashes before them.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name[2:].replace("_", "-") not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
