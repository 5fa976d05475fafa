"""A page of splats, opened from a file: it draws what the rasteriser draws, answers, and needs no network."""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.notes import Note, read_notes
from f3rm_ext.export.page import PageContent, write_page
from f3rm_ext.export.questions import Question
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import SplatScene, render

WIDTH, HEIGHT, BLUR = 96, 72, 0.1
BACKGROUND = (0.2, 0.4, 0.6)
THRESHOLD = 0.5
CLASSES = ("table", "walls", "floor", "rug")


def cameras() -> PinholeCameras:
    """Three cameras around the origin; the principal point is off the middle."""
    views = []
    for angle in (0.0, 1.2, 2.4):
        position = torch.tensor([3 * np.cos(angle), 3 * np.sin(angle), 1.0], dtype=torch.float32)
        forward = torch.nn.functional.normalize(-position, dim=0)
        right = torch.nn.functional.normalize(torch.linalg.cross(forward, torch.tensor([0.0, 0, 1])), dim=0)
        view = torch.eye(4)
        view[:3, :3] = torch.stack([right, torch.linalg.cross(forward, right), forward])
        view[:3, 3] = -view[:3, :3] @ position
        views.append(view)
    K = torch.tensor([[90.0, 0, WIDTH / 2 + 3], [0, 85.0, HEIGHT / 2 - 2], [0, 0, 1]])
    sides = [torch.full((3,), side, dtype=torch.int32) for side in (WIDTH, HEIGHT)]
    return PinholeCameras(torch.stack(views), K.expand(3, 3, 3), *sides)


def two_balls(count: int = 400, degree: int = 2) -> Gaussians:
    """A ball at either side of the origin, of Gaussians whose colours depend on the direction of view."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    means = 0.25 * normal(count, 3)
    means[: count // 2, 0] -= 0.8
    means[count // 2 :, 0] += 0.8
    rest = 0.12 * normal(count, (degree + 1) ** 2 - 1, 3)
    scales = -3.0 + 0.5 * normal(count, 3)
    return Gaussians(means, scales, normal(count, 4), 1 + normal(count, 1), normal(count, 3), rest)


def drawn(gaussians: Gaussians, camera: int, near: float = 0.01) -> np.ndarray:
    """What the rasteriser draws, (h, w, 3), 0 to 1."""
    one = cameras().take(slice(camera, camera + 1))
    mip = MipOptions(filter_3d=False, eps2d_mip=BLUR)
    with torch.no_grad():
        output = render(SplatScene(gaussians, mip, background=torch.tensor(BACKGROUND), near_plane=near), one)
    return output.outputs()["rgb"].clamp(0, 1).numpy()


@pytest.fixture(scope="module")
def content() -> PageContent:
    """Two balls, asked for the left one and for the right one."""
    gaussians = two_balls()
    left = (0.5 - gaussians.means[:, 0].clamp(-0.4, 0.4)).numpy()
    return PageContent(
        title="Two <balls>",
        gaussians=gaussians,
        cameras=cameras(),
        names=["a.jpg", "b.jpg", "c.jpg"],
        poster=np.full((HEIGHT, WIDTH, 3), 90, np.uint8),
        blur_px2=BLUR,
        antialiased=True,
        questions=[Question("left", left, THRESHOLD), Question("right", 1 - left, THRESHOLD)],
        background=BACKGROUND,
        notes=[Note("middle of the left", None, "left"), Note("far up", (0.0, 0.0, 40.0))],
    )


@pytest.fixture(scope="module")
def file(content: PageContent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the two balls."""
    out = tmp_path_factory.mktemp("page") / "balls.html"
    write_page(out, content)
    return out


class OpenPage:
    """The page in a browser, with a canvas of the size of the photos."""

    def __init__(self, browser: Any, file: Path, width_px: int = WIDTH, height_px: int = HEIGHT) -> None:
        self.context = browser.new_context(viewport={"width": width_px, "height": height_px}, offline=True)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(file.as_uri())
        self.page.locator("body[data-state=shown]").wait_for(timeout=60_000)

    def does(self, script: str) -> None:
        """Runs a script on the page and waits until the picture has settled."""
        self.page.evaluate(f"async () => {{ await ({script}); await f3rm.settled; }}")

    def picture(self) -> np.ndarray:
        """Pixels of the canvas, (h, w, 3), 0 to 1."""
        data = self.page.evaluate("document.querySelector('canvas').toDataURL('image/png').split(',')[1]")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")) / 255.0


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[OpenPage]:
    view = OpenPage(browser, file)
    yield view
    assert not view.errors
    assert all(url.startswith(("file:", "blob:", "data:")) for url in view.requests), view.requests
    view.context.close()


def psnr(one: np.ndarray, two: np.ndarray) -> float:
    return float(-10 * np.log10(np.square(one - two).mean()))


def test_pictures_are_those_of_the_rasteriser(page: OpenPage) -> None:
    pictures = []
    for camera in range(3):
        page.does(f"f3rm.look({camera})")
        pictures.append(page.picture())
        assert psnr(pictures[-1], drawn(two_balls(), camera)) > 38
    assert psnr(pictures[0], pictures[1]) < 25, "turning changes the picture"


def test_heat_follows_the_threshold_and_parts_can_be_shown_alone(page: OpenPage) -> None:
    scene = two_balls()
    left = scene.means[:, 0] < 0
    page.does("f3rm.ask(0)")
    heat = page.picture()
    warm = (heat[..., 0] - heat[..., 2] > 0.1).mean()
    page.does("f3rm.setThreshold(0.85)")
    assert 0 < (page.picture()[..., 0] - page.picture()[..., 2] > 0.1).mean() < warm
    page.does("f3rm.setThreshold(0.5)")
    page.does("f3rm.show('keep')")
    assert psnr(page.picture(), drawn(scene[left], 0)) > 38
    page.does("f3rm.show('drop')")
    assert psnr(page.picture(), drawn(scene[~left], 0)) > 38
    picked = page.page.evaluate(f"[...Array({WIDTH}).keys()].map((x) => f3rm.pick(x, {HEIGHT / 2})).filter((at) => at)")
    assert picked and all(x > 0 for x, _, _ in picked), "what is removed is not in the way"


def test_a_threshold_at_the_end_of_the_scale(browser: Any, file: Path, content: PageContent) -> None:
    always = replace(content.questions[0], threshold=0.0, is_relevancy=True)
    write_page(file.with_name("always.html"), replace(content, questions=[always], notes=[]))
    page = OpenPage(browser, file.with_name("always.html"))
    page.does("f3rm.ask(0)")
    heat = page.picture()
    assert page.page.locator("#threshold-value").text_content() == "0.00" and (heat[..., 0] > heat[..., 2] + 0.1).any()
    page.context.close()


def test_gaussians_nearer_than_the_near_plane_are_not_there(browser: Any, file: Path, content: PageContent) -> None:
    write_page(file.with_name("near.html"), replace(content, near=3.0))
    page = OpenPage(browser, file.with_name("near.html"))
    page.does("f3rm.look(0)")
    assert psnr(page.picture(), drawn(two_balls(), 0, near=3.0)) > 38 > psnr(page.picture(), drawn(two_balls(), 0))
    picked = page.page.evaluate(f"[...Array({WIDTH}).keys()].map((x) => f3rm.pick(x, {HEIGHT / 2})).filter((at) => at)")
    depths = [page.page.evaluate(f"f3rm.eye.project({at}, [1, 1, 0, 0])[2]") for at in picked]
    assert depths and min(depths) > 3.0
    page.context.close()


def test_labels_go_by_scores_whatever_they_are_stored_as(browser: Any, file: Path, content: PageContent) -> None:
    count = len(content.gaussians)
    asked = [
        Question("cosine", np.where(np.arange(count) % 2, 0.95, 0.5).astype(np.float32), 0.4),
        Question("relevancy", np.full(count, 0.8, np.float32), 0.4, is_relevancy=True),
    ]
    write_page(file.with_name("mixed.html"), replace(content, questions=asked, notes=[]))
    page = OpenPage(browser, file.with_name("mixed.html"))
    labels = np.array(page.page.evaluate("[...f3rm.labels()]"))
    best = np.array(page.page.evaluate("[...f3rm.scores[0]].map((level) => level > 200 ? 1 : 2)"))
    assert labels.tolist() == best.tolist() and 0.4 < (labels == 1).mean() < 0.6
    page.context.close()


def test_what_is_straight_below_is_seen_upright(page: OpenPage) -> None:
    # One camera looks down from above, another is level; -z is up.
    for turn in ("[[1, 0, 0], [0, 1, 0], [0, 0, 1]]", "[[1, 0, 0], [0, 0, 1], [0, -1, 0]]"):
        rows = []
        for x in (-0.01, 0, 0.01):
            page.page.evaluate(f"""f3rm.content.cameras[0] = {{...f3rm.content.cameras[0], position: [0, 0, -3],
              turn: {turn}}}""")
            page.does(f"f3rm.visit({{at: [{x}, 0, 0], size: 0.1, camera: 0}})")
            rows.append(page.page.evaluate("f3rm.eye.rows"))
        np.testing.assert_allclose(np.linalg.det(rows), 1, atol=1e-6)
        np.testing.assert_allclose(rows, np.broadcast_to(rows[0], (3, 3, 3)), atol=0.02)
        np.testing.assert_allclose(rows[1][0], [1, 0, 0], atol=1e-6)


def test_a_view_straight_down_can_be_turned(page: OpenPage) -> None:
    page.does("""(f3rm.eye.take({...f3rm.eye.view, position: [0, 0, -4], turn: [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}),
      f3rm.refresh())""")
    before = page.picture()
    page.does("(f3rm.eye.turn(0.05, 0), f3rm.eye.turn(0, 0.02), f3rm.refresh())")
    assert psnr(before, page.picture()) < 40


@pytest.fixture(scope="module")
def answers(labelled_splats: Any, run_command: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of `f3rm-ext query` and the page of `export page` with the same questions."""
    folder = tmp_path_factory.mktemp("answers")
    out, file = folder / "query", folder / "page.html"
    for command in (("query", "--views", "test", "--out", out), ("export", "page", "--out", file)):
        run_command("f3rm-ext", *command, "--load-config", labelled_splats.config, "--text", *CLASSES).succeeds()
    return out, file


def test_only_it_is_the_mask_of_the_command(browser: Any, answers: tuple[Path, Path]) -> None:
    folder, file = answers
    views = {path.stem: np.load(path)["scores"].astype(np.float32) for path in sorted(folder.glob("scores/*.npz"))[:2]}
    height, width = next(iter(views.values())).shape[:2]
    page = OpenPage(browser, file, width, height)
    page.page.evaluate("f3rm.renderer.background = [1, 0, 1]")
    # Not 0.5, which pixels without features have.
    asked = [(0, 0.7), *((number, 0.55) for number in range(0, len(CLASSES), 3))]
    same, either = np.zeros(len(asked)), np.zeros(len(asked))
    for view, scores in views.items():
        page.does(f"f3rm.look(f3rm.content.cameras.findIndex((one) => one.name.startsWith('{view}.')))")
        for row, (number, threshold) in enumerate(asked):
            page.does(f"(f3rm.ask({number}), f3rm.setThreshold({threshold}), f3rm.show('only'))")
            shown, mask = np.any(page.picture() != (1, 0, 1), axis=2), scores[..., number] >= threshold
            same[row] += (mask & shown).sum()
            either[row] += (mask | shown).sum()
        page.does("f3rm.show('hide')")
        assert not (shown & np.any(page.picture() != (1, 0, 1), axis=2)).any()
    large = either > 100
    assert large.sum() > len(asked) / 2 and (same[large] / either[large] >= 0.95).all(), (asked, same, either)
    page.context.close()


def test_labels_places_and_keys(page: OpenPage) -> None:
    page.page.keyboard.press("l")
    page.does("f3rm.settled")
    labels = page.picture()
    assert len(np.unique((labels > 0.5).reshape(-1, 3), axis=0)) > 2
    page.page.locator("#threshold").focus()
    page.page.keyboard.press("1")
    page.does("f3rm.settled")
    assert page.page.locator("#places button").count() == 1
    before = page.picture()
    page.page.evaluate("document.querySelector('#places button').click()")
    page.does("f3rm.settled")
    assert psnr(before, page.picture()) < 30, "a place is visited"
    assert page.page.title() == "Two <balls>"


def test_a_long_question_stays_within_the_panel(browser: Any, file: Path) -> None:
    view = OpenPage(browser, file, 800, 600)
    view.page.evaluate(
        "document.querySelector('[data-question=\"0\"]').append('IMG_20261128_221940.jpg:215.739,69.3286')"
    )
    right = "(element) => element.getBoundingClientRect().right"
    button, row = (view.page.locator(name).first for name in ("[data-question]", "#panel .row:visible"))
    assert button.evaluate(right) <= row.evaluate(right)
    view.context.close()


def test_notes_follow_the_camera_and_can_be_added_and_saved(page: OpenPage) -> None:
    first = page.page.locator(".note", has_text="middle of the left")
    assert first.is_visible() and not page.page.locator(".note", has_text="far up").is_visible()
    before = first.bounding_box()
    page.does("f3rm.look(2)")
    assert first.bounding_box() != before
    page.does("(f3rm.eye.rows = f3rm.eye.rows.map((row, i) => row.map((v) => i === 1 ? v : -v)), f3rm.refresh())")
    assert not first.is_visible(), "behind the camera"
    page.does("f3rm.look(0)")
    page.page.evaluate("document.getElementById('note').value = 'mine'")
    for x, y in ((WIDTH / 2, HEIGHT / 2), (1, 1)):  # the panel is in the mouse's way
        at = f"{{clientX: {x}, clientY: {y}}}"
        page.page.evaluate(f"document.querySelector('canvas').dispatchEvent(new MouseEvent('dblclick', {at}))")
    assert page.page.locator(".note").count() == 3 and page.page.evaluate("f3rm.notes[2].text") == "mine"
    with page.page.expect_download() as saved:
        page.page.evaluate("f3rm.saveNotes()")
    notes = read_notes(saved.value.path())
    assert [note.text for note in notes] == ["middle of the left", "far up", "mine"]
    places = np.array([note.position for note in notes], float)
    np.testing.assert_allclose(places[1], (0, 0, 40), atol=1e-5)
    assert np.abs(places[2]).max() < 2
    page.page.evaluate("document.querySelectorAll('#notes li button')[3].click()")
    assert page.page.locator(".note").count() == 2


def test_a_browser_without_webgl2_shows_a_picture_and_says_so(
    check_without_webgl2: Callable[[Path], None], file: Path
) -> None:
    check_without_webgl2(file)
