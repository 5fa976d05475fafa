"""Work that rooms above do for those below, by name: :mod:`f3rm_ext.method_configs.splat` says who does it."""

from collections.abc import Callable
from typing import Any

_services: dict[str, Callable[..., Any]] = {}


def offer(name: str, service: Callable[..., Any]) -> None:
    """Offers a function to the rooms below, in place of any of this name."""
    _services[name] = service


def get(name: str) -> Callable[..., Any]:
    """Returns the function of this name; there is one as soon as nerfstudio knows the methods."""
    return _services[name]
