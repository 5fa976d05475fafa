"""The page of a chain: what its stages wrote, as far as there is something, and nothing of it as markup."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.errors import MeshError
from f3rm_ext.html import page as html
from f3rm_ext.mesh.mesh_files import read_mesh, write_mesh
from f3rm_ext.mesh.texture.rendering import get_texture
from f3rm_ext.workflow import page as module
from f3rm_ext.workflow.manifest import Output, Record, identify
from f3rm_ext.workflow.options import ChainOptions
from f3rm_ext.workflow.page import first_photo_view, page_mesh, write_page
from f3rm_ext.workflow.stages import hide_home

HOSTILE = "<script>alert('x')</script>&\""
SPLATS = {"psnr": 20.123, "ssim": 0.8, "device": HOSTILE}
TEXTURE = {"psnr": 18.5, "psnr_covered": 21.25, "coverage": 0.9}
MESH = {"accuracy": 0.0123, "scores": [{"threshold": 0.05, "precision": 0.5, "recall": 0.25, "f_score": 0.333}]}
POSE = [[1, 0, 0, 5], [0, 0, -1, 6], [0, 1, 0, 7], [0, 0, 0, 1]]
"""At 5, 6, 7; looks along +y, z is up."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output of a chain with two held-out views, which were evaluated for the refined splats and the texture."""
    (tmp_path / "transforms.json").write_text(
        json.dumps({"h": 200, "fl_y": 100, "frames": [{"file_path": "a", "transform_matrix": POSE}]})
    )
    for name in ("mesh.ply", "textured.glb"):
        write_mesh(tmp_path / name, trimesh.creation.box(), {"made_by": "f3rm-ext export mesh"})
    for name, scores in (("refined", {"results": SPLATS}), ("texture", TEXTURE), ("mesh", MESH)):
        pictures = tmp_path / "eval" / name / "pictures"
        pictures.mkdir(parents=True)
        (pictures.parent / "scores.json").write_text(json.dumps(scores))
        for number in range(2):
            file = f"test-{number}.png" if name == "texture" else f"eval_img_{number:04d}.png"
            Image.fromarray(np.zeros((8, 20, 3), np.uint8)).save(pictures / file)
    return tmp_path


def written(folder: Path, stages: tuple[str, ...], **options: Any) -> str:
    outputs = {"config": Output(f"runs/{HOSTILE}/config.yml", 2_500_000, "")}
    records = {
        name: Record(command=f"f3rm-ext {folder}/x {HOSTILE}", seconds=61.0, peak_mib=1234.0, outputs=outputs, runs=2)
        for name in stages
    }
    records[stages[0]].notes.append(f"{HOSTILE}.")
    chain = ChainOptions(data=folder, output=folder, **options)
    capture = {**identify(folder), "path": f"/data/{HOSTILE}", "photos": 7}
    return write_page(chain, folder, capture, records, {stages[0]})


def test_the_page_shows_what_the_stages_wrote(folder: Path) -> None:
    page = written(folder, ("coarse", "mesh", "refine", "eval-refined", "eval-mesh", "eval-texture"))
    for part in (
        "20.12 dB",
        "21.25 dB",
        "21.2 dB on the 90%",
        "0.0123",
        "0.333",
        "1,234 MiB",
        "2.5 MB",
        "1 min 01 s",
        "2 runs",
        "done before",
    ):
        assert part in page, part
    assert page.count("<figure>") == 2 * 3, "photo, refined splats and texture of two views"
    assert page.count("<script>") == 1 and HOSTILE not in page, "that of the mesh"
    assert f"{folder}/x" not in page and "photos/x" not in page


def test_a_score_that_nothing_has_is_left_out(folder: Path) -> None:
    (folder / "eval" / "texture" / "scores.json").write_text(json.dumps({**TEXTURE, "psnr_covered": None}))
    page = written(folder, ("mesh", "eval-texture"))
    assert "18.50 dB" in page and "21.25 dB" not in page


def test_a_mesh_with_many_holes_names_the_option_that_covers_more(folder: Path) -> None:
    stages = ("mesh", "eval-texture")
    assert "min-views" not in written(folder, stages)
    (folder / "eval" / "texture" / "scores.json").write_text(json.dumps({**TEXTURE, "coverage": 0.72}))
    assert "--mesh.min-views 1" in written(folder, stages)
    assert "--mesh.min-views 1" not in written(folder, stages, passed_on={"mesh": {"min-views": ("1",)}})


def test_what_masks_cost_is_said_where_there_are_masks(folder: Path) -> None:
    assert "masks" not in written(folder, ("refine", "eval-refined"))
    frames = [{"file_path": "a", "transform_matrix": POSE, "mask_path": "m"}]
    (folder / "transforms.json").write_text(json.dumps({"h": 200, "fl_y": 100, "frames": frames}))
    assert "masks" in written(folder, ("refine", "eval-refined"))


def test_the_page_of_the_splats_is_linked(folder: Path) -> None:
    assert 'href="page.html"' in written(folder, ("coarse", "mesh", "page"))
    assert "page.html" not in written(folder, ("coarse", "mesh"))


def test_a_mesh_begins_at_the_first_photo(folder: Path) -> None:
    page = written(folder, ("mesh",))
    assert "data-mesh=" in page and "&#34;position&#34;: [5.0, 7.0, -6.0]" in page and "ns-viewer" not in page
    (folder / "mesh.ply").write_bytes(b"damaged")
    page = written(folder, ("mesh",))
    assert "data-mesh=" not in page and "mesh.ply" in page and "<script" not in page


def test_three_comes_with_its_licence_and_fits_into_a_page() -> None:
    script = html._asset("three.min.js") + html._asset("mesh_viewer.js")
    assert "</script" not in script.lower() and len(script) < 1_000_000
    assert "The MIT License" in (Path(html.__file__).parent / "web" / "LICENSE-three.txt").read_text()
    assert "three.js" in script and "SPDX-License-Identifier: MIT" in script


# --- the mesh and its view -------------------------------------------------------------------------------------------


@pytest.fixture
def textured(tmp_path: Path) -> Path:
    """A square with a texture of 4096 px, z up in memory and y up in the file."""
    mesh = trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [1, 0, 2], [0, 0, 2]], [[0, 1, 2], [0, 2, 3]], process=False)
    uv = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.new("RGB", (4096, 4096), (200, 30, 90)))
    mesh.visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
    path = tmp_path / "textured.glb"
    write_mesh(path, mesh, {"made_by": "f3rm-ext export texture"}, "y")
    return path


def test_a_texture_is_reduced_and_the_axes_stay(textured: Path, tmp_path: Path) -> None:
    content = base64.b64decode(page_mesh(textured))
    assert b"image/jpeg" in content and b"KHR_materials_unlit" in content
    (tmp_path / "page.glb").write_bytes(content)
    two = read_mesh(tmp_path / "page.glb")
    np.testing.assert_allclose(two.bounds, [[0, 0, 0], [1, 2, 0]], atol=1e-6)  # y up
    texture = get_texture(two)
    assert texture is not None and texture.shape[:2] == (2048, 2048)
    assert np.abs(texture[5, 5, :3].astype(int) - (200, 30, 90)).max() < 6


def test_a_mesh_too_large_for_a_page(textured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MIB", 0)
    with pytest.raises(MeshError, match=r"textured\.glb"):
        page_mesh(textured)


def test_the_camera_begins_at_the_first_photo(folder: Path) -> None:
    view = first_photo_view(folder)
    assert view.pop("fov_deg") == pytest.approx(90)
    assert view == {"position": [5, 7, -6], "ahead": [0, 0, -1], "up": [0, 1, 0]}
    (folder / "transforms.json").write_text("{}")
    assert first_photo_view(folder) == {}


def test_only_the_home_folder_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "ns-train --data /home/ann/room --out='/home/ann/my out' /mnt/home/ann/x /home/anna/x"
    monkeypatch.setenv("HOME", "/home/ann")
    assert hide_home(command) == "ns-train --data ~/room --out='~/my out' /mnt/home/ann/x /home/anna/x"
    monkeypatch.setenv("HOME", "/")
    assert hide_home(command) == command
