"""Features of texels as entries of a dictionary."""

from typing import Any

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.semantics import code_map
from f3rm_ext.mesh.semantics.code_map import CodeMap, lift_code_map, make_dictionary

pytestmark = pytest.mark.usefixtures("open3d")


def test_texels_of_two_triangles_tell_halves_apart(two_triangles: trimesh.Trimesh, pictures: Any) -> None:
    stages = set()
    found = lift_code_map(
        two_triangles, pictures.photos, pictures.load, 2, lambda stage, done, total: stages.add(stage)
    )
    assert found.texels.shape == (64, 64) and stages == {"Dictionary", "Code map"}
    codes = found.dictionary[found.texels.astype(int)].astype(float)
    np.testing.assert_allclose(codes[:, :30], [[[1, 0]] * 30] * 64, atol=0.02)
    np.testing.assert_allclose(codes[:, 34:], [[[0, 1]] * 30] * 64, atol=0.02)


def test_look_up() -> None:
    found = CodeMap(np.eye(3, dtype=np.float16), np.array([[0, 1], [2, 65535]], np.uint16))
    uv = np.array([[0.1, 0.9], [0.9, 0.9], [0.1, 0.1], [0.9, 0.1], [0.0, 1.0], [1.0, 1.0]])
    assert found.look_up(uv).tolist() == [0, 1, 2, -1, 0, 1]


def test_dictionary_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_map, "DICTIONARY", 4)
    rng = np.random.default_rng(0)
    centres = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32)
    codes = (centres[rng.integers(4, size=400)] + 0.01 * rng.normal(size=(400, 3))).astype(np.float32)
    found = make_dictionary(codes)
    assert found.shape == (4, 3) and found.dtype == np.float32
    assert make_dictionary(np.repeat(centres, 5, axis=0)).tolist() == sorted(centres.tolist())


def test_a_mesh_without_texture_is_refused(floor: trimesh.Trimesh, pictures: Any) -> None:
    bare = trimesh.Trimesh(floor.vertices, floor.faces, process=False)
    with pytest.raises(MeshError, match="texture"):
        lift_code_map(bare, pictures.photos, pictures.load, 2)
