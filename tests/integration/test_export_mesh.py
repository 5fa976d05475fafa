"""``f3rm-ext export mesh`` as a user types it, on splats laid on the true surface of the tiny room."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.mesh.mesh_files import read_mesh, read_provenance
from f3rm_ext.splat.files import SplatInfo, export_splats, read_splats
from f3rm_ext.splat.start_from import read_start

Typed = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("open3d")


@pytest.fixture(scope="module")
def splat_run(room_splats: Path, tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.yml of a run of sugar-ext-lite that has these splats, saved before its first step."""
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    root = tmp_path_factory.mktemp("mesh-run")
    config = make_splat_config("sugar-ext-lite")
    config.data, config.output_dir = tiny_capture, root
    config.experiment_name, config.timestamp = "e", "t"
    config.pipeline.datamanager.data = tiny_capture
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    start = read_start(room_splats).to_scene(pipeline.datamanager.train_dataparser_outputs, "capture")
    pipeline.model.set_gaussians(start.gaussians)
    state = pipeline.state_dict()
    folder = config.get_base_dir() / "nerfstudio_models"
    folder.mkdir(parents=True)
    torch.save({"step": 0, "pipeline": state}, folder / "step-000000000.ckpt")
    config.save_config()
    return config.get_base_dir() / "config.yml"


def off(mesh: Path, tiny_capture: Path) -> np.ndarray:
    """Distances of a mesh's vertices from the true surface, metres."""
    truth = np.load(tiny_capture / "gt_mesh.npz")
    true = trimesh.Trimesh(truth["vertices"], truth["faces"], process=False)
    points = np.asarray(trimesh.sample.sample_surface(true, 200_000, seed=0)[0])
    from scipy.spatial import KDTree

    return KDTree(points).query(read_mesh(mesh).vertices)[0]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("tsdf", ("--voxel", 0.06, "--min-views", 2, "--tolerance", 0.03)),
        ("level-set", ("--points", 20_000, "--poisson-depth", 7, "--min-views", 1)),
        ("poisson-centres", ("--poisson-depth", 7)),
    ],
)
def test_every_method_finds_the_room(
    f3rm_ext: Typed, splat_run: Path, tiny_capture: Path, tmp_path: Path, method: str, more: tuple[object, ...]
) -> None:
    out = tmp_path / "room.ply"
    done = f3rm_ext("export", "mesh", "--load-config", splat_run, "--out", out, "--method", method, *more).succeeds()
    distances = off(out, tiny_capture)
    assert np.median(distances) < 0.06 and len(distances) > 1000
    said = read_provenance(out)
    assert said["made_by"] == "f3rm-ext export mesh" and said["method"] == method and said["frame"] == "capture"
    assert said["up"] == "z" and "scene_units_per_capture_unit" in said and "checkpoint" in said
    assert "vertices and" in done.stdout and "z up" in done.stdout
    columns = trimesh.load(out, process=False).metadata["_ply_raw"]["vertex"]["data"]
    if method == "poisson-centres":  # makes no views
        assert "confidence" not in columns.dtype.names
        return
    sure = columns["confidence"].reshape(-1)
    assert len(sure) == len(distances) and 0 <= sure.min() < 0.2 < 0.4 < sure.max() < 1


@pytest.mark.parametrize(("regularization", "depth"), [("planar", "planes"), ("dn-consistency", "median")])
def test_flat_gaussians_are_fused_at_their_planes(
    f3rm_ext: Typed, splat_run: Path, tmp_path: Path, regularization: str, depth: str
) -> None:
    text = re.sub("regularization: .*", f"regularization: {regularization}", splat_run.read_text())
    copied = tmp_path / "e" / "sugar-ext-lite" / "t"
    shutil.copytree(splat_run.parent, copied)
    (copied / "config.yml").write_text(text.replace(str(splat_run.parents[3]), str(tmp_path)))
    out = tmp_path / "room.ply"
    f3rm_ext("export", "mesh", "--load-config", copied / "config.yml", "--out", out, "--voxel", 0.1).succeeds()
    assert read_provenance(out)["depth"] == depth


def test_a_field_is_fused_and_has_no_gaussians(f3rm_ext: Typed, untrained: Any, tmp_path: Path) -> None:
    options = ("--load-config", untrained.config, "--out", tmp_path / "field.ply")
    assert "this run is a field" in f3rm_ext("export", "mesh", *options, "--method", "level-set").refuses()
    assert "this run is a field" in f3rm_ext("export", "mesh", *options, "--depth", "planes").refuses()
    done = f3rm_ext("export", "mesh", *options, "--min-views", 1, "--voxel", 0.2, "--resolution-scale", 0.5)
    # An untrained field may be empty: then that is said.
    assert done.code == 0 or "No depth is left" in done.refuses()


def test_splats_of_a_file_and_frames(f3rm_ext: Typed, room_splats: Path, tiny_capture: Path, tmp_path: Path) -> None:
    base = ("export", "mesh", "--splats", room_splats, "--data", tiny_capture, "--method", "poisson-centres")
    base = (*base, "--poisson-depth", 6, "--splats-frame", "capture")
    for name, more in (("room.obj", ()), ("scene.ply", ("--frame", "scene")), ("room.glb", ("--vertices", 900))):
        f3rm_ext(*base, "--out", tmp_path / name, *more).succeeds()
    metres, scene, small = (read_mesh(tmp_path / name) for name in ("room.obj", "scene.ply", "room.glb"))
    scale = float(read_provenance(tmp_path / "scene.ply")["scene_units_per_capture_unit"])
    assert np.linalg.norm(scene.extents) == pytest.approx(scale * np.linalg.norm(metres.extents), rel=0.2)
    assert 800 < len(small.vertices) <= 900 < len(metres.vertices)
    np.testing.assert_allclose(small.bounds, metres.bounds, atol=0.3)
    assert read_provenance(tmp_path / "room.glb")["up"] == "y"
    cropped = f3rm_ext(*base, "--out", tmp_path / "room.obj", "--crop-max", 9, 9, 1.0)
    assert cropped.code == 0 and read_mesh(tmp_path / "room.obj").bounds[1, 2] <= 1.0


def test_mistakes(f3rm_ext: Typed, room_splats: Path, tiny_capture: Path, tmp_path: Path) -> None:
    splats = ("--splats", room_splats, "--data", tiny_capture, "--splats-frame", "capture")
    out = ("--out", tmp_path / "room.ply")
    far = tmp_path / "far.ply"
    moved, _ = read_splats(room_splats)
    moved.means += 1000.0
    export_splats(moved, far, SplatInfo(), {"made_by": "a test"})
    for arguments, says in (
        ((*out,), "either --load-config or --splats"),
        (("--splats", room_splats, *out), "add their capture with --data"),
        ((*splats, "--out", tmp_path / "room.stl"), "written as .ply, .obj, .glb"),
        ((*splats, *out, "--vertices", 3), "--vertices is 3"),
        ((*splats, *out, "--min-views", 99), "--min-views is 99, but the capture has"),
        (
            (*splats, *out, "--method", "level-set", "--level", 50, "--min-views", 1, "--points", 500),
            "level 50 nowhere",
        ),
        ((*splats, *out, "--method", "level-set", "--unbounded", True), "--unbounded only works with --method tsdf"),
        ((*splats, *out, "--method", "level-set", "--fill-holes", True), "--fill-holes only works with --method tsdf"),
        ((*splats, *out, "--method", "poisson-centres", "--poisson-depth", 5, "--crop-min", 99, 99, 99), "crop box"),
        (("--splats", far, "--data", tiny_capture, *out), "try --splats-frame capture"),
    ):
        assert says in f3rm_ext("export", "mesh", *arguments).refuses(), arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far.ply"]


@pytest.mark.parametrize("unbounded", [False, True])
def test_eval_mesh_reads_what_export_writes(
    f3rm_ext: Typed, room_splats: Path, tiny_capture: Path, tmp_path: Path, unbounded: bool
) -> None:
    out = tmp_path / "room.glb"
    f3rm_ext(
        *("export", "mesh", "--splats", room_splats, "--data", tiny_capture, "--splats-frame", "capture"),
        *("--out", out, "--voxel", 0.06, "--min-views", 2, "--tolerance", 0.03),
        *("--unbounded", unbounded),
    ).succeeds()
    f3rm_ext(
        *("eval", "mesh", out, "--truth", tiny_capture / "gt_mesh.npz", "--seen-from", tiny_capture),
        *("--thresholds", 0.1, "--points", 50_000, "--out", tmp_path / "scores.json"),
    ).succeeds()
    (score,) = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert score["precision"] > 0.9 and score["recall"] > 0.4
