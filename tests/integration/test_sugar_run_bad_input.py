"""`f3rm-ext sugar run` on splats of other programs, and with what goes wrong on the way; no training."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.mesh.mesh_files import read_mesh
from f3rm_ext.splat.files import SplatInfo, export_splats, read_splats

Typed = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("open3d")
COARSE = ("--mesh-method", "poisson-centres", "--mesh.poisson-depth", 5, "--vertices", 600)
ONLY_MESH = (*COARSE, "--until-stage", "mesh")


@pytest.fixture
def chain(run_command: Typed, tiny_capture: Path) -> Typed:
    """`f3rm-ext sugar run` on the tiny capture with splats of a file."""

    def run(splats: Path, output: Path, *options: object) -> Any:
        words = ("--data", tiny_capture, "--output", output, "--skip-coarse", "True", "--coarse-checkpoint", splats)
        return run_command("f3rm-ext", "sugar", "run", *words, *options)

    return run


@pytest.fixture
def of_others(room_splats: Path, tmp_path: Path) -> dict[str, Path]:
    """The same splats as SuGaR and 3DGS keep them, in the frame of the capture."""
    splats, _ = read_splats(room_splats)
    state = {
        "_points": splats.means,
        "_scales": splats.scales,
        "_quaternions": splats.quats,
        "all_densities": splats.opacities,
        "_sh_coordinates_dc": splats.features_dc[:, None],
        "_sh_coordinates_rest": splats.features_rest,
    }
    torch.save({"state_dict": {name: torch.nn.Parameter(value) for name, value in state.items()}}, tmp_path / "7000.pt")
    folder = tmp_path / "3dgs"
    (folder / "point_cloud/iteration_7000").mkdir(parents=True)
    shutil.copy(room_splats, folder / "point_cloud/iteration_7000/point_cloud.ply")
    (folder / "cameras.json").write_text("[]")
    (folder / "cfg_args").write_text("Namespace()")
    return {"SuGaR": tmp_path / "7000.pt", "3DGS": folder}


def test_checkpoints_of_other_programs_are_in_the_frame_of_the_capture(
    chain: Typed, of_others: dict[str, Path], tiny_capture: Path, tmp_path: Path
) -> None:
    truth = np.load(tiny_capture / "gt_mesh.npz")["vertices"]
    made = []
    for name, splats in of_others.items():
        done = chain(splats, tmp_path / name, *ONLY_MESH).succeeds()
        made.append(read_mesh(tmp_path / name / "mesh.ply"))
        np.testing.assert_allclose(made[-1].bounds, [truth.min(axis=0), truth.max(axis=0)], atol=0.4, err_msg=name)
    np.testing.assert_allclose(made[0].bounds, made[1].bounds, atol=0.02)
    # New splats in the folder of 3DGS are noticed.
    shutil.copytree(of_others["3DGS"] / "point_cloud/iteration_7000", of_others["3DGS"] / "point_cloud/iteration_30000")
    done = chain(of_others["3DGS"], tmp_path / "3DGS", *ONLY_MESH)
    assert done.code == 0 and "its input (coarse splats) has changed" in done.stdout


def test_splats_of_another_frame(chain: Typed, room_splats: Path, tmp_path: Path) -> None:
    splats, _ = read_splats(room_splats)
    splats.means += 1000
    export_splats(splats, tmp_path / "far.ply", SplatInfo(), {"made_by": "a test"})
    message = chain(tmp_path / "far.ply", tmp_path / "out", *ONLY_MESH).refuses()
    assert "try --splats-frame capture" in message and "logs/mesh.log" in message
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["stages"]["mesh"]["state"] == "running"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pt", b"nothing", "cannot be read"),
        ("config.yml", b"nothing: 1", "has no checkpoint"),
    ],
)
def test_files_that_hold_no_splats(chain: Typed, tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in chain(tmp_path / name, tmp_path / "out", *ONLY_MESH).refuses()


@pytest.mark.release
def test_charts_that_overflow_and_a_level_that_is_nowhere(chain: Typed, room_splats: Path, tmp_path: Path) -> None:
    base = ("--splats-frame", "capture", "--skip-refine", "True", "--until-stage", "texture")
    message = chain(
        room_splats, tmp_path / "a", *base, *COARSE, "--texture-size", 64, "--texture.padding", 16
    ).refuses()
    assert "raise --texture-size, lower --padding" in message and "logs/texture.log" in message
    level = ("--mesh-method", "level-set", "--mesh.level", 50, "--mesh.points", 500, "--mesh.min-views", 1)
    assert "level 50 nowhere" in chain(room_splats, tmp_path / "b", *base, *level).refuses()


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    """A file system of 3 MiB."""
    return mount_disk("3m")


def test_a_full_disk_costs_nothing_that_was_there(chain: Typed, room_splats: Path, small_disk: Path) -> None:
    out = small_disk / "out"
    options = ("--splats-frame", "capture", "--skip-refine", "True", "--skip-eval", "True", "--texture.padding", 1)
    options = (*options, "--texture-size", 128, *COARSE)
    chain(room_splats, out, *options).succeeds()
    before = {name: (out / name).read_bytes() for name in ("mesh.ply", "textured.glb", "report.html")}
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    message = chain(room_splats, out, *options, "--texture-size", 256).refuses()
    assert "No space left on device" in message
    assert {name: (out / name).read_bytes() for name in before} == before
    (small_disk / "filler").unlink()
    chain(room_splats, out, *options).succeeds()
    assert isinstance(trimesh.load(out / "textured.glb", force="mesh"), trimesh.Trimesh)
