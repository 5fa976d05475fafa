"""What to plan: a command of ``ns-train``, parsed as ``ns-train`` does, with other values for single options."""

import copy
import dataclasses
import functools
import itertools
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f3rm_ext import compat
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.engine.arguments import parse_arguments, remove_options
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import Device, choose_device
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.nerf.model import F3rmModelConfig
from f3rm_ext.planning.estimator import PLANNERS
from f3rm_ext.planning.options import PlanOptions
from f3rm_ext.planning.request import ImageSizes, Options, PlanRequest, RefinementStart
from f3rm_ext.splat.model import SplatModelConfig

MAX_DEVICES = 4096
"""Most devices of a planned run."""


@dataclass
class Question(PlanOptions):
    """What to plan: a command of ``ns-train``, a card, and sizes."""

    method: str
    arguments: tuple[str, ...]
    """Arguments of ns-train, after the method."""
    _read: dict[tuple[str, object], ImageSizes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _starts: dict[str, RefinementStart] = field(default_factory=dict, init=False, repr=False, compare=False)

    def config(self, options: Options = ()) -> F3rmTrainerConfig:
        """Returns the options of the run, with other values for some."""
        config = parse(self.method, replace_options(self.method, self.arguments, options))
        if config.load_dir is not None or config.load_checkpoint is not None:
            raise ConfigError(
                "A plan is made for a run from its first step, not from a checkpoint: leave out --load-dir and "
                "--load-checkpoint."
            )
        config.machine.device_type = self.device(config).type  # type: ignore[assignment]
        manager = config.pipeline.datamanager
        if isinstance(manager, ImageDataManagerConfig):
            manager.fit(schedule_length(config))
        return config

    def device(self, config: F3rmTrainerConfig) -> Device:
        """Returns the device to plan for.

        Raises:
            ConfigError: a card is given for a run on the CPU, or it is unknown.
        """
        typed = {word.partition("=")[0].replace("_", "-") for word in self.arguments}
        if self.device_is_given and config.machine.device_type == "cpu" and "--machine.device-type" in typed:
            raise ConfigError(
                "--machine.device-type is cpu, but --gpu and --vram-gib plan a run on a card: leave out one of the two."
            )
        return choose_device(config.machine.device_type, self.gpu, self.vram_gib)

    def sizes(self, config: F3rmTrainerConfig) -> ImageSizes:
        """Returns the sizes of the images: as given, those of the capture, or assumed ones.

        Raises:
            UserError: the capture cannot be used.
        """
        if self.images is not None and self.width_px is not None and self.height_px is not None:
            return ImageSizes.from_numbers(config, self.images, self.width_px, self.height_px, self.points)
        manager: Any = config.pipeline.datamanager
        if has_capture(config):
            place, scale = f"{manager.data} {manager.dataparser}", manager.camera_res_scale_factor
            if (place, scale) not in self._read:
                sizes = ImageSizes.from_capture(config)
                self._read |= {(place, scale): sizes, (place, sizes.scale): sizes}  # which "auto" becomes
            return self._read[place, scale]
        return ImageSizes.from_assumption(config)

    def request(self, options: Options = ()) -> PlanRequest:
        """Returns the run to estimate, with other values for some options."""
        config = self.config(options)
        self._check_splats(config)
        sizes = self.sizes(config)
        config.pipeline.datamanager.camera_res_scale_factor = sizes.scale  # type: ignore[attr-defined]
        model, gaussians = config.pipeline.model, self.gaussians
        if gaussians is not None and isinstance(model, SplatModelConfig) and model.densify.cap is not None:
            # mcmc's own limit ends growth, but removes no points.
            gaussians = min(gaussians, model.densify.max_gaussians or max(model.densify.cap, sizes.points))
        return PlanRequest(
            config=config,
            capture=sizes.summary(),
            device=self.device(config),
            processes=config.machine.num_devices * config.machine.num_machines,
            gaussians=gaussians,
            start=None if gaussians is not None else self._start(config, sizes),
        )

    def _check_splats(self, config: F3rmTrainerConfig) -> None:
        given = [name for name, value in (("--gaussians", self.gaussians), ("--points", self.points)) if value]
        if given and isinstance(config.pipeline.model, F3rmModelConfig):
            raise ConfigError(
                f"{given[0]} is of splats, and {self.method} trains a field: leave it out, or plan sugar-ext."
            )

    def _start(self, config: F3rmTrainerConfig, sizes: ImageSizes) -> RefinementStart | None:
        """Returns what a refinement starts from, if its splats and the capture are given."""
        model: Any = config.pipeline.model
        if not isinstance(model, BoundModelConfig) or None in (model.mesh, model.start_from, sizes.parsed):
            return None
        files = (model.mesh, model.mesh_frame, model.start_from, model.start_iteration, model.start_frame)
        key = repr((*files, model.free_beyond, model.gaussians_per_triangle))
        if key not in self._starts:
            assert sizes.parsed is not None
            self._starts[key] = RefinementStart.from_options(model, *sizes.parsed)
        return self._starts[key]

    def command(self, options: Options = ()) -> list[str]:
        """Returns the words of the command, with other values for some options."""
        return ["ns-train", self.method, *replace_options(self.method, self.arguments, options)]


@functools.cache
def methods() -> dict[str, F3rmTrainerConfig]:
    """Returns the methods that can be planned, with their default options: those whose models have a planner."""
    installed = compat.registered_methods()
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
            mine += itertools.islice(words, 1)
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
        marks = typing.get_args(hint)[1:]
        names |= {alias.lstrip("-") for mark in marks for alias in getattr(mark, "aliases", None) or ()}
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
