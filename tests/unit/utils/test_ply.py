"""PLY files, read by programs that others wrote."""

import io
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from f3rm_ext.utils.ply import LONGEST_COMMENT, PlyTables, property_name, write_ply


def columns(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {name: random.normal(size=count).astype(np.float32) for name in ("x", "y", "z")}
    normals = random.normal(size=(3, count)).astype(np.float32)
    normals /= np.linalg.norm(normals, axis=0)
    made |= dict(zip(("nx", "ny", "nz"), normals, strict=True))
    made |= {name: random.integers(0, 256, count).astype(np.uint8) for name in ("red", "green", "blue")}
    made |= {
        "relevancy_mug": random.random(count).astype(np.float32),
        "label": np.arange(-1, count - 1, dtype=np.int32),
    }
    return made


@pytest.fixture(params=[3, 70_000], ids=["few", "more than a chunk"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    made = columns(request.param)
    with open(tmp_path / "cloud.ply", "wb") as stream:
        write_ply(stream, made, ["made_by: a test", "x" * 5000, "two\nlines and ü"])
    return tmp_path / "cloud.ply", made


def test_open3d_reads_points_normals_and_colors(
    written: tuple[Path, dict[str, np.ndarray]], open3d: ModuleType
) -> None:
    path, made = written
    cloud = open3d.io.read_point_cloud(str(path))
    np.testing.assert_allclose(np.asarray(cloud.points).T, [made[name] for name in "xyz"], atol=1e-7)
    np.testing.assert_allclose(np.asarray(cloud.normals).T, [made[name] for name in ("nx", "ny", "nz")], atol=1e-7)
    rgb = np.asarray([made[name] for name in ("red", "green", "blue")]) / 255
    np.testing.assert_allclose(np.asarray(cloud.colors).T, rgb, atol=1e-6)


def test_open3d_reads_all_other_properties(written: tuple[Path, dict[str, np.ndarray]], open3d: ModuleType) -> None:
    path, made = written
    cloud = open3d.t.io.read_point_cloud(str(path))
    for name in ("relevancy_mug", "label"):
        np.testing.assert_array_equal(cloud.point[name].numpy()[:, 0], made[name])


def test_trimesh_reads_it(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    import trimesh

    path, made = written
    cloud = trimesh.load(path)
    np.testing.assert_allclose(cloud.vertices.T, [made[name] for name in "xyz"], atol=1e-7)  # type: ignore[union-attr]
    colors = np.asarray(cloud.colors)[:, :3]  # type: ignore[union-attr]
    np.testing.assert_array_equal(colors.T, [made[name] for name in ("red", "green", "blue")])


def test_comments_are_read_again(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    comments = PlyTables.open(written[0]).comments
    assert comments[0] == "made_by: a test"
    assert "".join(comments[1:-1]) == "x" * 5000 and max(map(len, comments)) == LONGEST_COMMENT
    assert comments[-1] == "two lines and \\xfc"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)},
        {"x": np.zeros((2, 1), np.float32)},
        {"x": np.zeros(2, np.float16)},
        {"blue mug": np.zeros(2, np.float32)},
        {"x\nend_header": np.zeros(2, np.float32)},
    ],
    ids=["none", "lengths", "axes", "kind", "space", "line break"],
)
def test_what_a_ply_file_cannot_hold(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError):
        write_ply(io.BytesIO(), wrong)


@pytest.mark.parametrize(
    ("text", "name"), [("blue mug", "relevancy_blue_mug"), ("a-b/c", "relevancy_a_b_c"), ("чашка", "relevancy")]
)
def test_property_names(text: str, name: str) -> None:
    assert property_name(text, "relevancy") == name
