"""A report with a mesh, opened from a file: the mesh is drawn with its texture, without a network."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.html.page import render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.mesh.mesh_files import write_mesh
from f3rm_ext.workflow.page import page_mesh

LEFT, RIGHT = (210, 40, 60), (30, 90, 200)
VIEW = {"position": [0.5, 0.5, 3.0], "ahead": [0.0, 0.0, -1.0], "up": [0.0, 1.0, 0.0], "fov_deg": 40.0}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A page with a square whose texture is red on the left and blue on the right."""
    mesh = trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]], [[0, 1, 2], [0, 2, 3]], process=False)
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32], pixels[:, 32:] = LEFT, RIGHT
    material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.fromarray(pixels))
    uv = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    mesh.visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
    glb = tmp_path / "textured.glb"
    write_mesh(glb, mesh, {"made_by": "f3rm-ext export texture"}, "y")
    page = tmp_path / "report.html"
    mesh = {"file": glb.name, "data": page_mesh(glb), "view": VIEW}
    empty: dict[str, Any] = dict.fromkeys(("keys", "views", "commands", "facts", "splats_page"), ())
    tables = dict.fromkeys(("figures", "stages"), Table([], []))
    page.write_text(render_page("sugar_run.html", title="A mesh", mesh=mesh, config="", **empty, **tables))
    return page


def canvas(page: Any) -> np.ndarray:
    """Pixels of the canvas, (h, w, 3)."""
    data = page.evaluate("document.querySelector('[data-mesh] canvas').toDataURL('image/png').split(',')[1]")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


def test_the_texture_is_drawn_from_a_file_without_a_network(browser: Any, report: Path) -> None:
    context = browser.new_context(viewport={"width": 800, "height": 700}, offline=True)
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    page.locator("[data-mesh][data-state=shown]").wait_for(timeout=60_000)
    assert page.locator("[data-mesh]").get_attribute("data-textured") == "1"
    picture = canvas(page)
    height, width = picture.shape[:2]
    row = picture[height // 2]
    assert np.abs(row[width // 2 - 40] - LEFT).max() < 12, row[width // 2 - 40]
    assert np.abs(row[width // 2 + 40] - RIGHT).max() < 12, row[width // 2 + 40]
    page.get_by_role("button", name="Shape").click()
    grey = canvas(page)[height // 2, width // 2 - 40]
    assert np.ptp(grey) < 40 and np.abs(grey - LEFT).max() > 40
    page.get_by_role("button", name="Photos").click()
    box = page.locator("[data-mesh] canvas").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + 230, steps=3)
    page.mouse.up()
    assert np.abs(canvas(page) - picture).mean() > 2, "dragging turns the mesh"
    assert not errors
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked
    context.close()
