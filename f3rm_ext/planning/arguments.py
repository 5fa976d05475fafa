"""The arguments of ``ns-train``: the methods, parsing as ``ns-train`` does, and replacing single options."""

import copy
import dataclasses
import functools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nerfstudio.plugins.registry import discover_methods

from f3rm_ext.engine.arguments import parse_arguments, remove_options
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.planning.estimator import PLANNERS

MAX_DEVICES = 4096
"""Most devices of a planned run."""


@functools.cache
def methods() -> dict[str, F3rmTrainerConfig]:
    """Returns the methods that can be planned, with their default options: those whose models have a planner."""
    installed, _ = discover_methods()
    ours = {name: config for name, config in installed.items() if isinstance(config, F3rmTrainerConfig)}
    return {name: config for name, config in ours.items() if type(config.pipeline.model) in PLANNERS}


def parse(method: str, arguments: Sequence[str]) -> F3rmTrainerConfig:
    """Returns the options of a run, as ``ns-train METHOD ARGUMENTS`` would have them.

    Raises:
        ConfigError: the method is unknown, or an option cannot work.
        SystemExit: from tyro, after help (0) or wrong options (2).
    """
    known = methods()
    if method not in known:
        raise ConfigError(f"There is no method {method!r} to plan: choose from {', '.join(sorted(known))}.")
    config = parse_arguments(method, copy.deepcopy(known[method]), arguments)
    if config.load_config is not None:
        raise ConfigError("A plan is made from options, not from --load-config: give the options themselves.")
    config.check_steps()
    devices = config.machine.num_devices * config.machine.num_machines
    if not 1 <= devices <= MAX_DEVICES:
        raise ConfigError(
            f"--machine.num-devices times --machine.num-machines is {devices}: a plan is made for 1 to {MAX_DEVICES}."
        )
    if config.data is not None:
        config.pipeline.datamanager.data = config.data
    if isinstance(config.pipeline.model, BoundModelConfig):
        config.pipeline.model.fit_length(config)
    return config


def has_capture(config: F3rmTrainerConfig) -> bool:
    """Returns whether the options name a capture."""
    manager = config.pipeline.datamanager
    parser: Any = getattr(manager, "dataparser", None)
    has_data = parser is not None and Path(parser.data) != Path(type(parser)().data)
    return manager.data is not None or has_data


def split_arguments(arguments: Sequence[str], own: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Splits a command line into the planner's options and the rest, which is for ``ns-train``; both keep their order.

    >>> split_arguments(["f3rm-ext", "--gpu", "4090", "--vis", "viewer"], {"gpu": True})
    (['--gpu', '4090'], ['f3rm-ext', '--vis', 'viewer'])

    Args:
        own: names of the planner's options, and whether a value follows each.
    """
    mine: list[str] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--") or name not in own:
            others.append(word)
            continue
        mine.append(word)
        if own[name] and not equals:
            mine += [value for value in [next(words, None)] if value is not None]
    return mine, others


def replace_options(method: str, arguments: Sequence[str], options: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns arguments with other values for some options. Replaced options come first, before any dataparser.

    Args:
        options: names without dashes, and values; several words of a value become several arguments.
    """
    added: list[str] = []
    kept = list(arguments)
    for name, value in options:
        names = option_names(methods()[method], name)
        kept = remove_options(kept, names)
        added = [*remove_options(added, names), f"--{min(names, key=len)}", *value.split()]
    return (*added, *kept)


def option_names(config: object, option: str) -> set[str]:
    """Returns the names of an option on the command line, without dashes.

    >>> sorted(option_names(methods()["sugar-ext"], "pipeline.model.sh-degree"))
    ['pipeline.model.sh-degree', 'sh-degree']
    """
    names = {option}
    owner: Any = config
    for part in option.replace("-", "_").split("."):
        if owner is None or not dataclasses.is_dataclass(owner):
            break
        owner, hint = _member(owner, part)
        names |= {alias.lstrip("-") for alias in _aliases(hint)}
    return names


def _member(owner: Any, name: str) -> tuple[Any, Any]:
    """A field's value and type; also of a field in a part whose name is left out on the command line."""
    hints = typing.get_type_hints(type(owner), include_extras=True)
    if hasattr(owner, name):
        return getattr(owner, name), hints.get(name)
    for part, hint in hints.items():
        if any(getattr(mark, "name", None) == "" for mark in typing.get_args(hint)[1:]):
            inner = getattr(owner, part)
            return getattr(inner, name, None), typing.get_type_hints(type(inner), include_extras=True).get(name)
    return None, None


def _aliases(hint: Any) -> Sequence[str]:
    return [alias for mark in typing.get_args(hint)[1:] for alias in getattr(mark, "aliases", None) or ()]
