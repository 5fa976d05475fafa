"""A page of a mesh: what is in the file, how large it is, and where its cameras are."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.capture.frame import Y_UP
from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.mesh_files import read_mesh, vertex_colors, write_mesh
from f3rm_ext.preview.cameras import NamedCamera, overview
from f3rm_ext.preview.content import open_content
from f3rm_ext.preview.mesh_page import write_mesh_page
from f3rm_ext.scripts.export_page import Page


@pytest.fixture
def mesh(tmp_path: Path) -> Path:
    """A box of 1 x 2 x 4, z up, with a texture of noise; its file has y up."""
    box = trimesh.creation.box([1.0, 2.0, 4.0])
    made = trimesh.Trimesh(box.vertices, box.faces, process=False)
    pixels = np.random.default_rng(0).integers(0, 255, (1024, 1024, 3), dtype=np.uint8)
    material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.fromarray(pixels))
    made.visual = trimesh.visual.TextureVisuals(uv=made.vertices[:, :2] % 1, material=material)
    write_mesh(tmp_path / "box.glb", made, {"made_by": "f3rm-ext export texture"}, "y")
    return tmp_path / "box.glb"


def parts(page: str) -> tuple[dict[str, Any], bytes]:
    """The content for the script and the mesh of a page."""
    found = {name: text for name, text in re.findall(r'<script type="[^"]*" id="(\w+)">(.*?)</script>', page, re.S)}
    return json.loads(found["content"]), base64.b64decode(found["glb"])


def poster_of(page: str) -> np.ndarray:
    """The picture for browsers without WebGL2, (h, w, 3)."""
    poster = re.search(r'id="poster" src="data:image/\w+;base64,([^"]*)"', page)
    assert poster is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(poster[1]))).convert("RGB")).astype(float)


def test_a_page_holds_the_mesh_and_the_cameras_y_up(tmp_path: Path, mesh: Path) -> None:
    content = open_content(mesh)
    named = overview(content.places)._replace(name="a.jpg")
    made = write_mesh_page(tmp_path / "box.html", content, [named, named], "<Box> & more")
    assert (made.triangles, made.texture_px, made.given_px) == (12, 1024, 1024)
    page = (tmp_path / "box.html").read_text()
    assert "<Box>" not in page and "&lt;Box&gt; &amp; more" in page
    assert page.rstrip().endswith("<!-- made_by: f3rm-ext export page -->")
    assert len(page) / 2**20 == pytest.approx(made.size_mib, abs=0.01)
    settings, glb = parts(page)
    (tmp_path / "page.glb").write_bytes(glb)
    np.testing.assert_allclose(trimesh.load(tmp_path / "page.glb", force="mesh").extents, [1, 4, 2], atol=1e-5)
    assert [camera["name"] for camera in settings["cameras"]] == ["a.jpg", "a.jpg"]
    first = settings["cameras"][0]
    np.testing.assert_allclose(first["position"], Y_UP @ named.camera.center, atol=1e-5)
    np.testing.assert_allclose(np.array(first["turn"])[2], Y_UP @ named.camera.rotation[2], atol=1e-6)
    # The overview looks at the middle of the box.
    assert first["reach"] == pytest.approx(np.linalg.norm(named.camera.center - content.places.mean(axis=0)), rel=0.1)


def test_the_browser_is_told_to_refuse_every_request(tmp_path: Path, mesh: Path) -> None:
    write_mesh_page(tmp_path / "box.html", open_content(mesh), [], "Box")
    page = (tmp_path / "box.html").read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'"
    assert set(" ".join(rules.values()).split()) <= {"'unsafe-inline'", "blob:", "data:"}
    assert not re.findall(r'\b(?:src|href)\s*=\s*["\'](?!data:)', page)


def test_the_texture_gives_way_to_a_limit(tmp_path: Path, mesh: Path) -> None:
    content, out = open_content(mesh), tmp_path / "box.html"
    made = write_mesh_page(out, content, [], "Box", max_mb=1.2)
    assert made.texture_px in (256, 512) and out.stat().st_size <= 1.2e6
    out.unlink()
    with pytest.raises(MeshError, match=r"12 triangles.*--max-mb 0\.3") as refusal:
        write_mesh_page(out, content, [], "Box", max_mb=0.3)
    (would_have_mb,) = re.findall(r"have ([\d.]+) MB", str(refusal.value))
    assert not out.exists()
    write_mesh_page(out, content, [], "Box", max_mb=float(would_have_mb) + 0.1)


def test_many_cameras_are_spread_and_none_make_an_overview(tmp_path: Path, mesh: Path) -> None:
    content = open_content(mesh)
    one = overview(content.places)
    many = [NamedCamera(f"{i}.jpg", one.camera) for i in range(500)]
    for given, count, last in ((many, 120, "499.jpg"), ([], 1, "Overview")):
        write_mesh_page(tmp_path / "box.html", content, given, "Box")
        settings, _ = parts((tmp_path / "box.html").read_text())
        assert len(settings["cameras"]) == count and settings["cameras"][-1]["name"] == last


def test_a_mesh_without_colours_has_a_picture_too(tmp_path: Path) -> None:
    trimesh.creation.icosphere().export(tmp_path / "ball.stl")
    write_mesh_page(tmp_path / "ball.html", open_content(tmp_path / "ball.stl"), [], "Ball")
    page = (tmp_path / "ball.html").read_text()
    assert 0.2 < (poster_of(page).mean(axis=2) > 40).mean() < 0.9
    assert re.search(r'data-look="texture"[^>]* hidden', page)


@pytest.mark.parametrize("kind", ["faces", "material"])
def test_colours_of_faces_and_materials_are_those_of_vertices(tmp_path: Path, kind: str) -> None:
    box = trimesh.creation.icosphere()
    if kind == "faces":
        box.visual.face_colors = np.tile([188, 0, 0, 255], (len(box.faces), 1)).astype(np.uint8)
        box.export(tmp_path / "a.ply")
    else:  # half of the light
        material = trimesh.visual.material.PBRMaterial(baseColorFactor=[128, 0, 0, 255])
        box.visual = trimesh.visual.TextureVisuals(uv=np.zeros((len(box.vertices), 2)), material=material)
        box.export(tmp_path / "a.glb")
    content = open_content(next(path for path in tmp_path.iterdir()))
    write_mesh_page(tmp_path / "a.html", content, [], "Ball")
    page = (tmp_path / "a.html").read_text()
    assert not re.search(r'data-look="texture"[^>]* hidden', page)
    (tmp_path / "page.glb").write_bytes(parts(page)[1])
    colors = vertex_colors(read_mesh(tmp_path / "page.glb"))
    assert colors is not None and np.abs(colors.astype(int) - [188, 0, 0]).max() <= 1
    pixels = poster_of(page)
    assert ((pixels[..., 0] > 150) & (pixels[..., 1] < 40)).mean() > 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--mesh"),
        ({"mesh": Path("a.glb"), "text": ("mug",)}, "--text"),
        ({"mesh": Path("a.glb"), "sh_degree": 0}, "--sh-degree"),
        ({"mesh": Path("a.glb"), "max_loss_db": 0.0}, "--max-loss-db"),
        ({"mesh": Path("a.glb"), "threshold": 0.7}, "--threshold"),
        ({"mesh": Path("a.glb"), "negative_exemplar": ("a.jpg",)}, "--negative-exemplar"),
        ({"mesh": Path("a.glb"), "feature": "clip"}, "--feature"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Page(out=Path("a.html"), **options)


def test_points_are_no_mesh(tmp_path: Path) -> None:
    trimesh.PointCloud(np.eye(3)).export(tmp_path / "a.ply")
    with pytest.raises(MeshError, match="3 points"):
        Page(out=tmp_path / "a.html", mesh=tmp_path / "a.ply").main()
    assert not (tmp_path / "a.html").exists()
