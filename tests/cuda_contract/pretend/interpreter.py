"""Triton's interpreter without its largest cost, for programs that imported it while ``TRITON_INTERPRET`` was 1.

The interpreter replaces the functions of Triton's language when a kernel is launched, and again at each call of a
device function, which takes longer than the function. Imported, or given to pytest with ``-p``, this module has each
launch replace them once for each module of functions.
"""

from typing import Any

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
