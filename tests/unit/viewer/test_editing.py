"""The buttons that edit a scene, as nerfstudio presses them, on a toy of six points."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.viewer.utils import parse_object
from nerfstudio.viewer.viewer_elements import ViewerElement
from torch import Tensor

from f3rm_ext.engine import services
from f3rm_ext.viewer.editing import EditPanel
from f3rm_ext.viewer.panel import QueryPanel
from f3rm_ext.viewer.picking import Viewpoint

PATIENCE_S = 30.0
CHECKPOINT = Path("e/sugar-ext/t/nerfstudio_models/step-000000009.ckpt")


@pytest.fixture
def scene(make_toy, query_for, viewer) -> SimpleNamespace:
    """A model of six points that a search finds by half, and its panel in a viewer."""
    base: Any = make_toy

    class EditableToy(base):
        def __init__(self) -> None:
            super().__init__()
            self.go_on, self.searches = threading.Event(), 0
            self.go_on.set()
            self.groups = torch.tensor([0, 0, 1, 1, 1, -1])
            self.queries = QueryPanel(self)

        def opened_checkpoint(self) -> Path:
            return CHECKPOINT

        def points(self) -> Tensor:
            return torch.arange(6.0)[:, None].expand(6, 3)

        def choose_points(self, cameras: Any, query: Any, threshold: float, inside: Tensor, on_view: Any, lock: Any):
            self.searches += 1
            with lock:
                assert viewer.train_lock.locked()
            assert self.go_on.wait(PATIENCE_S)
            on_view()
            shares = torch.tensor([0.9, 0.8, 0.7, 0.1, 0.1, 0.1])
            chosen = (shares >= threshold) & inside
            return chosen, shares, chosen & (torch.arange(6) != 2)  # 2 is hidden far behind it

    model = EditableToy()
    cameras = Cameras(torch.eye(4)[None, :3], 10.0, 10.0, 4.0, 4.0, 8, 8)
    panel = model.queries
    panel.viewer_control._setup(viewer)
    viewer.pipeline = SimpleNamespace(datamanager=SimpleNamespace(train_dataset=SimpleNamespace(cameras=cameras)))
    panel.sync()
    return SimpleNamespace(model=model, panel=panel, edit=panel.edit, query=query_for("mug"), viewer=viewer)


def press(edit: EditPanel, name: str) -> None:
    """Presses a button, and waits for what it starts."""
    (button,) = [element for _, element in parse_object(edit, ViewerElement, "") if element.name == name]
    button.cb_hook(button)
    assert edit._finding.join(PATIENCE_S)


def rows(mask: Tensor | None) -> list[int]:
    return [] if mask is None else mask.nonzero()[:, 0].tolist()


def test_a_query_a_group_or_the_crop_is_selected(scene) -> None:
    edit, store = scene.edit, scene.panel.store
    press(edit, "Select")
    assert edit.selected is None and "nothing to select" in scene.panel.ask_02_status.content
    store.change(lambda state: state.set_live(scene.query))
    press(edit, "Select")
    assert rows(edit.selected) == [0, 1, 2] and "**Selected** mug: 3 of 6" in scene.panel.ask_02_status.content
    store.change(lambda state: replace(state, threshold=0.75))
    press(edit, "Select")
    assert rows(edit.selected) == [0, 1]
    store.change(lambda state: replace(state, group=("toy", 1)))
    press(edit, "Select")
    assert rows(edit.selected) == [2, 3, 4] and scene.model.searches == 2
    box = OrientedBox(torch.eye(3), torch.full((3,), 5.0), torch.full((3,), 3.0))
    scene.panel._viewpoint = Viewpoint(Cameras(torch.eye(4)[None, :3], 10.0, 10.0, 4.0, 4.0, 8, 8), box)
    press(edit, "Select")
    assert rows(edit.selected) == [4]
    store.change(lambda state: replace(state, group=None, live=None))
    press(edit, "Select")
    assert rows(edit.selected) == [4, 5]
    store.change(lambda state: replace(state.set_live(scene.query), group=("toy", 1)).set_live(scene.query))
    assert store.state.group is None, "the newest question counts"


def test_what_is_removed_comes_back(scene) -> None:
    edit, panel = scene.edit, scene.panel
    panel.store.change(lambda state: state.set_live(scene.query))
    assert panel.hidden() is None
    for name, hidden in [("Remove selected", [0, 1, 2]), ("Undo", []), ("Keep selected", [2, 3, 4, 5]), ("Undo", [])]:
        if name != "Undo":
            press(edit, "Select")
        press(edit, name)
        assert rows(panel.hidden()) == hidden
    assert panel.hidden() is None and "**Edits**" not in panel.ask_02_status.content
    press(edit, "Undo")
    assert "nothing to undo" in panel.ask_02_status.content


def test_a_newer_selection_ends_the_search(scene) -> None:
    edit, store = scene.edit, scene.panel.store
    store.change(lambda state: state.set_live(scene.query))
    scene.model.go_on.clear()
    edit.b1_select.cb_hook(edit.b1_select)
    store.change(lambda state: replace(state, group=("toy", 0)))
    edit.b1_select.cb_hook(edit.b1_select)
    scene.model.go_on.set()
    assert edit._finding.join(PATIENCE_S)
    assert rows(edit.selected) == [0, 1] and "group 0" in scene.panel.ask_02_status.content


def test_save_hands_over_the_steps(scene, monkeypatch) -> None:
    saved = []

    def save(*given: Any) -> Path:
        saved.append(given)
        return Path("e/sugar-ext/t-edited/config.yml")

    monkeypatch.setitem(services._services, "save_edits", save)
    press(scene.edit, "Save")
    assert not saved and "nothing to save" in scene.panel.ask_02_status.content
    scene.panel.store.change(lambda state: replace(state, group=("toy", 0)))
    press(scene.edit, "Select")
    press(scene.edit, "Remove selected")
    press(scene.edit, "Save")
    ((model, manager, checkpoint, edits),) = saved
    assert (model, manager, checkpoint) == (scene.model, scene.viewer.pipeline.datamanager, CHECKPOINT)
    assert [step.name for step in edits.steps] == ["remove group 0"]
    assert "t-edited" in scene.panel.ask_02_status.content.replace("<wbr/>", "")


def test_a_model_in_training_has_no_such_buttons(panel, scene, monkeypatch) -> None:
    assert panel.edit is None and panel.hidden() is None, "a model that has no points"
    monkeypatch.setattr(type(scene.model), "opened_checkpoint", lambda self: None)
    assert QueryPanel(scene.model).edit is None
