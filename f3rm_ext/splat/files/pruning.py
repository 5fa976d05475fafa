"""Smaller files of splats: which Gaussians are kept for a size.

Without views, Gaussians are pruned by size and opacity. :mod:`f3rm_ext.export.budget` prunes by what views show.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.files.packing import importance, morton_order
from f3rm_ext.splat.gaussians import Gaussians

_SPARE = 0.985
"""A guess aims at this share of the size, as sizes are not quite in proportion."""
_CLOSE = 0.96
"""A file of this share of the size is large enough."""
_GUESSES = 8
"""Tries of a number of Gaussians for a size; two are usual."""

SizeOf = Callable[[Int[Tensor, " kept"], int], int]
"""Returns the size in bytes of a file with these Gaussians, of this SH degree."""
Choose = Callable[[int], Int[Tensor, " chosen"]]
"""Returns the rows of so many Gaussians that are kept; those that a smaller number keeps are among them."""


@dataclass(frozen=True)
class Choice:
    """A choice of Gaussians and of their SH degree."""

    rows: Int[Tensor, " kept"]
    """Indices of the Gaussians that are kept, neighbours side by side."""
    sh_degree: int
    total: int
    """Number of Gaussians there were."""

    def apply(self, gaussians: Gaussians) -> Gaussians:
        """Returns what is kept of all Gaussians."""
        return gaussians[self.rows].to_sh_degree(self.sh_degree)

    def __str__(self) -> str:
        kept = len(self.rows)
        count = f"All {kept} Gaussians" if kept == self.total else f"{kept} of {self.total} Gaussians"
        return f"{count} are kept, with SH degree {self.sh_degree}"


def export_size(splats: Gaussians, out: Path, write: Callable[[Gaussians, Path], object]) -> int:
    """Returns the size in bytes of a file with some splats, written beside nothing of the user's.

    Args:
        out: its name, which gives the format.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / out.name
        write(splats, path)
        return path.stat().st_size


def prune_to_size(gaussians: Gaussians, size_of: SizeOf, max_mb: float) -> Choice:
    """Chooses the Gaussians of a file that has no views: the largest and most opaque ones, of the same SH degree.

    Args:
        gaussians: finite.

    Raises:
        ConfigError: not even one Gaussian fits.
    """
    order = importance(gaussians).argsort(descending=True)
    search = SizeSearch(gaussians, lambda count: order[:count], size_of)
    degree, max_bytes = gaussians.sh_degree, max_mb * 1e6
    base = search.least_size(degree)
    if base > max_bytes:
        raise too_small(base, max_bytes)
    count, _ = search.largest_count(degree, max_bytes, {1: base, search.total: search.size(search.total, degree)})
    return Choice(search.first(count), degree, search.total)


def too_small(base: int, max_bytes: float) -> ConfigError:
    """Returns the error for a size that not even one Gaussian fits in."""
    return ConfigError(
        f"The file takes {base / 1e6:.3g} MB without any Gaussians, more than the {max_bytes / 1e6:g} MB of "
        "--max-mb: allow more, or ask fewer questions of a page."
    )


class SizeSearch:
    """Finds how many Gaussians fit, the most important ones first; asks ``choose`` only where not all fit."""

    def __init__(self, gaussians: Gaussians, choose: Choose, size_of: SizeOf) -> None:
        self._choose, self._size_of = choose, size_of
        self.total = len(gaussians)
        self._near = morton_order(gaussians).cpu()

    def first(self, count: int) -> Int[Tensor, " kept"]:
        """Returns the rows of the most important Gaussians, neighbours side by side."""
        if count >= self.total:
            return self._near
        chosen = torch.zeros(self.total, dtype=torch.bool)
        chosen[self._choose(count).cpu()] = True
        return self._near[chosen[self._near]]

    def size(self, count: int, sh_degree: int) -> int:
        """Returns the size in bytes of a file with so many Gaussians, of this SH degree."""
        return self._size_of(self.first(count), sh_degree)

    def least_size(self, sh_degree: int) -> int:
        """Returns the size in bytes of a file with a single Gaussian, whichever."""
        return self._size_of(self._near[:1], sh_degree)

    def largest_count(
        self, sh_degree: int, max_bytes: float, sizes: dict[int, int], per_gaussian: float = 0.0
    ) -> tuple[int, float]:
        """Returns the largest number of Gaussians that fits, and the bytes that each of them takes on average.

        It is found by the secant through the two sizes nearest to the wanted one: bytes per Gaussian fall with their
        number where a palette or a compressor finds more that is alike.

        Args:
            sizes: those that are known by number of Gaussians, bytes; one Gaussian fits. Gets those that are measured.
            per_gaussian: first guess where no other size is known, bytes.
        """
        target = _SPARE * max_bytes
        for _ in range(_GUESSES):
            low = max(count for count, size in sizes.items() if size <= max_bytes)
            high = min((count for count, size in sizes.items() if size > max_bytes), default=self.total + 1)
            if high - low <= 1 or (low > 1 and sizes[low] > _CLOSE * max_bytes):
                break
            near, *others = sorted(sizes, key=lambda count: abs(sizes[count] - target))
            if others:
                per_gaussian = (sizes[near] - sizes[others[0]]) / (near - others[0])
            count = near + int((target - sizes[near]) / max(per_gaussian, 1e-9))
            count = min(max(count, low + 1), high - 1)
            sizes[count] = self.size(count, sh_degree)
        low = max(count for count, size in sizes.items() if size <= max_bytes)
        return low, (sizes[low] - sizes[1]) / max(low - 1, 1)
