"""``f3rm-ext export features`` as a user types it; the files are opened by programs that know nothing of us."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLE = "frame_00001.png"
# After 60 steps few rays are opaque.
LOOSE = ("--accumulation", 0.0)
Typed = Callable[..., Any]


def comments(path: Path) -> dict[str, str]:
    """Comments of a PLY header; long ones go over several lines."""
    header = path.read_bytes().split(b"end_header")[0].decode("ascii")
    lines = [line.removeprefix("comment ") for line in header.splitlines() if line.startswith("comment ")]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def exported(trained: Any, tmp_path_factory: pytest.TempPathFactory, run_command: Callable[..., Any]) -> Path:
    """The PLY file of one call with two queries; in a process of its own."""
    path = tmp_path_factory.mktemp("export") / "room.ply"
    done = run_command(
        *("f3rm-ext", "export", "features", "--load-config", trained.config, "--out", path, "--points", 2000),
        *LOOSE,
        *("--exemplar", f"middle={EXAMPLE}:20,14,16,12", f"the corner={EXAMPLE}:60,44"),
    ).succeeds()
    assert f"2000 points are in {path}" in " ".join(done.stdout.split())
    return path


class TestFiles:
    """One call with two queries, checked from all sides."""

    def test_open3d_sees_what_is_in_the_npz(self, exported: Path, open3d: ModuleType) -> None:
        cloud, ours = open3d.io.read_point_cloud(str(exported)), arrays(exported.with_suffix(".npz"))
        assert len(cloud.points) == 2000 == len(ours["positions"])
        np.testing.assert_allclose(np.asarray(cloud.points), ours["positions"], atol=1e-5)
        np.testing.assert_array_equal(np.rint(np.asarray(cloud.colors) * 255), ours["colors"])
        np.testing.assert_allclose(np.linalg.norm(np.asarray(cloud.normals), axis=1), 1, atol=1e-3)
        np.testing.assert_allclose(np.asarray(cloud.normals), ours["normals"], atol=1e-5)

    def test_trimesh_sees_what_is_in_the_npz(self, exported: Path) -> None:
        import trimesh

        cloud, ours = trimesh.load(exported), arrays(exported.with_suffix(".npz"))
        assert isinstance(cloud, trimesh.PointCloud)
        np.testing.assert_allclose(cloud.vertices, ours["positions"], atol=1e-5)
        np.testing.assert_array_equal(np.asarray(cloud.colors)[:, :3], ours["colors"])
        columns = cloud.metadata["_ply_raw"]["vertex"]["data"]
        np.testing.assert_allclose(columns["relevancy_the_corner"], ours["scores"][:, 1], atol=1e-6)
        np.testing.assert_array_equal(columns["label"], ours["labels"])
        pca = np.stack([columns[f"pca_{name}"] for name in ("red", "green", "blue")], axis=1)
        np.testing.assert_array_equal(pca, ours["pca_colors"])

    def test_arrays(self, exported: Path) -> None:
        ours = arrays(exported.with_suffix(".npz"))
        assert ours["features"].shape == (2000, 128) and ours["features"].dtype == np.float16
        assert ours["names"].tolist() == ["middle", "the corner"] and ours["scores"].shape == (2000, 2)
        assert ((ours["scores"] >= 0) & (ours["scores"] <= 1)).all() and ours["scores"].std() > 0
        wanted = np.where(ours["scores"].max(axis=1) >= 0.5, ours["scores"].argmax(axis=1), -1)
        np.testing.assert_array_equal(ours["labels"], wanted)
        assert (ours["density"] >= 0).all() and ours["pca_colors"].std() > 5

    def test_both_files_name_checkpoint_and_queries(self, exported: Path, trained: Any) -> None:
        (checkpoint,) = trained.checkpoints.glob("*.ckpt")
        record = json.loads(str(arrays(exported.with_suffix(".npz"))["provenance"]))
        said = comments(exported)
        assert record["made_by"] == said["made_by"] == "f3rm-ext export features"
        assert record["checkpoint"] == str(checkpoint.resolve()) and said["step"] == "59" == str(record["step"])
        assert said["checkpoint"][:60] == record["checkpoint"][:60]
        assert record["extractor"] == said["extractor"] == "dense-daisy" and record["frame"] == "capture"
        sources = [query["positives"] for query in record["queries"]]
        assert [found[0] for found in sources] == [f"{EXAMPLE}:20,14,16,12", f"{EXAMPLE}:60,44"]
        assert "middle" in said["queries"]


def export(f3rm_ext: Typed, config: Path, out: Path, *more: object) -> dict[str, np.ndarray]:
    f3rm_ext(
        *("export", "features", "--load-config", config, "--out", out, "--points", 1500, *LOOSE, *more),
    ).succeeds()
    return arrays(out.with_suffix(".npz"))


def test_crop_box(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    everything = export(f3rm_ext, untrained.config, tmp_path / "all.ply")["positions"]
    low, high = np.quantile(everything, 0.2, axis=0), np.quantile(everything, 0.8, axis=0)
    inside = export(
        f3rm_ext, untrained.config, tmp_path / "crop.ply", "--crop-min", *low, "--crop-max", *high, "--points", 300
    )["positions"]
    assert 0 < len(inside) <= 300
    assert (inside >= low - 1e-4).all() and (inside <= high + 1e-4).all()
    half = export(f3rm_ext, untrained.config, tmp_path / "half.ply", "--crop-min", low[0], -1e6, -1e6)["positions"]
    assert (half[:, 0] >= low[0] - 1e-4).all() and (half[:, 1] < low[1]).any()


def test_voxels(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    everything = export(f3rm_ext, untrained.config, tmp_path / "all.ply")["positions"]
    side = 0.25 * float(np.ptp(everything, axis=0).max())
    few = export(f3rm_ext, untrained.config, tmp_path / "few.ply", "--voxel", side, "--frame", "scene")["positions"]
    cubes = np.floor(few.astype(np.float64) / side)
    assert 0 < len(few) < 500 and len(np.unique(cubes, axis=0)) == len(few)


def test_selection(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    everything = export(f3rm_ext, untrained.config, tmp_path / "all.ply", "--text", "table", "floor")["scores"]
    threshold = float(np.quantile(everything.max(axis=1), 0.7))
    some = export(
        f3rm_ext,
        untrained.config,
        tmp_path / "some.ply",
        *("--text", "table", "floor", "--select", "--threshold", f"{threshold:.5f}"),
    )["scores"]
    assert len(some) and some.max(axis=1).min() >= threshold - 1e-4


@pytest.mark.parametrize(("space", "dim"), [("distilled", 8), ("full", 29), ("none", None)])
def test_spaces(make_run: Callable, tiny_capture: Path, f3rm_ext: Typed, tmp_path: Path, space: str, dim: int) -> None:
    config = make_run((f"labels:data={tiny_capture}",), codes=8)
    ours = export(f3rm_ext, config, tmp_path / "room.ply", "--space", space, "--points", 50)
    assert ("features" in ours) == (dim is not None) and ("code_basis" in ours) == (space == "distilled")
    if dim is not None:
        assert ours["features"].shape == (len(ours["positions"]), dim)


def test_our_own_files_are_replaced(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    out = tmp_path / "room.ply"
    assert len(export(f3rm_ext, untrained.config, out)["positions"]) > 40
    assert len(export(f3rm_ext, untrained.config, out, "--points", 40)["positions"]) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["room.npz", "room.ply"]


class TestRefusals:
    """One sentence, exit code 2, and the files of before are there unchanged."""

    @pytest.fixture
    def out(self, untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> Path:
        path = tmp_path / "before" / "room.ply"
        export(f3rm_ext, untrained.config, path, "--points", 20)
        return path

    def test_wrong_options_and_runs_that_cannot_be_asked(
        self,
        untrained: Any,
        no_features: Path,
        weightless: tuple[Path, Path],
        f3rm_ext: Typed,
        remember: Callable,
        out: Path,
    ) -> None:
        before, ours = remember(out.parent), untrained.config
        for config, arguments, word in (
            (ours, ("--exemplar", f"{EXAMPLE}:70,10"), "outside the image"),
            (ours, ("--feature", "clip"), "no feature 'clip'"),
            (ours, ("--select",), "there is no query"),
            (ours, ("--accumulation", "1.5"), "--accumulation is 1.5"),
            (ours, ("--density", "-1"), "--density is -1.0"),
            (ours, ("--crop-min", "0", "0", "0", "--crop-max", "1", "0", "1"), "crop box is empty"),
            (ours, ("--crop-min", "90", "90", "90", "--crop-max", "91", "91", "91"), "0 in the crop box"),
            (no_features, (), "no distilled features"),
            (weightless[0], ("--text", "mug"), str(weightless[1])),
            (ours, ("--out", out.with_suffix(".obj")), ".ply"),
        ):
            typed = ("export", "features", "--load-config", config, "--out", out, "--points", 300)
            said = f3rm_ext(*typed, *arguments).refuses()
            assert word in said, said
        assert before.is_as_it_was()
