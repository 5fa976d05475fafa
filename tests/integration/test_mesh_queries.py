"""Features on the true mesh of the tiny room: lifted, queried, measured and cut out, as a user types it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from scipy.spatial import KDTree
from trimesh.sample import sample_surface

from f3rm_ext.mesh.cleaning import clean, simplify
from f3rm_ext.mesh.mesh_files import read_mesh, read_provenance, vertex_colors, write_mesh
from f3rm_ext.mesh.texture.rendering import get_texture

Typed = Callable[..., Any]
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("open3d")]


@pytest.fixture(scope="module")
def room(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The true surface with fewer triangles."""
    truth = read_mesh(tiny_capture / "gt_mesh.npz")
    truth.merge_vertices()
    path = tmp_path_factory.mktemp("mesh") / "room.ply"
    write_mesh(path, simplify(clean(truth), 20_000), {"made_by": "f3rm-ext export mesh", "frame": "capture"})
    return path


def lift(f3rm_ext: Typed, mesh: Path, capture: Path, *options: object) -> Any:
    labels = ("--extractors", f"labels:data={capture}")
    return f3rm_ext("features", "lift-mesh", "--mesh", mesh, "--data", capture, *labels, *options)


def test_from_photos_to_a_part(f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path) -> None:
    done = lift(f3rm_ext, room, tiny_capture).succeeds()
    assert "labels: 29 dimensions on" in done.stdout and "nearest ones along the surface" in done.stdout

    done = f3rm_ext("query", "--mesh", room, "--text", "stool", "rug", "--out", tmp_path / "found").succeeds()
    heat = read_mesh(tmp_path / "found" / "heat" / "stool.ply")
    assert len(heat.vertices) == len(read_mesh(room).vertices) and vertex_colors(heat) is not None
    np.testing.assert_allclose(heat.bounds, read_mesh(room).bounds, atol=1e-4)
    best = json.loads((tmp_path / "found" / "summary.json").read_text())["best"]["stool"]

    done = f3rm_ext(
        "query", "--mesh", room, "--list", "--text", "stool", "rug", "--out", tmp_path / "groups"
    ).succeeds()
    groups = json.loads((tmp_path / "groups" / "summary.json").read_text())["groups"]
    assert any(group["names"][0][0] == "stool" and group["names"][0][1] > 0.8 for group in groups)
    colored = read_mesh(tmp_path / "groups" / "groups.ply")
    assert len(np.unique(vertex_colors(colored), axis=0)) > 3 and (tmp_path / "groups" / "groups.png").is_file()

    done = f3rm_ext("eval", "query", "--mesh", room, "--out", tmp_path / "query.json").succeeds()
    found = json.loads((tmp_path / "query.json").read_text())
    assert found["mesh"] == str(room.resolve()) and found["protocols"]["direct-3d"]["miou"] > 0.6
    assert found["protocols"]["direct-3d"]["localisation"] > 0.85

    out = tmp_path / "stool.ply"
    done = f3rm_ext("export", "part", "--mesh", room, "--text", "stool", "--out", out).succeeds()
    part, said = read_mesh(out), read_provenance(out)
    assert said["made_by"] == "f3rm-ext export part" and said["frame"] == "capture" and "stool" in said["query"]
    low, high = part.bounds
    assert (low - 0.02 < best["best_at_capture"]).all() and (best["best_at_capture"] < high + 0.02).all()
    true = read_mesh(tiny_capture / "gt_mesh.npz")
    names = json.loads((tiny_capture / "transforms.json").read_text())["classes"]
    with np.load(tiny_capture / "gt_mesh.npz") as archive:
        stool = np.asarray(true.vertices)[archive["vertex_label"] == names.index("stool")]
    points = sample_surface(part, 5000, seed=0)[0]
    assert (KDTree(points).query(stool)[0] < 0.05).mean() > 0.95, "the stool is in the part"
    assert (KDTree(stool).query(points)[0] < 0.05).mean() > 0.8, "a few spots of the floor are, too"

    # The same command again replaces its own file.
    f3rm_ext("export", "part", "--mesh", room, "--text", "stool", "--out", out, "--close-holes", 1).succeeds()
    assert read_mesh(out).area > part.area

    cloud = tmp_path / "cloud.ply"
    done = f3rm_ext("export", "features", "--mesh", room, "--out", cloud, "--text", "rug", "--select", "--points", 500)
    assert done.code == 0 and cloud.exists(), done.stderr


def test_texture_stays_and_texels_carry_features(
    f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    glb = tmp_path / "room.glb"
    coarse = tmp_path / "coarse.ply"
    write_mesh(coarse, simplify(read_mesh(room), 4000), {"made_by": "f3rm-ext export mesh", "frame": "capture"})
    texture = ("export", "texture", "--data", tiny_capture, "--mesh", coarse, "--out", glb)
    f3rm_ext(*texture, "--texture-size", 512, "--padding", 1).succeeds()
    done = lift(f3rm_ext, glb, tiny_capture, "--code-map").succeeds()
    assert "codes on texels" in done.stdout
    example = ("--exemplar", f"here={sorted((tiny_capture / 'images').iterdir())[1]}:20,20,24,20")
    (tmp_path / "part.png").write_text("mine")
    refused = f3rm_ext("export", "part", "--mesh", glb, *example, "--out", tmp_path / "part.obj").refuses()
    assert "part.png" in refused and (tmp_path / "part.png").read_text() == "mine"
    (tmp_path / "part.png").unlink()
    for name in ("part.glb", "part.obj", "part.ply"):
        done = f3rm_ext("export", "part", "--mesh", glb, *example, "--out", tmp_path / name).succeeds()
        part = read_mesh(tmp_path / name)
        assert (vertex_colors(part) is not None) if name == "part.ply" else (get_texture(part) is not None)
    by_example = ("--by", "example", "--exemplars", 1)
    done = f3rm_ext("eval", "query", "--mesh", glb, *by_example, "--out", tmp_path / "query.json").succeeds()


def test_mistakes(f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path) -> None:
    points = tmp_path / "points.ply"
    trimesh.PointCloud(np.random.default_rng(0).random((50, 3))).export(points)
    lift(f3rm_ext, room, tiny_capture).succeeds()
    scene = tmp_path / "scene.ply"
    turned = {"frame": "scene", "scene_from_capture": np.eye(4)[:3].tolist(), "scene_units_per_capture_unit": 7.0}
    write_mesh(scene, read_mesh(room), {"made_by": "f3rm-ext export mesh", **turned})
    before = sorted(path.name for path in tmp_path.iterdir())
    out = ("--out", tmp_path / "out.ply")
    part, query = ("export", "part", *out), ("query", "--out", tmp_path / "found", "--text", "stool")
    for arguments, says in (
        (query, "either --load-config or --mesh"),
        ((*query, "--load-config", "c.yml", "--mesh", room), "either --load-config or --mesh"),
        ((*query, "--load-config", "c.yml", "--data", tiny_capture), "--data only works with --mesh"),
        (("eval", "query"), "either --load-config or --mesh"),
        ((*part, "--mesh", points, "--text", "stool"), "no faces"),
        ((*part, "--mesh", room, "--text", "stool", "rug"), "one query"),
        ((*part, "--mesh", room, "--text", "stool", "--threshold", 1), "--threshold"),
        ((*part, "--mesh", room, "--text", "stool", "--min-part", 2), "--min-part is 2.0"),
        (("export", "part", "--mesh", room, "--text", "stool", "--out", room), "--out is the mesh itself"),
        ((*part, "--mesh", room, "--text", "stool", "--feature", "clip"), "no feature 'clip'"),
        (("features", "lift-mesh", "--mesh", room, "--data", tiny_capture), "No extractor is given"),
        (("features", "lift-mesh", "--mesh", room, "--extractors", "dinov2"), "either --load-config or --data"),
    ):
        assert says in f3rm_ext(*arguments).refuses(), arguments
    assert "scene frame of another capture" in lift(f3rm_ext, scene, tiny_capture).refuses()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
