"""Edits of a scene: which of its points are selected, and which are hidden, step by step. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from f3rm_ext.errors import ConfigError


@dataclass(frozen=True)
class PointSelection:
    """Some points of a scene."""

    name: str
    """Name of the query or the group that chose them."""
    chosen: Bool[Tensor, " points"]
    shares: Float[Tensor, " points"]
    """Share of each that lies on what was asked for, 0 to 1."""
    core: Bool[Tensor, " points"]
    """True for those of them that stay when all else is hidden."""

    @cached_property
    def count(self) -> int:
        return int(self.chosen.sum())


@dataclass(frozen=True)
class Edit:
    """One step: points that it hides. A point is hidden by one step at most."""

    name: str
    """Title in the viewer, such as "remove banana"."""
    rows: Int64[Tensor, " hidden"]
    shares: Float[Tensor, " hidden"]
    """Their shares, see :class:`PointSelection`."""


@dataclass(frozen=True)
class Edits:
    """All steps, and what is selected now. Every change makes another value, so any thread may read one.

    >>> chosen = torch.tensor([True, False, False])
    >>> banana = PointSelection("banana", chosen, torch.tensor([0.9, 0.2, 0.0]), core=chosen)
    >>> edits = Edits(3).select(banana).remove()
    >>> edits.hidden.tolist(), edits.undo().hidden
    ([True, False, False], None)
    """

    total: int
    """Number of points of the scene."""
    steps: tuple[Edit, ...] = ()
    """The newest last."""
    selection: PointSelection | None = None
    """None where nothing is selected."""

    @cached_property
    def hidden(self) -> Bool[Tensor, " points"] | None:
        """The points that are hidden; None where all are shown."""
        if not self.steps:
            return None
        hidden = torch.zeros(self.total, dtype=torch.bool, device=self.steps[0].rows.device)
        for step in self.steps:
            hidden[step.rows] = True
        return hidden

    def select(self, selection: PointSelection) -> "Edits":
        """Selects points that are shown, in place of those that are selected. Raises ConfigError if there are none."""
        chosen = selection.chosen if self.hidden is None else selection.chosen & ~self.hidden
        if not bool(chosen.any()):
            raise ConfigError(f"Nothing that is shown is {selection.name}: lower the threshold, or ask for another.")
        return replace(self, selection=replace(selection, chosen=chosen))

    def remove(self) -> "Edits":
        """Hides what is selected. Raises ConfigError if nothing is selected, or nothing else is shown."""
        selection = self._selected()
        return self._hide(f"remove {selection.name}", selection.chosen)

    def keep(self) -> "Edits":
        """Hides all but the core of what is selected.

        Raises:
            ConfigError: nothing is selected, or nothing else is shown.
        """
        selection = self._selected()
        return self._hide(f"keep {selection.name}", ~selection.core)

    def undo(self) -> "Edits":
        """Takes the newest step back. Raises ConfigError if there is none."""
        if not self.steps:
            raise ConfigError("There is nothing to undo: everything is shown.")
        return Edits(self.total, self.steps[:-1], self.selection)

    def _selected(self) -> PointSelection:
        if self.selection is None:
            raise ConfigError("Nothing is selected: ask for something, then press Select.")
        return self.selection

    def _hide(self, name: str, chosen: Bool[Tensor, " points"]) -> "Edits":
        shown = chosen if self.hidden is None else chosen & ~self.hidden
        hidden = chosen if self.hidden is None else chosen | self.hidden
        if not bool(shown.any()) or bool(hidden.all()):
            raise ConfigError("What is selected is all that is shown, so nothing would be told apart: select less.")
        rows = shown.nonzero()[:, 0]
        return Edits(self.total, (*self.steps, Edit(name, rows, self._selected().shares[rows])))
