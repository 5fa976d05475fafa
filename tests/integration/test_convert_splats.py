"""``f3rm-ext export convert`` as a user types it, and the files of nerfstudio's own export."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from f3rm_ext.splat.files import SplatInfo, export_splats, read_splats
from f3rm_ext.splat.gaussians import Gaussians

pytestmark = pytest.mark.integration


def gaussians(count: int = 400) -> Gaussians:
    random = torch.Generator().manual_seed(0)
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,)}
    values = {name: torch.randn(count, *shape, generator=random) for name, shape in shapes.items()}
    return Gaussians(**values, features_rest=0.2 * torch.randn(count, 15, 3, generator=random))


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    export_splats(gaussians(), tmp_path / "scene.ply", SplatInfo(render_mode="mip", filters_fused=True))
    return tmp_path / "scene.ply"


def test_there_and_back(scene: Path, run_command: Callable) -> None:
    folder = scene.parent
    there = run_command("f3rm-ext", "export", "convert", scene, folder / "scene.spz").succeeds()
    lines = there.stdout.splitlines()
    assert [line.split(" changed by ")[0] for line in lines[:-1]] == [
        *("Positions", "Sizes", "Rotations", "Opacities", "Colours", "SH coefficients")
    ]
    assert re.fullmatch(r"400 Gaussians \(SH degree 3, 0\.0 MiB\) are in .*scene\.spz\.", lines[-1])
    assert (folder / "scene.spz").stat().st_size < scene.stat().st_size / 4
    for _ in range(2):  # its own file is replaced
        back = run_command("f3rm-ext", "export", "convert", folder / "scene.spz", folder / "b.ply", "--sh-degree", 1)
        assert back.code == 0 and back.stdout.startswith("SH degree 3 became 1.\n400 Gaussians (SH degree 1"), back.text
    found, info = read_splats(folder / "b.ply")
    assert (found.means - gaussians().means).abs().max() < gaussians().sizes().median() / 16
    assert (info.render_mode, info.filters_fused, info.sh_degree) == ("mip", True, 1)
    assert "converted_from: scene.spz (spz version 3)" in info.comments


@pytest.fixture
def convert(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Exit code and both streams of the command, without a process of its own."""
    from f3rm_ext.scripts.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["export", "convert", *map(str, arguments)]), *capsys.readouterr()

    return run


def test_bad_values_can_be_dropped(scene: Path, convert: Callable) -> None:
    data = bytearray(scene.read_bytes())
    data[-4 * 62 : -4 * 61] = np.float32("nan").tobytes()  # x of the last Gaussian
    (scene.parent / "bad.ply").write_bytes(data)
    arguments = (scene.parent / "bad.ply", scene.parent / "good.ply")
    code, _, refused = convert(*arguments)
    assert code == 2 and not (scene.parent / "good.ply").exists()
    assert "bad.ply has 1 values that are NaN, infinite or no rotation (1 in x) in 1 of 400 Gaussians" in refused
    code, done, _ = convert(*arguments, "--bad-values", "drop")
    assert code == 0 and "1 Gaussians are left out" in done and "Nothing was lost." in done
    assert read_splats(scene.parent / "good.ply")[1].count == 399


def test_bad_input_is_one_sentence(scene: Path, convert: Callable) -> None:
    folder = scene.parent
    (folder / "mesh.ply").write_text(
        "ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nproperty float z\n"
        "element face 0\nproperty list uchar int vertex_indices\nend_header\n0 0 0\n"
    )
    (folder / "short.ply").write_bytes(scene.read_bytes()[:-1])
    (folder / "notes.spz").write_text("mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for source, out, message in (
        ("mesh.ply", "new.spz", "is a mesh and holds no Gaussians"),
        ("short.ply", "new.spz", "is cut short, with 399 of 400 rows"),
        ("none.ply", "new.spz", "cannot be read (No such file or directory)"),
        ("scene.ply", "new.gltf", "has no format for splats"),
        ("scene.ply", "notes.spz", "notes.spz is there already"),
        ("scene.ply", "scene.ply", "is also the file to read"),
    ):
        code, _, told = convert(folder / source, folder / out)
        (line,) = told.splitlines()
        assert code == 2 and line.startswith("Error: ") and message in line and line.endswith(".")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_nerfstudio_writes_what_we_read(tmp_path: Path, open3d: ModuleType) -> None:  # its exporter imports it
    from nerfstudio.scripts.exporter import ExportGaussianSplat

    ours = gaussians()
    columns = {name: ours.means[:, i] for i, name in enumerate("xyz")}
    columns |= {f"f_dc_{i}": ours.features_dc[:, i] for i in range(3)}
    flat = ours.features_rest.transpose(1, 2).reshape(len(ours), -1)  # as ns-export has it
    columns |= {f"f_rest_{i}": flat[:, i] for i in range(3 * 15)}
    columns |= {"opacity": ours.opacities[:, 0]}
    columns |= {f"scale_{i}": ours.scales[:, i] for i in range(3)}
    columns |= {f"rot_{i}": ours.quats[:, i] for i in range(4)}
    path = tmp_path / "a.ply"
    ExportGaussianSplat.write_ply(str(path), len(ours), {name: value.numpy() for name, value in columns.items()})
    found, info = read_splats(path)
    assert all(torch.equal(found.tensors()[name], value) for name, value in ours.tensors().items())
    assert info.comments[0].startswith("Generated by Nerstudio") and info.render_mode is None
