"""Files of meshes, opened by other readers and by ours."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import trimesh
from trimesh.exchange.gltf import export_glb, export_gltf

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.mesh_files import (
    SUFFIXES,
    SurfacePoints,
    read_mesh,
    read_provenance,
    read_surface,
    require_replaceable,
    vertex_colors,
    write_mesh,
)
from f3rm_ext.utils.ply import write_ply

OURS = {"made_by": "f3rm-ext export mesh", "frame": "capture", "note": "naïve"}


@pytest.fixture
def box() -> trimesh.Trimesh:
    made = trimesh.creation.box((1, 2, 3))
    colors = np.random.default_rng(0).integers(0, 256, (len(made.vertices), 3), dtype=np.uint8)
    return trimesh.Trimesh(made.vertices, made.faces, vertex_colors=colors, process=False)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("up", ["z", "y"])
def test_written_and_read(box: trimesh.Trimesh, tmp_path: Path, suffix: str, up: Any) -> None:
    path = tmp_path / f"box{suffix}"
    write_mesh(path, box, OURS, up)
    back = read_mesh(path)
    np.testing.assert_allclose(back.vertices[back.faces], box.vertices[box.faces], atol=1e-6)
    theirs, ours = vertex_colors(back), vertex_colors(box)
    np.testing.assert_allclose(theirs[back.faces].astype(int), ours[box.faces], atol=1)
    said = read_provenance(path)
    assert said["made_by"] == OURS["made_by"] and said["up"] == up
    raw = trimesh.load(path, process=False, force="mesh")
    tall = {"z": [1, 2, 3], "y": [1, 3, 2]}[up]
    np.testing.assert_allclose(raw.extents, tall, atol=1e-6)
    assert not list(tmp_path.glob("*.tmp"))


def test_glb_has_linear_colours_of_vertices(tmp_path: Path) -> None:
    """glTF 2.0, 3.7.2.1: COLOR_0 is linear. All 256 values of sRGB survive, dark ones too."""
    levels = np.arange(256, dtype=np.uint8)
    strip = np.stack([np.arange(256.0) // 2, np.arange(256.0) % 2, np.zeros(256)], axis=1)
    faces = np.arange(254)[:, None] + np.arange(3)
    greys = np.column_stack([levels, levels, levels])
    path, box = tmp_path / "a.glb", trimesh.Trimesh(strip, faces, vertex_colors=greys, process=False)
    write_mesh(path, box, OURS)
    raw, back = vertex_colors(trimesh.load_mesh(path, process=False)), vertex_colors(read_mesh(path))
    shares = levels / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    np.testing.assert_allclose(raw[:, 0], 255 * linear, atol=1)
    np.testing.assert_array_equal(back, greys)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_without_colours_a_file_has_none(tmp_path: Path, suffix: str) -> None:
    write_mesh(tmp_path / f"box{suffix}", trimesh.creation.box(), OURS)
    assert vertex_colors(read_mesh(tmp_path / f"box{suffix}")) is None


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, 4), (np.uint16, 4), (np.float32, 3), (np.float32, 4)])
def test_colours_of_other_programs_become_srgb(tmp_path: Path, dtype: Any, channels: int) -> None:
    """Two parts, of which one is moved, as trimesh writes attributes of one's own."""
    scene, top = trimesh.Scene(), 1 if dtype == np.float32 else np.iinfo(dtype).max
    for place, linear in ((0.0, 0.2140), (9.0, 0.0122)):  # sRGB 127 to 128, 29
        part = trimesh.creation.box()
        row = np.array([linear, linear, linear, 1.0])[:channels] * top
        part.vertex_attributes["_COLOR_0"] = np.tile(row.astype(dtype), (len(part.vertices), 1))
        scene.add_geometry(part, transform=trimesh.transformations.translation_matrix([place, 0, 0]))

    def rename(tree: dict[str, Any]) -> None:
        for mesh in tree["meshes"]:
            attributes = mesh["primitives"][0]["attributes"]
            attributes["COLOR_0"] = attributes.pop("_COLOR_0")

    path = tmp_path / "other.glb"
    path.write_bytes(export_glb(scene, tree_postprocessor=rename))
    mesh = read_mesh(path)
    far = mesh.vertices[:, 0] > 5
    colors = vertex_colors(mesh)
    assert colors is not None and far.sum() == 8
    np.testing.assert_allclose(colors[~far].astype(int), 127, atol=1)
    np.testing.assert_allclose(colors[far].astype(int), 29, atol=3)


@pytest.mark.parametrize(("generator", "up"), [("Khronos glTF Blender I/O v4.2", 1), (None, 1), ("trimesh", 2)])
def test_gltf_of_another_program_has_y_up(generator: str | None, up: int, tmp_path: Path) -> None:
    """As glTF demands, and as our own files come back from an editor; trimesh writes coordinates as they are."""
    box = trimesh.creation.box(extents=[1, 2, 3])
    box.apply_translation([0, 0, 1.5])  # trimesh's axes: y is up in the first two files
    asset = {"version": "2.0"} if generator is None else {"version": "2.0", "generator": generator}
    (tmp_path / "a.glb").write_bytes(export_glb(box, tree_postprocessor=lambda tree: tree.update(asset=asset)))
    for name, data in export_gltf(box.scene(), tree_postprocessor=lambda tree: tree.update(asset=asset)).items():
        (tmp_path / name).write_bytes(data)
    expected = box.vertices if up == 2 else box.vertices[:, [0, 2, 1]] * [1, -1, 1]
    for file in ("a.glb", "model.gltf"):
        np.testing.assert_allclose(read_mesh(tmp_path / file).vertices, expected, atol=1e-6)


def test_glb_keeps_its_place_when_an_editor_drops_the_record(box: trimesh.Trimesh, tmp_path: Path) -> None:
    path = tmp_path / "a.glb"
    write_mesh(path, box, OURS, "y")
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    tree = json.loads(data[20 : 20 + length])
    tree["asset"] = {"version": "2.0", "generator": "Khronos glTF Blender I/O v4.2"}
    path.write_bytes(data[:20] + json.dumps(tree, separators=(",", ":")).encode().ljust(length) + data[20 + length :])
    np.testing.assert_allclose(read_mesh(path).vertices, box.vertices, atol=1e-6)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_open3d_reads_it(box: trimesh.Trimesh, tmp_path: Path, suffix: str, open3d: ModuleType) -> None:
    write_mesh(tmp_path / f"box{suffix}", box, OURS)
    found = open3d.io.read_triangle_mesh(str(tmp_path / f"box{suffix}"))
    assert len(found.triangles) == len(box.faces) and found.has_vertex_colors()
    np.testing.assert_allclose(found.get_surface_area(), box.area, rtol=1e-5)


def test_disk_full_keeps_the_old_file(box: trimesh.Trimesh, tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    path = tmp_path / "box.ply"
    write_mesh(path, box, OURS)
    before = path.read_bytes()

    fill_disk()
    with pytest.raises(ConfigError, match="No space left"):
        write_mesh(path, box.subdivide(), OURS)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["box.ply"]


def test_only_our_files_are_replaced(box: trimesh.Trimesh, tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        write_mesh(tmp_path / f"ours{suffix}", box, OURS)
        require_replaceable(tmp_path / f"ours{suffix}")
        box.export(tmp_path / f"theirs{suffix}")
        with pytest.raises(ConfigError, match=f"theirs{suffix}"):
            require_replaceable(tmp_path / f"theirs{suffix}")
    with pytest.raises(ConfigError, match="--out"):
        require_replaceable(tmp_path)
    with pytest.raises(MeshError, match="written as"):
        write_mesh(tmp_path / "box.stl", box, OURS)


def test_points_with_normals(tmp_path: Path) -> None:
    columns = {name: np.arange(3, dtype=np.float32) for name in ("x", "y", "z")}
    columns |= {"nx": np.zeros(3, np.float32), "ny": np.zeros(3, np.float32), "nz": np.full(3, 2, np.float32)}
    with (tmp_path / "points.ply").open("wb") as stream:
        write_ply(stream, columns)
    bytes_up = np.tile(np.array([0, 0, 127], np.int8), (4, 1))
    np.savez(tmp_path / "points.npz", points=np.ones((4, 3), np.float32), normals=bytes_up)
    for name, count in (("points.ply", 3), ("points.npz", 4)):
        found = read_surface(tmp_path / name)
        assert isinstance(found, SurfacePoints) and len(found) == count and found.normals is not None
        np.testing.assert_allclose(found.normals, np.tile([0.0, 0, 1], (count, 1)))
        with pytest.raises(MeshError, match="no faces"):
            read_mesh(tmp_path / name)
    np.savez(tmp_path / "zero.npz", points=np.ones((4, 3), np.float32), normals=np.zeros((4, 3), np.float32))
    zero = read_surface(tmp_path / "zero.npz")
    assert isinstance(zero, SurfacePoints) and zero.normals is None


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"none\.ply"):
        read_surface(tmp_path / "none.ply")
    (tmp_path / "bad.ply").write_bytes(b"ply\nformat binary_little_endian 1.0\nelement vertex 9\nend_header\n")
    (tmp_path / "bad.glb").write_bytes(b"nothing")
    np.savez(tmp_path / "bad.npz", other=np.zeros(3))
    for name in ("bad.ply", "bad.glb", "bad.npz"):
        with pytest.raises(MeshError):
            read_surface(tmp_path / name)


ONES, CORNERS = np.ones((8, 3)), np.ones((12, 3), int)


@pytest.mark.parametrize(
    ("vertices", "faces", "says"),
    [
        (ONES, CORNERS - 4, "-3"),
        (ONES, CORNERS + 2**62, str(2**62 + 1)),
        (ONES * np.nan, CORNERS, "NaN"),
        (ONES * -1e30, CORNERS, "vertices"),
        (np.ones((8, 2)), CORNERS, "shape"),
        (np.ones(24), CORNERS, "shape"),
        (ONES, np.ones((12, 2), int), "shape"),
        (ONES, np.ones(36, int), "shape"),
        (ONES, CORNERS.astype(float), "float64"),
    ],
)
def test_arrays_that_are_no_mesh(tmp_path: Path, vertices: np.ndarray, faces: np.ndarray, says: str) -> None:
    np.savez(tmp_path / "box.npz", vertices=vertices, faces=faces)
    with pytest.raises(MeshError, match=says):
        read_mesh(tmp_path / "box.npz")


@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_vertices_too_far_out(tmp_path: Path, box: trimesh.Trimesh, suffix: str) -> None:
    box.vertices[0, 0] = 1e30
    box.export(tmp_path / f"box{suffix}")
    with pytest.raises(MeshError, match="vertices"):
        read_mesh(tmp_path / f"box{suffix}")
