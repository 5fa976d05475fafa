"""Edits of a scene: what is hidden after each step, and after each step is taken back."""

from collections.abc import Callable

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.viewer.edits import Edits, PointSelection


def points(name: str, *rows: int) -> PointSelection:
    """Some of six points, with shares that tell them apart."""
    chosen = torch.zeros(6, dtype=torch.bool)
    chosen[list(rows)] = True
    return PointSelection(name, chosen, torch.arange(6) / 10, core=chosen)


def hidden(edits: Edits) -> list[int]:
    return [] if edits.hidden is None else edits.hidden.nonzero()[:, 0].tolist()


def test_every_step_can_be_taken_back() -> None:
    states = [Edits(6)]
    states.append(states[-1].select(points("cup", 0, 1)).remove())
    states.append(states[-1].select(points("table", 1, 2, 3)).keep())  # 1 is hidden, so it is not selected
    states.append(states[-1].select(points("crumb", 3)).remove())
    assert [hidden(state) for state in states] == [[], [0, 1], [0, 1, 4, 5], [0, 1, 3, 4, 5]]
    names = [(step.name, step.rows.tolist()) for step in states[-1].steps]
    assert names == [("remove cup", [0, 1]), ("keep table", [4, 5]), ("remove crumb", [3])]
    assert states[-1].steps[1].shares.tolist() == pytest.approx([0.4, 0.5])
    back = states[-1]
    for state in reversed(states[:-1]):
        back = back.undo()
        assert hidden(back) == hidden(state) and back.steps == state.steps
    assert back.hidden is None, "nothing to pay for in a picture"


def test_a_selection_is_of_what_is_shown_and_outlives_undo() -> None:
    edits = Edits(6).select(points("cup", 0, 1)).remove().select(points("cup and table", 0, 2))
    assert edits.selection is not None and edits.selection.count == 1
    assert edits.undo().selection == edits.selection
    assert edits.remove().selection is None and hidden(edits.remove()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda edits: edits.undo(), "undo"),
        (lambda edits: edits.remove(), "Nothing is selected"),
        (lambda edits: edits.keep(), "Nothing is selected"),
        (lambda edits: edits.select(points("all", *range(6))).remove(), "all that is shown"),
        (lambda edits: edits.select(points("all", *range(6))).keep(), "all that is shown"),
        (lambda edits: edits.select(points("unicorn")), "unicorn"),
        (lambda edits: edits.select(points("cup", 0)).remove().select(points("cup", 0)), "cup"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(change: Callable[[Edits], Edits], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        change(Edits(6))
