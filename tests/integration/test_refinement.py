"""A mesh refined with splats on it: train → eval → resume → export → move, as the commands a user types, on the CPU."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial import KDTree

from f3rm_ext.mesh.mesh_files import read_mesh, read_provenance, vertex_colors
from f3rm_ext.splat.files import read_splats

METHOD, STEPS = "sugar-ext-refine", 20
ROOT = Path(__file__).parents[2]
MOVE = ROOT / "examples" / "move_object" / "move_object.py"
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def room_mesh(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The true surface of the tiny room in the capture's frame, with its vertices joined in cells of 20 cm."""
    arrays = np.load(tiny_capture / "gt_mesh.npz")
    _, first, number = np.unique(np.round(arrays["vertices"] / 0.2), axis=0, return_index=True, return_inverse=True)
    faces = number.reshape(-1)[arrays["faces"]]
    colors = arrays["vertex_color"][first]
    mesh = trimesh.Trimesh(arrays["vertices"][first], faces, vertex_colors=colors, process=False)
    mesh.update_faces(mesh.unique_faces())
    path = tmp_path_factory.mktemp("mesh") / "room.ply"
    mesh.export(path)
    return path


@pytest.fixture(scope="module")
def train(run_command: Callable[..., Any], tiny_capture: Path) -> Train:
    """`ns-train sugar-ext-refine` on the tiny capture."""

    def run(output_dir: Path, *arguments: object) -> Any:
        return run_command(
            *("ns-train", METHOD, "--data", tiny_capture, "--output-dir", output_dir),
            *("--experiment-name", "e", "--timestamp", "t", "--vis", "tensorboard"),
            *("--logging.local-writer.enable", "False", "--max-num-iterations", STEPS, "--steps-per-save", 10),
            *arguments,
        )

    return run


@pytest.fixture(scope="module")
def refined(train: Train, room_mesh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    root = tmp_path_factory.mktemp("refined")
    done = train(root, "--mesh", room_mesh, "--profile-tensors", "True").succeeds()
    assert "Refining" in done.text
    return root / "e" / METHOD / "t"


def final(folder: Path) -> dict[str, Any]:
    path = folder / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"
    return torch.load(path, weights_only=True, map_location="cpu")["pipeline"]


def test_it_is_evaluated_without_the_mesh_file(
    refined: Path, room_mesh: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    state = final(refined)
    assert len(state["_model.faces"]) == len(state["_model.gauss_params.opacities"])
    hidden = room_mesh.rename(room_mesh.with_suffix(".away"))
    try:
        done = run_command("ns-eval", "--load-config", refined / "config.yml", "--output-path", tmp_path / "eval.json")
    finally:
        hidden.rename(room_mesh)
    done.succeeds()
    metrics = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert metrics["gaussian_count"] == len(state["_model.faces"]) and metrics["psnr"] > 7
    assert str(room_mesh.name) in (refined / "config.yml").read_text()


def test_its_memory_is_profiled_and_planned(
    refined: Path, room_mesh: Path, tiny_capture: Path, run_command: Callable[..., Any]
) -> None:
    records = [json.loads(line) for line in (refined / "tensor_profile.jsonl").read_text().splitlines()]
    (last,) = [record for record in records if record["kind"] == "snapshot"][-1:]
    words = ("plan", METHOD, "--data", tiny_capture, "--mesh", room_mesh, "--refinement-time", "short", "--json")
    done = run_command("f3rm-ext", *words).succeeds()
    plan = json.loads(done.stdout)
    planned = plan["memory"]["device_bytes"]["train"]
    assert plan["gaussians"]["last"] == pytest.approx(len(final(refined)["_model.faces"]), rel=0.02)
    for category in ("parameters", "optimizer"):
        assert planned[category] == pytest.approx(last["categories"][category], rel=0.05), category
    assert plan["coverage"]["steps"] == 2000


def test_a_run_in_two_parts_is_the_same(refined: Path, train: Train, room_mesh: Path, tmp_path: Path) -> None:
    train(tmp_path, "--mesh", room_mesh, "--schedule-steps", STEPS, "--max-num-iterations", 10).succeeds()
    models = tmp_path / "e" / METHOD / "t" / "nerfstudio_models"
    train(tmp_path, "--mesh", room_mesh, "--load-dir", models).succeeds()
    one, two = final(refined), final(models.parent)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, two[name], atol=1e-5, rtol=1e-3, msg=name)


def test_its_splats_are_exported_and_a_part_of_them_moves(
    refined: Path, run_command: Callable[..., Any], tmp_path: Path, set_command_line: Callable[..., None]
) -> None:
    config = refined / "config.yml"
    run_command("f3rm-ext", "export", "splats", "--load-config", config, "--out", tmp_path / "a.ply").succeeds()
    before = read_splats(tmp_path / "a.ply")[0]
    middle = before.means.median(dim=0).values
    box = ("--low", *(middle - 0.2).tolist(), "--high", *(middle + 0.2).tolist())
    words = ("--load-config", config, "--out", tmp_path / "b.ply", *box, "--shift", 0, 0, 0.5)
    set_command_line(MOVE, *words)
    runpy.run_path(str(MOVE), run_name="__main__")
    apart = (read_splats(tmp_path / "b.ply")[0].means - before.means).norm(dim=1)
    assert 0 < int((apart > 1e-4).sum()) < len(apart) and float(apart.max()) == pytest.approx(0.5, abs=1e-3)


def test_the_refined_mesh_is_exported_and_lies_near_the_first(
    refined: Path, room_mesh: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    for name, frame in (("a.ply", "capture"), ("b.glb", "capture"), ("c.ply", "scene")):
        words = ("--load-config", refined / "config.yml", "--out", tmp_path / name, "--frame", frame)
        run_command("f3rm-ext", "export", "refined-mesh", *words).succeeds()
    before = KDTree(read_mesh(room_mesh).vertices)
    for name, near in (("a.ply", True), ("b.glb", True), ("c.ply", False)):
        mesh = read_mesh(tmp_path / name)
        assert len(mesh.faces) == len(final(refined)["_model.faces"])
        colors = vertex_colors(mesh)
        assert colors is not None and len(np.unique(colors, axis=0)) > 10
        assert (float(np.median(before.query(mesh.vertices)[0])) < 0.02) == near
    said = read_provenance(tmp_path / "c.ply")
    assert said["frame"] == "scene" and said["method"] == METHOD


def test_bad_meshes(train: Train, room_mesh: Path, tmp_path: Path) -> None:
    points = tmp_path / "points.ply"
    trimesh.PointCloud(np.random.default_rng(0).random((9, 3))).export(points)
    far = tmp_path / "far.ply"
    mesh = trimesh.load(room_mesh, process=False)
    mesh.apply_translation([0, 0, 1e4])  # type: ignore[union-attr]
    mesh.export(far)
    for mesh, message in (
        (None, "There is no mesh to refine"),
        (tmp_path / "gone.ply", "There is no mesh"),
        (points, "has points but no faces"),
        (far, "No training camera sees any"),
    ):
        done = train(tmp_path / "out", *(() if mesh is None else ("--mesh", mesh)))
        assert done.code == 2 and message in " ".join(done.text.split()), done.text[-3000:]
        assert "Traceback" not in done.text
