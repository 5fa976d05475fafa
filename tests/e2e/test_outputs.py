"""Outputs in the browser: each can be chosen and looks different, and one that fails does not freeze the page."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

CHANGED = 0.02
"""Pictures that differ by more on average show something else."""
WAIT_S = 180


def _broken(*_: object, **__: object) -> torch.Tensor:
    raise ZeroDivisionError("broken on purpose")


@pytest.fixture
def view(
    request: pytest.FixtureRequest,
    open_page: Callable[..., Any],
    look_through: Callable[[Any, int], None],
    wait_until: Callable[..., None],
) -> Iterator[Any]:
    """A page that shows the colours of a field, unless a test names another viewer; afterwards, whatever the test did,
    nerfstudio's render threads must live."""
    viewer = request.getfixturevalue(getattr(request, "param", "viewer"))
    page = open_page(f"http://127.0.0.1:{viewer.config.websocket_port}", keep=True)
    wait_until(lambda: page.output() != "not set" and page.resolution() != (0, 0), WAIT_S, "a first picture")
    if page.output() != "rgb":  # the panel is shared, and an earlier test has chosen something
        page.choose_output("rgb")
    # What the panel says may be of an earlier page.
    wait_until(lambda: bool(viewer.viser_server.get_clients()), WAIT_S, "the page being known to the viewer")
    look_through(viewer, 0)
    wait_until(lambda: page.picture().std() > CHANGED, WAIT_S, "a picture of the scene")
    yield page
    machines = list(viewer.render_statemachines.values())
    assert machines, "no page is connected"
    assert all(machine.is_alive() for machine in machines), "a render thread died: its page is frozen"


@pytest.fixture
def changes(wait_until: Callable[..., None], difference: Callable[..., float]) -> Callable[..., None]:
    """Does something and waits until the picture differs."""

    def check(page: Any, action: Callable[[], Any], what: str) -> None:
        before = page.picture()
        action()
        wait_until(lambda: difference(page.picture(), before) > CHANGED, WAIT_S, f"another picture after {what}")

    return check


@pytest.mark.parametrize(
    ("view", "names"),
    [
        ("viewer", ("depth", "feature_pca", "accumulation", "rgb")),
        ("labelled_splat_viewer", ("depth", "accumulation", "normal", "normal_from_depth", "feature_pca", "rgb")),
    ],
    indirect=["view"],
)
def test_every_output_can_be_chosen_and_turned_and_looks_different(
    view: Any, names: tuple[str, ...], changes: Callable[..., None]
) -> None:
    assert set(names) <= set(view.outputs())
    assert view.output() == "rgb"
    for name in names:
        changes(view, lambda name=name: view.choose_output(name), f"choosing {name}")
        assert view.output() == name
    changes(view, lambda: view.drag(150), "turning")


def test_fast_moves_interrupt_renders_and_nothing_else(viewer: Any, view: Any, changes: Callable[..., None]) -> None:
    # High resolution, so that moves come while a picture is being computed and nerfstudio throws its interrupt.
    viewer.control_panel._max_res.value = 264
    try:
        for turn in range(8):
            view.drag(40 * (-1) ** turn, 10)
        viewer.control_panel._max_res.value = 64
        changes(view, lambda: view.drag(200), "many moves")
    finally:
        viewer.control_panel._max_res.value = 64


@pytest.fixture
def head(viewer: Any) -> Any:
    field = viewer.pipeline.model.feature_field
    return field.head(field.names[0])


def test_a_failing_optional_output_disappears_and_comes_back(
    view: Any,
    head: Any,
    changes: Callable[..., None],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes(view, lambda: view.choose_output("feature_pca"), "choosing feature_pca")
    with monkeypatch.context() as patch:
        patch.setattr(head, "display", _broken)
        changes(view, lambda: view.drag(120), "the output failed")
        wait_until(lambda: view.output() == "rgb", WAIT_S, "falling back to rgb")
        assert "feature_pca" not in view.outputs()
        changes(view, lambda: view.drag(-200), "moving on without the output")
    changes(view, lambda: view.drag(100), "the output was mended")
    wait_until(lambda: "feature_pca" in view.outputs(), WAIT_S, "feature_pca being offered again")
    changes(view, lambda: view.choose_output("feature_pca"), "choosing feature_pca again")


@pytest.mark.parametrize(
    "chosen",
    ["rgb", pytest.param("depth", marks=pytest.mark.release), pytest.param("feature_pca", marks=pytest.mark.release)],
)
def test_a_failing_picture_is_black_and_recovers(
    viewer: Any,
    view: Any,
    chosen: str,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chosen != "rgb":
        view.choose_output(chosen)
        wait_until(lambda: view.output() == chosen, WAIT_S, f"{chosen} being shown")
    with monkeypatch.context() as patch:
        patch.setattr(viewer.pipeline.model.field, "color", _broken)
        view.drag(100)
        wait_until(lambda: view.picture().std(axis=(0, 1)).max() < 0.01, WAIT_S, "an empty picture")
        if chosen == "rgb":
            assert view.picture().max() < 0.05, "black"
        assert {"rgb", "depth"} <= set(view.outputs())
    view.drag(-100)
    wait_until(lambda: view.picture().std() > CHANGED, WAIT_S, "the scene again")


def test_a_second_page_and_its_leaving_disturb_nobody(
    viewer: Any,
    view: Any,
    open_page: Callable[[str], Any],
    changes: Callable[..., None],
    wait_until: Callable[..., None],
) -> None:
    other = open_page(f"http://127.0.0.1:{viewer.config.websocket_port}")
    wait_until(lambda: len(viewer.render_statemachines) == 2, WAIT_S, "two pages")
    changes(other, lambda: other.drag(150), "turning the second page")
    other.page.goto("about:blank")
    wait_until(lambda: len(viewer.render_statemachines) == 1, WAIT_S, "the second page's leaving")
    changes(view, lambda: view.drag(150), "turning the first page")
