"""Splats in the browser: each output can be chosen and shows something of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

CHANGED = 0.02
"""Pictures that differ by more on average show something else."""
WAIT_S = 180
OUTPUTS = ("rgb", "depth", "accumulation", "normal", "normal_from_depth")


@pytest.fixture
def view(
    splat_viewer: Any,
    open_page: Callable[[str], Any],
    look_through: Callable[[Any, int], None],
    wait_until: Callable[..., None],
) -> Iterator[Any]:
    """A page that looks through a training camera; after the test nerfstudio's render threads must live."""
    page = open_page(f"http://127.0.0.1:{splat_viewer.config.websocket_port}")
    wait_until(lambda: page.output() != "not set" and page.resolution() != (0, 0), WAIT_S, "a first picture")
    if page.output() != "rgb":  # the panel is shared, and an earlier test has chosen something
        page.choose_output("rgb")
    # What the panel says may be of an earlier page.
    wait_until(lambda: bool(splat_viewer.viser_server.get_clients()), WAIT_S, "the page being known to the viewer")
    look_through(splat_viewer, 0)
    wait_until(lambda: page.picture().std() > CHANGED, WAIT_S, "a picture of the scene")
    yield page
    machines = list(splat_viewer.render_statemachines.values())
    assert machines, "no page is connected"
    assert all(machine.is_alive() for machine in machines), "a render thread died: its page is frozen"


def test_every_output_can_be_chosen_and_looks_different(
    view: Any, wait_until: Callable[..., None], difference: Callable[..., float]
) -> None:
    assert set(OUTPUTS) <= set(view.outputs())
    assert "feature_pca" not in view.outputs(), "no features were lifted"

    def settled(name: str) -> np.ndarray:
        """What is shown once two pictures in a row are alike."""
        looks = [view.picture()]

        def same() -> bool:
            looks.append(view.picture())
            return difference(looks[-1], looks[-2]) < CHANGED / 4

        wait_until(same, WAIT_S, f"{name} to stay")
        return looks[-1]

    seen = {}
    for name in (*OUTPUTS[1:], "rgb"):
        before = view.picture()
        view.choose_output(name)
        wait_until(
            lambda before=before: difference(view.picture(), before) > CHANGED,
            WAIT_S,
            f"another picture after choosing {name}",
        )
        assert view.output() == name
        seen[name] = settled(name)
    for index, one in enumerate(OUTPUTS):
        for other in OUTPUTS[index + 1 :]:
            assert difference(seen[one], seen[other]) > CHANGED, f"{one} looks like {other}"


def test_turning_the_view_changes_the_picture(
    view: Any, wait_until: Callable[..., None], difference: Callable[..., float]
) -> None:
    before = view.picture()
    view.drag(150)
    wait_until(lambda: difference(view.picture(), before) > CHANGED, WAIT_S, "another picture after turning")
