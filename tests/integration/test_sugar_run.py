"""`f3rm-ext sugar run` at a tiny size: interrupted, killed, and compared with commands that were not disturbed."""

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial import KDTree

from f3rm_ext.mesh.mesh_files import read_mesh
from f3rm_ext.utils.ply import write_ply

pytestmark = pytest.mark.usefixtures("open3d")
Run = Callable[..., Any]
STEPS, SAVE = 60, 20
SMALL = (
    *("--coarse-method", "sugar-ext-lite", "-r", "none", "--vertices", 700, "--texture-size", 256),
    *("--coarse.max-num-iterations", STEPS, "--coarse.steps-per-save", SAVE),
    *("--coarse.pipeline.datamanager.num-downscales", 0, "--coarse.pipeline.model.densify.max-gaussians", 4000),
    *("--mesh.voxel", 0.15, "--mesh.min-views", 1),
    *("--refine.max-num-iterations", STEPS, "--refine.steps-per-save", SAVE, "--texture.padding", 1),
)

FEW_POINTS = """
import sys
from f3rm_ext.scripts.cli import main
from f3rm_ext.scripts.eval_mesh import EvalMesh

def compare(self, *arguments, _of_all=EvalMesh._comparison):
    self.points = 20_000
    return _of_all(self, *arguments)

EvalMesh._comparison = compare
sys.exit(main())
"""
"""``f3rm-ext`` whose stages compare meshes by fewer points, which takes seconds instead of half a minute."""


@pytest.fixture(scope="module")
def capture(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny room with points on its surface, where splats begin."""
    folder = tmp_path_factory.mktemp("capture") / "room"
    shutil.copytree(tiny_capture, folder)
    arrays = np.load(folder / "gt_mesh.npz")
    chosen = np.random.default_rng(0).choice(len(arrays["vertices"]), 2500, replace=False)
    places, colors = arrays["vertices"][chosen], arrays["vertex_color"][chosen]
    columns: dict[str, np.ndarray] = {name: places[:, axis].astype(np.float32) for axis, name in enumerate("xyz")}
    columns |= {name: colors[:, axis] for axis, name in enumerate(("red", "green", "blue"))}
    with (folder / "points.ply").open("wb") as stream:
        write_ply(stream, columns)
    meta = json.loads((folder / "transforms.json").read_text())
    (folder / "transforms.json").write_text(json.dumps({**meta, "ply_file_path": "points.ply"}))
    return folder


def small(capture: Path) -> tuple[object, ...]:
    """Options of the chain, whose page is asked for a class of the capture."""
    return *SMALL, "--refine.pipeline.model.features", f"labels:data={capture}", "--page.text", "table"


@pytest.fixture(scope="module")
def chain(
    capture: Path,
    shared_command_server: Any,
    wait_until: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, str, str]:
    """A chain that was interrupted in one training and killed in the other, and what its first and last call said."""
    out, server = tmp_path_factory.mktemp("chain") / "out", shared_command_server
    words = ("python", "-c", FEW_POINTS, "sugar", "run", "--data", capture, "--output", out, *small(capture))

    def saved(stage: str) -> bool:
        return any(out.glob(f"runs/{stage}/*/*/nerfstudio_models/*.ckpt"))

    said = list[str]()
    for stage, number in (("coarse", signal.SIGINT), ("refine", signal.SIGKILL)):
        process = server.start(*words)
        try:
            wait_until(lambda stage=stage: saved(stage), 200, f"{stage} saved")
            os.kill(process, number)
            disturbed = server.finish(100)
        finally:
            server.abandon()
        said.append(disturbed.text)
        assert disturbed.code == (130 if number == signal.SIGINT else -number), disturbed.text[-3000:]
        assert json.loads((out / "manifest.json").read_text())["stages"][stage]["state"] == "running"
    server.start(*words)
    done = server.finish(400).succeeds()
    return out, said[0], done.stdout


def test_it_resumed_where_it_was_interrupted(chain: tuple[Path, str, str]) -> None:
    out, interrupted, said = chain
    assert "To resume: f3rm-ext sugar run --data" in interrupted and "Traceback" not in interrupted
    assert re.search(r"trainings take about \d+ minutes?", interrupted)
    assert re.search(r"The stage refine resumes after \d+ steps, because it was interrupted", said)
    assert "kept Coarse splats: done before" in said
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    assert [stages[name]["runs"] for name in ("coarse", "mesh", "refine", "texture")] == [2, 1, 2, 1]
    assert all(stage["seconds"] > 0 and stage["peak_mib"] > 50 for stage in stages.values())
    assert all(stages[name]["working_s"] > 0 for name in ("coarse", "refine"))
    assert any("texels" in note and note in said for note in stages["texture"]["notes"])
    scores = json.loads((out / "eval/texture/scores.json").read_text())
    assert scores["psnr"] > 8 and json.loads((out / "eval/mesh/scores.json").read_text())["chamfer"] > 0


def test_the_result_is_that_of_commands_that_were_not_disturbed(
    chain: tuple[Path, str, str], run_command: Run, tmp_path: Path
) -> None:
    out = chain[0]
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    for name in ("coarse", "mesh", "refine", "refined-mesh"):
        words = shlex.split(stages[name]["command"].replace(str(out), str(tmp_path)))
        words = words[: words.index("--load-dir")] if "--load-dir" in words else words
        run_command(*words).succeeds()
    for name in ("mesh.ply", "refined-mesh.ply"):
        one, two = (read_mesh(folder / name) for folder in (out, tmp_path))
        assert abs(len(one.faces) - len(two.faces)) < 0.02 * len(one.faces), name
        # Trainings agree up to the rounding of float32; the room is 5 m wide.
        apart = KDTree(two.vertices).query(one.vertices)[0]
        assert np.quantile(apart, 0.95) < 0.001, name


def test_the_plan_of_the_refinement_counts_what_its_log_says(chain: tuple[Path, str, str], run_command: Run) -> None:
    out = chain[0]
    words = shlex.split(json.loads((out / "manifest.json").read_text())["stages"]["refine"]["command"])[1:]
    words = words[: words.index("--load-dir")] if "--load-dir" in words else words
    planned = run_command("f3rm-ext", "plan", *words, "--json").succeeds()
    log = " ".join(re.sub(r"\S+\.py:\d+", " ", (out / "logs" / "refine.log").read_text()).split())
    said = re.search(r"divided into (\d+) where splats are dense.* with (\d+) Gaussians on them and (\d+) free", log)
    assert said, log[-3000:]
    triangles, bound, free = map(int, said.groups())
    found = json.loads(planned.stdout)["gaussians"]
    assert found["first"] == found["last"] == bound + free and free > 0
    assert found["source"].startswith(f"{triangles:,} triangles, divided")


def test_the_mesh_and_the_report(chain: tuple[Path, str, str]) -> None:
    out = chain[0]
    assert 300 < len(read_mesh(out / "mesh.ply").vertices) <= 700
    page = (out / "report.html").read_text()
    assert 'data-mesh="mesh-data"' in page
    assert page.count("<figure>") == 3 * 4  # three held-out views: photo, coarse, refined, texture
    for wanted in ("PSNR, refined splats", "Completeness of the mesh", "ns-train sugar-ext-refine", "peak memory"):
        assert wanted in page, wanted
    assert 'href="page.html"' in page and 'data-question="0"' in (out / "page.html").read_text()
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", page[:3000])


def test_the_same_command_again_runs_nothing_and_a_changed_option_little(
    chain: tuple[Path, str, str], capture: Path, run_command: Run
) -> None:
    out = chain[0]
    words = ("sugar", "run", "--data", capture, "--output", out, *small(capture), "--until-stage", "page")
    before = (out / "textured.glb").stat().st_mtime_ns
    done = run_command("f3rm-ext", *words)
    assert done.code == 0 and done.text.count("done before") == 6, done.text[-3000:]
    assert (out / "textured.glb").stat().st_mtime_ns == before
    done = run_command("f3rm-ext", *words, "--texture.padding", 2).succeeds()
    assert "--padding was 1 and is now 2" in done.text
    assert done.text.count("done before") == 5


def test_mistakes(
    capture: Path, tiny_capture: Path, run_command: Run, chain: tuple[Path, str, str], tmp_path: Path
) -> None:
    out = chain[0]
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    far = ("--skip-coarse", "True", "--coarse-checkpoint", tmp_path / "none.ply")
    for words, says in (
        (("--data", tiny_capture, "--output", out), str(tiny_capture)),
        (("--data", capture, "--output", tmp_path), "photo.jpg"),
        (("--data", capture, "--output", tmp_path / "a", *far), "--coarse-checkpoint"),
        (("--data", capture, "--output", tmp_path / "b", "--from-stage", "mesh"), "--from-stage mesh"),
        (("--data", tmp_path, "--output", tmp_path / "c"), "transforms.json"),
        (
            ("--data", capture, "--output", tmp_path / "d", "--refine.no-such-option", 1),
            "no-such-option",
        ),
    ):
        done = run_command("f3rm-ext", "sugar", "run", *words)
        assert done.code == 2 and says in " ".join(done.text.split()), done.text[-3000:]
        assert "Traceback" not in done.text
    assert (tmp_path / "photo.jpg").read_bytes() == b"mine"
