"""Asking in the browser: the picture changes, and it changes where the thing is that was asked for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.query.exemplar import deepest_pixel

WAIT_S = 180
FRAME = 0
FOUND = 0.12
"""Mean heat within a thing's outline, above that outside of it: found."""
CHANGED = 0.02
GONE = 0.12
"""Mean change of the colours of a thing that was removed."""
BIG = 0.06
"""Share of the photo that a thing takes up at least, to be learnt in so short a training."""


class Page:
    """A page that looks through a training camera, and where in its picture the photo's pixels are."""

    def __init__(self, viewer: Any, view: Any, photo: Path, labels: np.ndarray) -> None:
        self.viewer, self.view, self.photo, self.labels = viewer, view, photo, labels

    @property
    def panel(self) -> Any:
        """The model's own panel."""
        return self.viewer.pipeline.model.queries

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each photo pixel is on the page: x and y, 0 to 1 within the picture; both are pinhole cameras."""
        (client,) = self.viewer.viser_server.get_clients().values()
        camera = self.viewer.pipeline.datamanager.train_dataset.cameras[FRAME]
        tangent = np.tan(client.camera.fov / 2)
        height, width = self.labels.shape
        x = (np.arange(width) + 0.5 - float(camera.cx)) / float(camera.fx)
        y = (np.arange(height) + 0.5 - float(camera.cy)) / float(camera.fy)
        return np.broadcast_arrays(0.5 + x / (2 * tangent * client.camera.aspect), (0.5 + y / (2 * tangent))[:, None])

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """What the page shows at the photo's pixels (h, w, 3), and which of them it shows at all."""
        image = np.asarray(self.view.image(), dtype=np.float32) / 255.0
        x, y = self.places()
        inside = (x > 0) & (x < 1) & (y > 0) & (y < 1)
        cols = np.clip((x * image.shape[1]).astype(int), 0, image.shape[1] - 1)
        rows = np.clip((y * image.shape[0]).astype(int), 0, image.shape[0] - 1)
        return image[rows, cols], inside

    def heat(self, label: int) -> float:
        """How much hotter (redder than blue) a class is than the rest, with the threshold at the panel's default."""
        colors, inside = self.seen()
        hot = colors[..., 0] - colors[..., 2]
        mask = self.labels == label
        return float(hot[mask & inside].mean() - hot[~mask & inside].mean())


@pytest.fixture
def page(
    request: pytest.FixtureRequest,
    open_page: Callable[..., Any],
    look_through: Callable[[Any, int], None],
    tiny_capture: Path,
    wait_until: Callable[..., None],
) -> Iterator[Page]:
    """A page where nothing is asked as yet, of a field unless a test names another viewer; after the test, whatever it
    did, the render threads must live."""
    viewer = request.getfixturevalue(getattr(request, "param", "labelled_viewer"))
    view = open_page(f"http://127.0.0.1:{viewer.config.websocket_port}", keep=True)
    wait_until(lambda: view.output() != "not set" and view.resolution() != (0, 0), WAIT_S, "a first picture")
    # What the panel says may be of an earlier page.
    wait_until(lambda: bool(viewer.viser_server.get_clients()), WAIT_S, "the page being known to the viewer")
    look_through(viewer, FRAME)
    view.press("Clear queries")
    wait_until(lambda: "Query" not in view.status() and "Named" not in view.status(), WAIT_S, "nothing asked")
    if view.output() != "rgb":
        view.choose_output("rgb")
    photo = viewer.pipeline.datamanager.train_dataset.image_filenames[FRAME]
    labels = CaptureGroundTruth(tiny_capture).label_image(photo)
    assert labels is not None
    page = Page(viewer, view, photo, labels)
    truth = np.asarray(page.viewer.pipeline.datamanager.train_dataset[FRAME]["image"])

    def is_shown() -> bool:
        colors, inside = page.seen()
        return max(view.resolution()) >= 63 and float(np.abs(colors - truth)[inside].mean()) < 0.15

    wait_until(is_shown, WAIT_S, "the training view in colours: the page's pixels are the photo's")
    yield page
    machines = list(viewer.render_statemachines.values())
    assert machines and all(machine.is_alive() for machine in machines), "a render thread died: its page is frozen"


@pytest.fixture
def things(page: Page, tiny_capture: Path) -> list[SimpleNamespace]:
    """The classes that take up most of the photo, biggest first: name, label and a pixel deep inside."""
    names = CaptureGroundTruth(tiny_capture).names
    counts = np.bincount(page.labels.ravel(), minlength=len(names)) / page.labels.size
    found = []
    for label in np.argsort(-counts):
        if counts[label] >= BIG:
            row, col = deepest_pixel(page.labels == label)
            found.append(SimpleNamespace(name=names[label], label=int(label), row=row, col=col))
    assert len(found) >= 2, counts
    return found


def test_a_threshold_of_one_finds_next_to_nothing_and_an_empty_text_nothing(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    page.view.write("Query", things[0].name)
    wait_until(lambda: page.heat(things[0].label) > FOUND, WAIT_S, "heat")
    try:
        assert "found from 0.50" in page.view.status()
        page.view.write("Threshold", "1")
        wait_until(lambda: page.heat(things[0].label) < FOUND / 2, WAIT_S, "no heat")
    finally:
        page.view.write("Threshold", "0.5")
    wait_until(lambda: page.heat(things[0].label) > FOUND, WAIT_S, "heat again")
    page.view.write("Query", "")
    wait_until(lambda: page.heat(things[0].label) < FOUND / 2, WAIT_S, "no heat without a text")
    assert "Query" not in page.view.status() and page.view.output() == "relevancy_overlay"


@pytest.mark.parametrize(
    "page", ["labelled_viewer", pytest.param("labelled_splat_viewer", marks=pytest.mark.release)], indirect=True
)
def test_a_click_lights_up_what_was_clicked(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    x, y = page.places()
    for thing in things[:2]:
        page.view.press("Click to query")
        wait_until(lambda: "Click on the scene" in page.view.status(), WAIT_S, "being asked to click")
        page.view.click_at(float(x[thing.row, thing.col]), float(y[thing.row, thing.col]))
        wait_until(lambda thing=thing: page.heat(thing.label) > FOUND, WAIT_S, f"heat on {thing.name}")
        assert "against “scene”" in page.view.status()
    assert page.heat(things[0].label) < FOUND / 2


def test_labels_show_the_named_queries_in_the_colors_of_the_legend(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    for thing in things[:2]:
        page.view.write("Query", thing.name)
        wait_until(lambda thing=thing: f"“{thing.name}”" in page.view.status(), WAIT_S, "the query")
        page.view.press("Add to named queries")
        wait_until(lambda thing=thing: thing.name in page.view.status().split("Named")[-1], WAIT_S, "its name")
    page.view.choose_output("labels")
    legend = {things[0].label: (0xE6, 0x9F, 0x00), things[1].label: (0x56, 0xB4, 0xE9)}
    for color in ("#e69f00", "#56b4e9"):
        assert color in page.view.status()

    def share(label: int) -> float:
        """Share of a class's pixels that are nearer to its own colour than to the other's and to grey."""
        colors, inside = page.seen()
        palette = np.array([legend[label], *(c for other, c in legend.items() if other != label), (41, 41, 41)]) / 255.0
        nearest = np.linalg.norm(colors[:, :, None] - palette, axis=-1).argmin(axis=-1)
        return float((nearest[(page.labels == label) & inside] == 0).mean())

    wait_until(lambda: all(share(thing.label) > 0.6 for thing in things[:2]), WAIT_S, "both in their colours")


@pytest.mark.release
def test_refitted_colors_change_the_picture_and_stay(
    page: Page, wait_until: Callable[..., None], difference: Callable[..., float]
) -> None:
    page.view.choose_output("feature_pca")
    wait_until(lambda: page.view.output() == "feature_pca" and page.view.picture().std() > CHANGED, WAIT_S, "features")
    before = page.view.picture()
    page.view.press("Refit PCA")
    wait_until(lambda: "fit this view" in page.view.status(), WAIT_S, "an answer")
    wait_until(lambda: difference(page.view.picture(), before) > CHANGED, WAIT_S, "other colours")
    page.view.drag(120)
    wait_until(lambda: difference(page.view.picture(), before) > CHANGED, WAIT_S, "another view")


@pytest.mark.release
def test_missing_weights_are_a_status_and_the_page_lives(
    page: Page,
    things: list[SimpleNamespace],
    wait_until: Callable[..., None],
    difference: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (head,) = page.viewer.pipeline.model.query_heads().values()
    with monkeypatch.context() as patch:
        patch.setattr(head, "extractor", "clip:pretrained=/no/such/weights.pt")
        page.view.write("Query", "mug")
        wait_until(lambda: "Problem" in page.view.status(), WAIT_S, "a problem")
        assert "weights file /no/such/weights.pt" in page.view.status()
        assert page.panel.store.state.live is None
        before = page.view.picture()
        page.view.drag(150)
        wait_until(lambda: difference(page.view.picture(), before) > CHANGED, WAIT_S, "another view")
    page.view.write("Query", things[0].name)
    wait_until(lambda: "Problem" not in page.view.status(), WAIT_S, "a good query")


@pytest.mark.release
def test_a_failing_output_is_a_status_and_the_page_lives(
    page: Page,
    things: list[SimpleNamespace],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from f3rm_ext.viewer import outputs

    def broken(*_: object) -> None:
        raise ZeroDivisionError("broken on purpose")

    page.view.write("Query", things[0].name)
    wait_until(lambda: page.heat(things[0].label) > FOUND, WAIT_S, "heat")
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "_relevancy", broken)
        page.view.write("Temperature", "0.11")
        wait_until(lambda: page.view.output() == "rgb", WAIT_S, "falling back to rgb")
        wait_until(lambda: "broken on purpose" in page.view.status(), WAIT_S, "what is wrong")
    page.view.write("Temperature", "0.1")
    wait_until(lambda: "relevancy_overlay" in page.view.outputs(), WAIT_S, "the output being offered again")


# Those of splats come last: a page of another viewer takes seconds to open.
@pytest.mark.parametrize("page", ["labelled_viewer", "labelled_splat_viewer"], indirect=True)
def test_a_text_lights_up_the_thing_and_another_text_another_thing(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    first, second = things[:2]
    page.view.write("Query", first.name)
    wait_until(lambda: page.heat(first.label) > FOUND, WAIT_S, f"heat on {first.name}")
    assert page.view.output() == "relevancy_overlay" and f"“{first.name}”" in page.view.status()
    assert page.heat(second.label) < FOUND / 2
    page.view.write("Query", second.name)
    wait_until(lambda: page.heat(second.label) > FOUND, WAIT_S, f"heat on {second.name}")
    assert page.heat(first.label) < FOUND / 2


@pytest.mark.parametrize("page", ["labelled_splat_viewer"], indirect=True)
def test_a_click_lights_up_the_group(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    x, y = page.places()

    def lit() -> list[bool]:
        """Which of the two things is lit where it is clicked: what is not lit is grey."""
        colors, _ = page.seen()
        return [float(np.ptp(colors[thing.row, thing.col])) > FOUND for thing in things[:2]]

    for number, thing in enumerate(things[:2]):
        page.view.press("Click a group")
        wait_until(lambda: "Click on the scene" in page.view.status(), WAIT_S, "being asked to click")
        page.view.click_at(float(x[thing.row, thing.col]), float(y[thing.row, thing.col]))
        wait_until(lambda number=number: lit() == [number == 0, number == 1], WAIT_S, f"only {thing.name} being lit")
        assert "Group" in page.view.status() and page.view.output() == "group"


@pytest.mark.parametrize("page", ["labelled_splat_viewer"], indirect=True)
def test_what_is_removed_comes_back_and_what_is_left_is_saved(
    page: Page, things: list[SimpleNamespace], wait_until: Callable[..., None]
) -> None:
    """A thing is found by its text, another by its group; both go, one comes back, and the other is gone in a run."""
    from f3rm_ext.export.splats import load_splat_run

    first, second = things[:2]
    x, y = page.places()
    # A hole in the mean colour of the photos looks like a plain rug.
    page.viewer.pipeline.model.background.zero_()

    def change(label: int) -> float:
        """How much the colours of a class differ from those before."""
        colors, inside = page.seen()
        return float(np.abs(colors - before)[(page.labels == label) & inside].mean())

    def gone() -> list[bool]:
        """Which of the two things are gone: both look so until the picture of the selection is replaced."""
        return [change(thing.label) > GONE for thing in (first, second)]

    def remove(name: str) -> None:
        """Selects what was asked for, which is then lit, and removes it, whereupon the scene is shown."""
        page.view.press("Select")
        wait_until(lambda: name in page.view.status().split("Selected")[-1], WAIT_S, "the selection")
        wait_until(lambda: page.view.output() == "selection", WAIT_S, "its light")
        page.view.press("Remove selected")
        wait_until(lambda: page.view.output() == "rgb", WAIT_S, "the scene without it")

    before, _ = page.seen()
    page.view.write("Query", first.name)
    wait_until(lambda: f"“{first.name}”" in page.view.status(), WAIT_S, "the query")
    remove(first.name)
    wait_until(lambda: gone() == [True, False], WAIT_S, f"only {first.name} being gone")
    page.view.press("Click a group")
    wait_until(lambda: "Click on the scene" in page.view.status(), WAIT_S, "being asked to click")
    page.view.click_at(float(x[second.row, second.col]), float(y[second.row, second.col]))
    wait_until(lambda: "Group" in page.view.status(), WAIT_S, "the group")
    remove("group")
    wait_until(lambda: gone() == [True, True], WAIT_S, f"{second.name} being gone, too")
    page.view.press("Undo")
    wait_until(lambda: gone() == [True, False], WAIT_S, f"{second.name} being back")
    page.view.press("Save")
    wait_until(lambda: "Saved as the run" in page.view.status(), WAIT_S, "the run")
    model = page.viewer.pipeline.model
    saved = load_splat_run(model.opened_checkpoint().parents[1].with_name("t-edited") / "config.yml")
    (edit,) = page.panel.edit._edits.steps
    assert saved.model.num_gaussians == model.num_gaussians - len(edit.rows) and edit.name == f"remove {first.name}"
    page.view.press("Undo")
    wait_until(lambda: change(first.label) < GONE / 2, WAIT_S, f"{first.name} being back")
    assert page.panel.hidden() is None
