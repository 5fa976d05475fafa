"""Switches of all commands, in two forms: ``--json`` and ``--no-json``, or ``--json True`` and ``--json False``."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Union

import tyro

_VALUES = {"True": True, "true": True, "False": False, "false": False}


class _Switch(NamedTuple):
    off: tuple[str, ...]
    """The words by which tyro turns it off."""
    on: tuple[str, ...]
    """The words by which tyro turns it on."""


def parse_command(kind: Any, prog: str, arguments: Sequence[str]) -> Any:
    """Returns a command with the options of a command line without the program's name.

    Args:
        kind: dataclass of the command, or a union of those of its subcommands.

    Raises:
        SystemExit: from tyro, after help (0) or wrong options (2).
    """
    return tyro.cli(kind, prog=prog, args=plain_switches(kind, arguments))


def plain_switches(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Returns a command line whose switches have the form that tyro reads. Other words stay, and all after ``--``.

    >>> from dataclasses import make_dataclass
    >>> plain_switches(make_dataclass("Command", [("json", bool)]), ["--json", "False", "a.ply"])
    ['--no-json', 'a.ply']
    """
    switches = dict(_switches(_chosen(kind, arguments)))
    plain: list[str] = []
    rest = list(arguments)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        switch = switches.get(name.replace("_", "-"))
        if switch is None:
            plain.append(word)
        elif equals or (rest and rest[0] in _VALUES):
            value = value if equals else rest.pop(0)
            plain += switch[_VALUES[value]] if value in _VALUES else [word]
        else:
            plain += [word] if rest and rest[0] == "None" else switch.on
    return [*plain, *rest]


def _chosen(kind: Any, arguments: Sequence[str]) -> Any:
    """The dataclass of the subcommand that is typed, or of the command itself; None for an unknown subcommand."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind
    for member in typing.get_args(kind):
        command, *settings = typing.get_args(member) or (member,)
        names = [getattr(setting, "name", None) for setting in settings]
        names = names or [re.sub("(?<!^)(?=[A-Z])", "-", command.__name__).lower()]  # as tyro names a class
        if next(iter(arguments), "") in names:
            return command
    return None


def _switches(kind: Any, prefix: str = "") -> Iterator[tuple[str, _Switch]]:
    """Yields the options of a dataclass that are switches, in positive and in negative form."""
    if not dataclasses.is_dataclass(kind):
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name
        if typing.get_origin(hint) is Annotated:
            hint, *settings = typing.get_args(hint)
            renamed = [given for item in settings if isinstance(given := getattr(item, "name", None), str)]
            name = renamed[0] if renamed else name
        if dataclasses.is_dataclass(hint):
            yield from _switches(hint, f"{prefix}{name}." if name else prefix)
            continue
        positive, negative = (f"--{prefix}{no}{name}".replace("_", "-") for no in ("", "no-"))
        if hint is bool:
            switch = _Switch((negative,), (positive,))
        elif set(typing.get_args(hint)) == {bool, type(None)}:
            switch = _Switch((positive, "False"), (positive, "True"))
        else:
            continue
        yield positive, switch
        yield negative, _Switch(off=switch.on, on=switch.off)
