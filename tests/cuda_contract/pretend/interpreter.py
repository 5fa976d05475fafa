"""Triton's interpreter without its largest costs, for programs that imported it while ``TRITON_INTERPRET`` was 1.

The interpreter replaces the functions of Triton's language when a kernel is launched, and again at each call of a
device function, which takes longer than the function. Imported, or given to pytest with ``-p``, this module has each
launch replace them once for each module of functions. Types of blocks and of numbers are looked up and not made anew,
and sums of integers are not computed twice where nothing looks at the second result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter


class _Once:
    """Replaces ``_patch_lang``, which looks at nothing but the globals of a function."""

    def __init__(self) -> None:
        self.real = interpreter._patch_lang
        self.seen: set[int] = set()

    def __call__(self, function: Any) -> Any:
        if id(function.__globals__) in self.seen:
            return None
        first = not self.seen
        scope = self.real(function)
        # An older Triton returns nothing, and puts its language back in another way: it is left as it is.
        if scope is not None:
            self.seen.add(id(function.__globals__))
            if first:
                scope.restore = self._forget(scope.restore)
        return scope

    def _forget(self, restore: Any) -> Any:
        def restore_and_forget() -> None:
            self.seen.clear()
            restore()

        return restore_and_forget


interpreter._patch_lang = _Once()


def _skip_unused_results() -> None:
    """Has integers not computed once more in 64 bits for an assertion that is only made when debugging."""
    builder = interpreter.interpreter_builder
    options = builder.options
    if not options.debug and getattr(options, "sanitize_overflow", False):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_types() -> None:
    """Makes each type of a block or of numpy once: their names tell them apart, and nobody changes them."""
    block_type = core.block_type
    for owner, name in ((interpreter, "_get_np_dtype"), (block_type, "with_element_ty"), (block_type, "to_ir")):
        setattr(owner, name, _remembering(getattr(owner, name)))


def _remembering(make: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers what a function has made of types, by their names, and of builders."""
    made: dict[Any, Any] = {}

    def find(*given: Any) -> Any:
        key = tuple([getattr(one, "name", one) for one in given])
        if key not in made:
            made[key] = make(*given)
        return made[key]

    return find


_skip_unused_results()
_remember_types()
