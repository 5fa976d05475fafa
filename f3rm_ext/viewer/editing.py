"""The buttons of the viewer that take Gaussians out of a finished run, step by step, and save what is left as a run."""

import time
import weakref
from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.viewer.viewer_elements import ViewerButton, ViewerControl
from torch import Tensor, nn

from f3rm_ext import compat
from f3rm_ext.engine import services
from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Editable, HasGroups
from f3rm_ext.viewer import status
from f3rm_ext.viewer.edits import Edits, PointSelection
from f3rm_ext.viewer.state import QueryStateStore
from f3rm_ext.viewer.worker import LatestJob

SELECTION = "selection"
"""The output that lights what is selected."""
_PAUSE_S = 0.005
"""Between two views, so that pictures of the pages get their turn."""


@runtime_checkable
class Host(Protocol):
    """The panel that the buttons belong to."""

    store: QueryStateStore

    @property
    def viewer_control(self) -> ViewerControl:
        """The control of the viewer that shows the panel."""
        ...

    def act(self, action: Callable[[], None]) -> Callable[[object], None]:
        """Returns the callback of an element."""
        ...

    def say(self, activity: str = "", problem: str = "") -> None:
        """Shows a status."""
        ...

    def show_output(self, name: str) -> None:
        """Shows an output, unless one was chosen that is none of the panel's."""
        ...

    def crop_box(self) -> OrientedBox | None:
        """Returns the box that the view is cropped to."""
        ...


class EditPanel(nn.Module):
    """Buttons to select Gaussians, to hide them or all others, to undo that, and to save what is shown.

    What is hidden stays in the model; see :class:`~f3rm_ext.viewer.edits.Edits`.
    """

    def __init__(self, model: Editable, host: Host) -> None:
        super().__init__()
        self._model, self._host = weakref.ref(model), weakref.ref(host)
        self._finding = LatestJob("f3rm-ext selection")
        self._newest = 0
        self._edits: Edits | None = None
        self.b1_select = ViewerButton("Select", cb_hook=host.act(self._select))
        self.b2_remove = ViewerButton("Remove selected", cb_hook=host.act(lambda: self._edit(Edits.remove)))
        self.b3_keep = ViewerButton("Keep selected", cb_hook=host.act(lambda: self._edit(Edits.keep)))
        self.b4_undo = ViewerButton("Undo", cb_hook=host.act(lambda: self._edit(Edits.undo)))
        self.b5_save = ViewerButton("Save", cb_hook=host.act(self._save))

    @property
    def selected(self) -> Bool[Tensor, " points"] | None:
        """The Gaussians that are selected; None where none are."""
        edits = self._edits
        return None if edits is None or edits.selection is None else edits.selection.chosen

    @property
    def hidden(self) -> Bool[Tensor, " points"] | None:
        """The Gaussians that are hidden; None where all are shown."""
        edits = self._edits
        return None if edits is None else edits.hidden

    def describe(self) -> str:
        """Says what is selected and what was edited, in markdown."""
        edits = self._edits
        if edits is None:
            return ""
        lines = []
        if (selection := edits.selection) is not None:
            lines.append(
                f"**Selected** {status.plain(selection.name)}: {selection.count:,} of {edits.total:,} Gaussians"
            )
        if edits.steps:
            steps = ", ".join(f"{status.plain(step.name)} (−{len(step.rows):,})" for step in edits.steps)
            lines.append(f"**Edits** {steps}")
        return "  \n".join(lines)

    # --- the buttons -------------------------------------------------------------------------------------------------

    def _select(self) -> None:
        """Selects the group that is lit, or what the query finds, within the crop; without either, the crop itself."""
        model, host = self._parts()
        state, box, points = host.store.state, host.crop_box(), model.points()
        self._newest += 1  # a search that is under way ends
        inside = torch.ones(len(points), dtype=torch.bool, device=points.device) if box is None else box.within(points)
        if state.group is not None:
            grouped = cast(HasGroups, model).grouped_points(state.group[0])
            assert grouped is not None, "a group is lit, so there are some"
            self._take_points(f"group {state.group[1]}", (grouped.groups == state.group[1]) & inside)
        elif state.live is not None:
            number, threshold = self._newest, state.threshold
            live = state.live
            self._finding.submit(lambda: self._find(number, live, threshold, inside))
        elif box is not None:
            self._take_points("crop", inside)
        else:
            raise ConfigError("There is nothing to select: type a text, click, or crop the view, then press Select.")

    def _take_points(self, name: str, chosen: Tensor) -> None:
        self._take(PointSelection(name, chosen, chosen.float(), core=chosen))

    def _take(self, selection: PointSelection) -> None:
        _, host = self._parts()
        self._edits = self._current().select(selection)
        host.say()
        host.show_output(SELECTION)
        compat.viewer_redraw(host.viewer_control)

    def _find(self, number: int, query: Query, threshold: float, inside: Tensor) -> None:
        """Runs in the background."""
        model, host = self._parts()
        cameras = compat.viewer_datamanager(host.viewer_control).train_dataset.cameras
        done, told_s = 0, 0.0

        def advance() -> None:
            nonlocal done, told_s
            done += 1
            if number != self._newest:
                raise _Outdated
            if time.monotonic() - told_s > 0.5:
                host.say(activity=f"Selecting {query.name}: {done} of {3 * len(cameras)} views …")
                told_s = time.monotonic()
            time.sleep(_PAUSE_S)

        try:
            lock = compat.viewer_lock(host.viewer_control)
            found = model.choose_points(cameras, query, threshold, inside, advance, lock)
            if number == self._newest:
                self._take(PointSelection(query.name, *found))
        except _Outdated:
            return
        except Exception as error:
            host.say(problem=status.sentence(error))

    def _edit(self, change: Callable[[Edits], Edits]) -> None:
        _, host = self._parts()
        self._edits = change(self._current())
        host.say()
        host.show_output("rgb")

    def _save(self) -> None:
        model, host = self._parts()
        edits, checkpoint = self._current(), model.opened_checkpoint()
        if not edits.steps:
            raise ConfigError("There is nothing to save: nothing was removed.")
        assert checkpoint is not None
        host.say(activity="Saving …")
        config = services.get("save_edits")(model, compat.viewer_datamanager(host.viewer_control), checkpoint, edits)
        host.say(activity=f"Saved as the run {config}.")

    def _current(self) -> Edits:
        model, _ = self._parts()
        return self._edits or Edits(len(model.points()))

    def _parts(self) -> tuple[Editable, Host]:
        model, host = self._model(), self._host()
        assert model is not None and host is not None, "the buttons outlived their panel"
        return model, host


class _Outdated(Exception):
    """Something else is to be selected meanwhile."""
