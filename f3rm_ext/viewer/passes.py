"""Passes in which a page's picture grows, so that there is something to see long before a slow one is whole."""

FIRST_DIVISOR = 8
PATIENCE_S = 0.5
"""A page gets the whole picture at once if that takes no longer."""


def next_divisor(divisor: int | None, seconds: float) -> int:
    """Returns by what the sides of the next pass are divided; 1 is the whole picture.

    Args:
        divisor: of the last pass; None before the first.
        seconds: that it took.

    >>> next_divisor(None, 0.0), next_divisor(8, 0.005), next_divisor(8, 0.03), next_divisor(8, 0.2)
    (8, 1, 2, 4)
    """
    if divisor is None:
        return FIRST_DIVISOR
    sizes = (2**power for power in range(FIRST_DIVISOR.bit_length()))
    # A picture takes time in proportion to its pixels, at most.
    quick = (size for size in sizes if seconds * (divisor / size) ** 2 <= PATIENCE_S)
    return min(next(quick, divisor), divisor // 2)
