"""Checks of the options that datamanagers share."""

import math
from typing import Any, Literal

from f3rm_ext.errors import ConfigError


def flag(option: str) -> str:
    """The command line option of a datamanager's config field."""
    return "pipeline.datamanager." + option.replace("_", "-")


def parse_count(value: int | float, option: str, *, unit: str) -> int | None:
    """Parses a count: a positive whole number, or None for -1 and inf (no limit).

    Raises:
        ConfigError: the value is neither.
    """
    if value == -1 or value == math.inf:
        return None
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise ConfigError(
            f"--{option} is {value}, which is not a number of {unit}: give a whole number from 1 up, or -1 or inf "
            "for no limit."
        )
    return int(value)


def check_positive(config: object, *options: str) -> None:
    """Checks that options are whole numbers of at least 1. Raises ConfigError if one of them is not."""
    for option in options:
        value = getattr(config, option)
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ConfigError(f"--{flag(option)} is {value}, but it has to be a whole number from 1 up.")


def check_window(config: object, split: Literal["train", "eval"]) -> None:
    """Checks how many images of a split are kept in memory and for how many steps.

    Raises:
        ConfigError: one of the numbers is out of range.
    """
    for option, unit in (
        (f"{split}_num_images_to_sample_from", "images"),
        (f"{split}_num_times_to_repeat_images", "steps"),
    ):
        parse_count(getattr(config, option), flag(option), unit=unit)


def check_scale_factor(config: Any) -> None:
    """Checks the scale factor of the images. Raises ConfigError if it is outside (0, 1]."""
    if not 0 < config.camera_res_scale_factor <= 1:
        raise ConfigError(
            f"--{flag('camera_res_scale_factor')} is {config.camera_res_scale_factor}, outside (0, 1]: "
            "give 1 for full size, 0.5 for half."
        )
