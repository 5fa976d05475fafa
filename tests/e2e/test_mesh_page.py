"""A page of a mesh, opened from a file: it shows what its cameras see, turns, and needs no network."""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.mesh_files import read_mesh, write_mesh
from f3rm_ext.mesh.texture.rendering import MeshRenderer
from f3rm_ext.preview.cameras import NamedCamera
from f3rm_ext.preview.content import MeshContent, open_content
from f3rm_ext.preview.mesh_page import write_mesh_page

WIDTH, HEIGHT = 240, 180


def cameras() -> list[NamedCamera]:
    """Two cameras that look at the origin, tilted, with the principal point off the middle."""
    made = []
    for angle, roll in ((0.4, 0.2), (2.0, -0.1)):
        back = np.array([np.cos(angle), np.sin(angle), 0.5])
        back /= np.linalg.norm(back)
        right = np.cross([0.0, 0.0, 1.0], back)
        right /= np.linalg.norm(right)
        up = np.cross(back, right)
        right, up = np.cos(roll) * right + np.sin(roll) * up, np.cos(roll) * up - np.sin(roll) * right
        focal, middle = np.array([200.0, 190.0]), np.array([WIDTH / 2 + 20, HEIGHT / 2 - 14])
        camera = Camera(np.stack([right, -up, -back]), 4 * back, focal, middle, WIDTH, HEIGHT)
        made.append(NamedCamera(f"{angle}.jpg", camera))
    return made


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box with a smooth texture of many colours."""
    box = trimesh.creation.box([1.0, 1.4, 1.8]).subdivide()
    made = trimesh.Trimesh(box.vertices, box.faces, process=False)
    rows, cols = np.mgrid[0:256, 0:256] / 255.0
    pixels = np.stack([rows, cols, 0.5 + 0.5 * np.sin(6 * rows)], axis=2) * 255
    material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.fromarray(pixels.astype(np.uint8)))
    uv = made.vertices[:, :2] * 0.4 + made.vertices[:, 2:] * 0.1 + 0.5
    made.visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
    path = tmp_path_factory.mktemp("mesh") / "box.glb"
    write_mesh(path, made, {"made_by": "f3rm-ext export texture"}, "y")
    return path


@pytest.fixture(scope="module")
def file(mesh: Path) -> Path:
    content, out = open_content(mesh), mesh.with_name("box.html")
    assert isinstance(content, MeshContent)
    write_mesh_page(out, content, cameras(), "A box")
    return out


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page in a browser without a network, with a canvas of the size of the photos."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, offline=True, accept_downloads=True)
    page = context.new_page()
    said: list[str] = []
    page.on("request", lambda request: said.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.goto(file.as_uri())
    page.locator("body[data-state=shown]").wait_for(timeout=60_000)
    yield page
    assert all(line.startswith(("file:", "blob:", "data:")) for line in said), said
    context.close()


def canvas(page: Any) -> np.ndarray:
    """Pixels of the canvas, (h, w, 3), 0 to 255."""
    data = page.evaluate("document.querySelector('canvas').toDataURL('image/png').split(',')[1]")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(float)


def test_cameras_see_what_they_saw(page: Any, mesh: Path) -> None:
    renderer = MeshRenderer(read_mesh(mesh))
    assert not page.locator("#poster").is_visible()
    for named in cameras():
        picture = renderer.render(named.camera)
        error = np.square(canvas(page) - picture.colors)[picture.covered].mean()
        assert 10 * np.log10(255**2 / error) > 30, named.name
        assert 0.1 < picture.covered.mean() < 0.9
        page.keyboard.press("n")


def test_a_mesh_far_away_is_seen(browser: Any, mesh: Path) -> None:
    (named, _), out = cameras(), mesh.with_name("far.html")
    far = named.camera._replace(center=75 * named.camera.center, focal=75 * named.camera.focal)
    write_mesh_page(out, open_content(mesh), [named._replace(camera=far)], "A box")  # type: ignore[arg-type]
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(out.as_uri())
    page.locator("body[data-state=shown]").wait_for(timeout=60_000)
    picture = MeshRenderer(read_mesh(mesh)).render(far)
    error = np.square(canvas(page) - picture.colors)[picture.covered].mean()
    page.close()
    assert picture.covered.mean() > 0.1 and 10 * np.log10(255**2 / error) > 30


def test_dragging_turns_and_reset_comes_back(page: Any) -> None:
    first = canvas(page)
    page.mouse.move(WIDTH * 0.6, HEIGHT * 0.4)
    page.mouse.down()
    page.mouse.move(WIDTH * 0.8, HEIGHT * 0.5, steps=3)
    page.mouse.up()
    assert np.abs(canvas(page) - first).mean() > 5
    page.keyboard.press("r")
    assert np.abs(canvas(page) - first).mean() < 0.1


def test_a_picture_and_the_mesh_can_be_saved(page: Any, tmp_path: Path) -> None:
    page.evaluate("document.body.classList.remove('folded')")
    for action, name, start in (("picture", "box.png", b"\x89PNG"), ("file", "box.glb", b"glTF")):
        with page.expect_download() as download:
            page.evaluate(f"document.querySelector('[data-do={action}]').click()")
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_a_browser_without_webgl2_shows_a_picture_and_says_so(
    check_without_webgl2: Callable[[Path], None], file: Path
) -> None:
    check_without_webgl2(file)
