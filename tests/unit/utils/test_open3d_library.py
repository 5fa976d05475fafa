"""Rays at a box whose hits are known, and what is said where Open3D cannot be imported."""

import sys
from pathlib import Path

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.open3d_library import RayCaster, open3d


@pytest.mark.usefixtures("open3d")
def test_rays_at_a_box() -> None:
    box = trimesh.creation.box((2.0, 2.0, 2.0))
    caster = RayCaster(box.vertices, box.faces)
    directions = np.array([[0.0, 0.0, -2.0], [0.0, 0.0, 2.0]])
    hit = caster.cast(np.array([0.3, 0.2, 5.0]), directions)
    np.testing.assert_allclose(hit["t_hit"], [2, np.inf])
    face, (u, v) = box.triangles[hit["primitive_ids"][0]], hit["primitive_uvs"][0]
    np.testing.assert_allclose(np.array([1 - u - v, u, v]) @ face, [0.3, 0.2, 1.0], atol=1e-6)
    np.testing.assert_allclose(hit["primitive_normals"][0], [0, 0, 1], atol=1e-6)
    for near, far, blocked in ((0.0, 1.0, False), (0.0, 2.1, True), (2.1, 2.9, False), (2.1, 3.1, True)):
        assert caster.occluded(np.array([0.3, 0.2, 5.0]), directions, near, far).tolist() == [blocked, False]
    faces, weights, away = caster.nearest(np.array([[0.3, 0.2, 1.5], [0.0, 0.1, -4.0]]))
    np.testing.assert_allclose(away, [0.5, 3.0], atol=1e-6)
    corners = np.column_stack([1 - weights.sum(axis=1), weights])
    places = np.einsum("nc,ncd->nd", corners, box.triangles[faces])
    np.testing.assert_allclose(places, [[0.3, 0.2, 1.0], [0.0, 0.1, -1.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        ("ImportError('libEGL.so.1: cannot open shared object file')", "libEGL.so.1.*apt install .*libegl1"),
        ("ImportError('libusb-1.0.so.0: cannot open shared object file')", "pip install .*libusb-package"),
        ("ModuleNotFoundError('No module named open3d')", "pip install open3d"),
    ],
)
def test_the_remedy_is_for_what_is_missing(
    failure: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "open3d.py").write_text(f"raise {failure}")
    monkeypatch.delitem(sys.modules, "open3d", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=remedy):
        open3d()
