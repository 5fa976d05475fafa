"""A mesh inside a page: what is in it, and where the camera is at first."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import read_mesh, write_mesh
from f3rm_ext.mesh.texture.rendering import get_texture
from f3rm_ext.workflow import mesh_viewer as module
from f3rm_ext.workflow.mesh_viewer import first_photo_view, page_mesh


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
    with pytest.raises(MeshError, match=r"textured\.glb is too large for a page"):
        page_mesh(textured)


def test_the_camera_begins_at_the_first_photo(tmp_path: Path) -> None:
    pose = [[1, 0, 0, 5], [0, 0, -1, 6], [0, 1, 0, 7], [0, 0, 0, 1]]  # at 5, 6, 7; looks along +y, z is up
    (tmp_path / "transforms.json").write_text(
        json.dumps({"h": 200, "fl_y": 100, "frames": [{"file_path": "a", "transform_matrix": pose}]})
    )
    view = first_photo_view(tmp_path)
    assert view is not None and view.fov_deg == pytest.approx(90)
    assert view.position == (5, 7, -6) and view.ahead == (0, 0, -1) and view.up == (0, 1, 0)
    (tmp_path / "transforms.json").write_text("{}")
    assert first_photo_view(tmp_path) is None
