"""Parses ``NAME:key=value,key=value``, the text by which users name an extractor and its options."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from f3rm_ext.errors import ExtractorError

Config = TypeVar("Config")

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def extractor_name(text: str) -> str:
    """Returns the name of the extractor.

    >>> extractor_name("clip:model=ViT-B-16")
    'clip'
    """
    return text.partition(":")[0].strip()


def parse_options(text: str) -> dict[str, str]:
    """Returns the options of ``NAME:key=value,key=value`` as they are written.

    >>> parse_options("dino:model=vitb8, short-side-px=448")
    {'model': 'vitb8', 'short_side_px': '448'}

    Raises:
        ExtractorError: An option is not of the form key=value, or is given twice.
    """
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.partition(":")[2].split(","))):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ExtractorError(f"'{part}' in '{text}' is not an option: write NAME:key=value,key=value.")
        if key in options:
            raise ExtractorError(f"Option {key} is given twice in '{text}': keep one.")
        options[key] = value.strip()
    return options


def build_config(config_class: type[Config], text: str) -> Config:
    """Builds the extractor's config dataclass from ``NAME:key=value,key=value``.

    Values are converted to the type of the field: bool, int, float, str, Path, Literal, an optional of these
    (``none`` gives None), or a tuple of them with ``+`` between its elements (``layers=6+7+8+9``).

    >>> from f3rm_ext.features.extractors.daisy import DaisyConfig
    >>> build_config(DaisyConfig, "dense-daisy:step_px=4")
    DaisyConfig(short_side_px=320, step_px=4, radius_px=16)

    Raises:
        ExtractorError: A key is unknown or a value does not fit its field.
    """
    hints = typing.get_type_hints(config_class)
    fields = [field.name for field in dataclasses.fields(config_class) if field.init]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, written in parse_options(text).items():
        if key not in fields:
            raise ExtractorError(
                f"Extractor {extractor_name(text)} has no option '{key}'{close_match(key, fields)}; "
                f"its options are {', '.join(fields) or 'none'}."
            )
        try:
            values[key] = _convert(written, hints[key])
        except ValueError as error:
            raise ExtractorError(
                f"Option {key} of extractor {extractor_name(text)} is '{written}', which is not {error}."
            ) from error
    return config_class(**values)


def close_match(word: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean X?)`` with the closest known word, or an empty string.

    >>> close_match("dinov3", ["clip", "dinov2"])
    ' (did you mean dinov2?)'
    """
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _convert(written: str, kind: Any) -> Any:
    """Converts `written` to the type `kind`; raises ValueError with a description of what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and written.lower() in {"none", ""}:
            return None
        return _convert(written, next(option for option in arguments if option is not type(None)))
    if origin is Literal:
        if written not in arguments:
            raise ValueError(f"one of {', '.join(map(str, arguments))}")
        return written
    if origin is tuple:
        return tuple(_convert(element.strip(), arguments[0]) for element in written.split("+"))
    if kind is bool:
        if written.lower() not in _TRUE | _FALSE:
            raise ValueError("true or false")
        return written.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
    if kind is Path:
        return Path(written).expanduser()
    return written
