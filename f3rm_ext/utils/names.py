"""Names that nothing else has."""

import itertools
from collections.abc import Callable


def unique_name(base: str, is_taken: Callable[[str], bool], separator: str = "_") -> str:
    """Returns the first of ``base``, ``base_2``, ``base_3`` ... that is not taken.

    >>> unique_name("mug", ["mug", "mug_2"].__contains__)
    'mug_3'
    """
    names = itertools.chain([base], (f"{base}{separator}{number}" for number in itertools.count(2)))
    return next(name for name in names if not is_taken(name))
