"""A COLMAP folder, with no transforms.json, through the commands that take captures; nothing is written into it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.mesh.mesh_files import read_mesh

pytest.importorskip("pycolmap")
pytestmark = pytest.mark.usefixtures("open3d")
Run = Callable[..., Any]
TRAINING = ("--vis", "tensorboard", "--max-num-iterations", 40, "--regularization", "none")
TRAINING = (*TRAINING, "--pipeline.datamanager.num-downscales", 0, "--pipeline.model.densify.max-gaussians", 3000)
TINY_MESH = ("--voxel", 0.15, "--min-views", 1, "--vertices", 700)


@pytest.fixture(scope="module")
def vertices(tiny_capture: Path) -> np.ndarray:
    """Of the true surface, in the frame of the capture."""
    return np.load(tiny_capture / "gt_mesh.npz")["vertices"]


@pytest.fixture(scope="module")
def garden(
    tiny_capture: Path, vertices: np.ndarray, as_colmap: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny room as photos and COLMAP's model, with points on its surface."""
    chosen = np.random.default_rng(0).choice(len(vertices), 1500, replace=False)
    return as_colmap(tiny_capture, tmp_path_factory.mktemp("colmap") / "garden", points=vertices[chosen])


@pytest.fixture(scope="module", params=["plain", "colmap"])
def trained_run(
    request: pytest.FixtureRequest, garden: Path, run_command: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """config.yml of splats of the scene, by this package's dataparser and by nerfstudio's."""
    out = tmp_path_factory.mktemp(request.param)
    more = ("colmap", "--colmap-path", "sparse/0") if request.param == "colmap" else ()
    places = ("--data", garden, "--output-dir", out, "--experiment-name", "e", "--timestamp", "t")
    run_command("ns-train", "sugar-ext-lite", *places, *TRAINING, *more).succeeds()
    return out / "e" / "sugar-ext-lite" / "t" / "config.yml"


def within_room(path: Path, vertices: np.ndarray) -> bool:
    """Whether a mesh lies where the room is, by the middle of its vertices."""
    apart = np.abs(np.median(read_mesh(path).vertices, axis=0) - np.median(vertices, axis=0))
    return bool((apart < 0.4 * np.ptp(vertices, axis=0)).all())


def test_runs_go_through_all_commands(
    trained_run: Path,
    garden: Path,
    vertices: np.ndarray,
    run_command: Run,
    remember: Callable[..., Any],
    tmp_path: Path,
) -> None:
    before = remember(garden)
    mesh, splats, again = tmp_path / "mesh.ply", tmp_path / "splats.ply", tmp_path / "again.ply"
    texture = ("--mesh", mesh, "--texture-size", 256, "--padding", 1)
    truth = ("--truth", mesh, "--seen-from", garden, "--points", 20_000, "--out", tmp_path / "mesh.json")
    for name, *words in (
        ("f3rm-ext", "export", "mesh", "--load-config", trained_run, "--out", mesh, *TINY_MESH),
        ("f3rm-ext", "export", "texture", "--data", garden, *texture, "--out", tmp_path / "a.glb"),
        ("f3rm-ext", "export", "texture", "--load-config", trained_run, *texture, "--out", tmp_path / "b.glb"),
        ("f3rm-ext", "eval", "texture", tmp_path / "a.glb", "--data", garden, "--out", tmp_path / "a.json"),
        ("f3rm-ext", "eval", "mesh", mesh, *truth),
        ("f3rm-ext", "export", "splats", "--load-config", trained_run, "--out", splats),
        ("f3rm-ext", "export", "mesh", "--splats", splats, "--data", garden, "--out", again, *TINY_MESH),
    ):
        done = run_command(name, *words)
        assert done.code == 0, f"{words}: {done.text[-3000:]}"
    assert within_room(mesh, vertices) and within_room(again, vertices)
    assert len(json.loads((tmp_path / "a.json").read_text())["photos"]) == 2  # every 8th of twelve
    assert json.loads((tmp_path / "mesh.json").read_text())["chamfer"] < 0.05
    assert before.is_as_it_was()


@pytest.mark.release
def test_sugar_run(garden: Path, vertices: np.ndarray, run_command: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ("--coarse-method", "sugar-ext-lite", "-r", "none", "--vertices", 700, "--until-stage", "mesh")
    small = (*small, "--mesh.voxel", 0.15, "--mesh.min-views", 1)
    small = (*small, "--coarse.max-num-iterations", 40, "--coarse.pipeline.datamanager.num-downscales", 0)
    done = run_command("f3rm-ext", "sugar", "run", "--data", garden, "--output", out, *small).succeeds()
    assert within_room(out / "mesh.ply", vertices) and (out / "report.html").is_file()
    (garden / "sparse/0/cameras.bin").touch()  # the same content
    done = run_command("f3rm-ext", "sugar", "run", "--data", garden, "--output", out, *small)
    assert done.code == 0 and done.text.count("done before") == 2


def test_dense_points_have_the_scene_and_the_split_of_their_source(
    garden: Path, run_command: Run, tmp_path: Path
) -> None:
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    out = tmp_path / "dense"
    run_command("f3rm-ext", "sfm", "points", garden, "--out", out, "--points", 500, "--side", 64).succeeds()
    for split in ("train", "test"):
        one, two = (CaptureDataParserConfig(data=data).setup().get_dataparser_outputs(split) for data in (garden, out))
        assert [path.name for path in one.image_filenames] == [path.name for path in two.image_filenames]
        np.testing.assert_allclose(one.cameras.camera_to_worlds, two.cameras.camera_to_worlds, atol=1e-6)
