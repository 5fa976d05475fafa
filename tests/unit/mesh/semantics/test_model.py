"""A mesh answers queries as a field does."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import trimesh
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox

from f3rm_ext.mesh.semantics import code_map as code_maps
from f3rm_ext.mesh.semantics.code_map import CodeMap, subdivide_to_texels
from f3rm_ext.mesh.semantics.cutting import cut_at_level
from f3rm_ext.mesh.semantics.model import QueryableMesh
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import HasGroups, Queryable, score_image, score_points
from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads

pytestmark = pytest.mark.usefixtures("open3d")


def direction(*values: float) -> Embeddings:
    return Embeddings.from_full(torch.tensor([values]), ("here",))


EAST = Query("east", "", direction(0.0, 1.0, 0.0), direction(1.0, 0.0, 0.0))
EAST_BOX = OrientedBox(R=torch.eye(3), T=torch.tensor([0.5, 0.0, 0.0]), S=torch.tensor([0.9, 9.0, 1.0]))


@pytest.fixture
def heads(halves: torch.Tensor, make_spec: Callable) -> LiftedHeads:
    heads = LiftedHeads()
    heads.add(LiftedHead(make_spec("side", 3), halves))
    return heads


@pytest.fixture
def model(floor: trimesh.Trimesh, heads: LiftedHeads) -> QueryableMesh:
    return QueryableMesh(floor, heads, {})


def from_above(height: float = 3.0) -> Cameras:
    """Sees x and y from -1.5 to 1.5."""
    pose = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, height]])
    return Cameras(pose[None], fx=60.0, fy=60.0, cx=30.0, cy=30.0, width=60, height=60)


def test_pictures(model: QueryableMesh) -> None:
    assert isinstance(model, Queryable)
    scores, outputs = score_image(model, from_above(), [EAST])
    score = scores[..., 0]
    assert score.shape == (60, 60) and (score[20:40, 12:26] < 0.01).all() and (score[20:40, 35:48] > 0.99).all()
    opaque = outputs["accumulation"][..., 0] > 0
    assert opaque[12:48, 12:48].all() and not opaque[:8].any()
    # What is no surface is not found, although a feature of 0 is as similar to both.
    assert (score[~opaque] == 0).all()
    middle = outputs["depth"][30, 30, 0]
    assert float(middle) == pytest.approx(3.0, abs=0.01) and (outputs["rgb"][~opaque] == 1).all()
    np.testing.assert_allclose(outputs["rgb"][30, 30] * 255, [200, 100, 50], atol=0.5)


def test_points_take_the_nearest_place(model: QueryableMesh) -> None:
    points = torch.tensor([[0.5, 0.3, 0.02], [-0.5, 0.3, -0.02], [0.5, 0.3, 0.2], [0.5, 9.0, 0.0]])
    scores = score_points(model, points, [EAST])[:, 0]
    # Those that are not on the mesh are not found, although a feature of 0 is as similar to both.
    assert scores[:2].round().tolist() == [1, 0] and scores[2:].isnan().all()
    np.testing.assert_array_equal(model.score_vertices([EAST])[:, 0].round(), model.mesh.vertices[:, 0] >= 0)


def test_a_box_crops(model: QueryableMesh) -> None:
    outputs = model.render_camera(from_above(), {}, EAST_BOX)
    opaque = outputs["accumulation"][..., 0] > 0
    assert not opaque[:, :30].any() and opaque[20:40, 34:46].all()


def test_pixels_show_groups(floor: trimesh.Trimesh, halves: torch.Tensor, make_spec: Callable) -> None:
    heads, east = LiftedHeads(), torch.from_numpy(np.asarray(floor.vertices)[:, 0] >= 0)
    heads.add(LiftedHead(make_spec("side", 3), halves, east.int()))
    heads.add(LiftedHead(make_spec("plain", 3), halves))
    model = QueryableMesh(floor, heads, {})
    points = model.grouped_points("side")
    assert isinstance(model, HasGroups) and model.grouped_points("plain") is None and points is not None
    assert torch.equal(points.groups, east.int()) and points.positions.shape == (len(floor.vertices), 3)
    shown = model.group_map(from_above(), "side")
    # The edge lies between the vertices at -0.2 and 0.
    assert (shown[:8] == -1).all() and (shown[12:48, 12:27] == 0).all() and (shown[12:48, 29:48] == 1).all()
    cropped = model.group_map(from_above(), "side", EAST_BOX)
    assert (cropped[:, :30] == -1).all() and (cropped[20:40, 34:46] == 1).all()


def test_texels_are_finer_than_vertices(two_triangles: trimesh.Trimesh, make_spec: Callable) -> None:
    heads = LiftedHeads()
    heads.add(LiftedHead(make_spec("side", 3), torch.full((4, 3), 0.5).half()))
    texels = np.repeat((np.arange(32) >= 16).astype(np.uint16)[None], 32, axis=0)
    texels[:, 20] = 65535
    model = QueryableMesh(two_triangles, heads, {"side": CodeMap(np.eye(2, 3, dtype=np.float16), texels)})
    points = torch.tensor([[-0.1, 0.3, 0], [0.1, 0.3, 0], [20.5 / 16 - 1, 0.3, 0]]).float()
    # Where a texel has none, vertices say what they can.
    assert score_points(model, points, [EAST])[:, 0].tolist() == pytest.approx([0, 1, 0.5], abs=1e-3)


def test_parts_are_cut_along_texels(two_triangles: trimesh.Trimesh, make_spec: Callable) -> None:
    heads = LiftedHeads()
    heads.add(LiftedHead(make_spec("side", 3), torch.full((4, 3), 0.5).half()))
    texels = np.repeat((np.arange(64) >= 40).astype(np.uint16)[None], 64, axis=0)
    mapped = QueryableMesh(two_triangles, heads, {"side": CodeMap(np.eye(2, 3, dtype=np.float16), texels)})
    mesh, scores = mapped.score(EAST)
    assert len(mesh.faces) == 2 * 4**5 and mesh.is_watertight == two_triangles.is_watertight
    assert mesh.area == pytest.approx(two_triangles.area)
    part = cut_at_level(mesh, scores, 0.5)
    # The border is at x = 2 · 40 / 64 - 1; edges are two texels long.
    assert part.bounds[0, 0] == pytest.approx(0.25, abs=2 * 2 / 64) and part.bounds[1, 0] == pytest.approx(1.0)
    np.testing.assert_allclose(part.visual.uv, part.vertices[:, :2] / 2 + 0.5, atol=1e-9)  # type: ignore[union-attr]
    bare, same = QueryableMesh(two_triangles, heads, {}).score(EAST)
    assert bare is two_triangles and same.tolist() == pytest.approx([0.5] * 4, abs=1e-3)


def test_division_ends(two_triangles: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_maps, "MOST_FACES", 40)
    texels = np.zeros((64, 64), np.uint16)
    texels[:, :32] = 65535
    code_map = CodeMap(np.eye(2, 3, dtype=np.float16), texels)
    mesh, scores = subdivide_to_texels(two_triangles, np.full(4, 0.2), code_map, np.array([0.7, 0.9]))
    assert len(mesh.faces) == 32
    np.testing.assert_allclose(scores, np.where(mesh.vertices[:, 0] < 0, 0.2, 0.7))


def test_a_bare_mesh_is_shaded(floor: trimesh.Trimesh, heads: LiftedHeads) -> None:
    model = QueryableMesh(trimesh.Trimesh(floor.vertices, floor.faces, process=False), heads, {})
    rgb = model.render_camera(from_above(), {})["rgb"]
    assert 0.7 < float(rgb[30, 30, 0]) < 0.95
    assert model.vertex_colors().shape == (121, 3)
