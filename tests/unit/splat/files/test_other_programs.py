"""Files that other programs read and write: gsply (PyPI) and PlayCanvas' splat-transform (npm)."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
FILES = [("a.ply", 3), ("a.compressed.ply", 3), ("a3.spz", 3), ("a4.spz", 4)]
INFO = SplatInfo(render_mode="mip", filters_fused=True, comments=("made_by: f3rm-ext export splats",))


@pytest.fixture(scope="session")
def splat_transform() -> tuple[str, int]:
    """The program, and its major version."""
    program = shutil.which("splat-transform")
    if program is None:
        pytest.skip("splat-transform is not on the PATH: npm install --global @playcanvas/splat-transform")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"v(\d+)\.\d+", told.stdout + told.stderr)
    assert found is not None, told
    return program, int(found[1])


def spz_axes(version: int) -> Any:
    """Version 2 of splat-transform turns .spz into the axes of PLY and back; version 3 keeps the numbers."""
    return "rub" if version < 3 else "ply"


def transform(program: str, *paths: Path) -> None:
    done = subprocess.run([program, "-w", *map(str, paths)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and paths[-1].is_file(), done.stdout + done.stderr


def assert_near(ours: Gaussians, theirs: Gaussians) -> None:
    """Checks that two readers of one file see the same Gaussians."""
    torch.testing.assert_close(theirs.means, ours.means, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.scales, ours.scales, rtol=0, atol=1e-5)
    assert rotation_differences(ours.quats, theirs.quats).max() < 0.1
    torch.testing.assert_close(theirs.alphas(), ours.alphas(), rtol=0, atol=1e-3)
    torch.testing.assert_close(theirs.features_dc, ours.features_dc, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.features_rest, ours.features_rest, rtol=0, atol=1e-6)


def of_gsply(data: Any) -> Gaussians:
    rest = data.shN if data.shN is not None else np.zeros((len(data.means), 0, 3), np.float32)
    arrays = (data.means, data.scales, data.quats, data.opacities.reshape(-1, 1), data.sh0, rest)
    return Gaussians(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


@pytest.mark.parametrize("degree", [0, 1, 3])
@pytest.mark.parametrize(("name", "version"), FILES)
def test_gsply_reads_our_files(name: str, version: Any, degree: int, make: Make, tmp_path: Path) -> None:
    gsply = pytest.importorskip("gsply", reason="gsply is not installed")
    write_splats(tmp_path / name, make(300, degree), INFO, spz_axes="ply", spz_version=version)
    data = gsply.read_spz(tmp_path / name) if name.endswith(".spz") else gsply.plyread(tmp_path / name)
    assert_near(read_splats(tmp_path / name, spz_axes="ply")[0], of_gsply(data))


@pytest.mark.parametrize("degree", [0, 2])
@pytest.mark.parametrize("version", [3, 4])
def test_files_of_gsply_are_read(version: int, degree: int, make: Make, tmp_path: Path) -> None:
    gsply = pytest.importorskip("gsply", reason="gsply is not installed")
    write_splats(tmp_path / "a.ply", make(300, degree), INFO)
    gsply.write_spz(tmp_path / "a.spz", gsply.plyread(tmp_path / "a.ply"), version=version)
    found, info = read_splats(tmp_path / "a.spz", spz_axes="ply")
    assert info.version == version
    assert_near(found, of_gsply(gsply.read_spz(tmp_path / "a.spz")))


def test_gsply_reads_splats_with_scores(make: Make, tmp_path: Path) -> None:
    gsply = pytest.importorskip("gsply", reason="gsply is not installed")
    gaussians = make(300, 1)
    scores = GaussianScores.of_queries({"mug": np.linspace(0, 1, 300, dtype=np.float32)}, 0.5)
    write_splats(tmp_path / "a.ply", gaussians, SplatInfo(scores=scores))
    assert_near(gaussians, of_gsply(gsply.plyread(tmp_path / "a.ply")))


@pytest.mark.parametrize("degree", [0, 1, 3])
@pytest.mark.parametrize(("name", "version"), FILES)
def test_splat_transform_reads_our_files(
    name: str, version: Any, degree: int, splat_transform: tuple[str, int], make: Make, tmp_path: Path
) -> None:
    program, theirs = splat_transform
    axes = spz_axes(theirs)
    write_splats(tmp_path / name, make(300, degree), INFO, spz_axes=axes, spz_version=version)
    transform(program, tmp_path / name, tmp_path / "out.ply")
    found, info = read_splats(tmp_path / "out.ply")
    assert info.sh_degree == degree
    assert_near(read_splats(tmp_path / name, spz_axes=axes)[0], found)


def test_splats_of_splat_transform_are_read(splat_transform: tuple[str, int], make: Make, tmp_path: Path) -> None:
    program, theirs = splat_transform
    gaussians = make(300, 2)
    write_splats(tmp_path / "a.ply", gaussians, INFO)
    transform(program, tmp_path / "a.ply", tmp_path / "a.spz")
    found, info = read_splats(tmp_path / "a.spz", spz_axes=spz_axes(theirs))
    assert info.version == 4 and info.notices == ()
    assert (found.means - gaussians.means).abs().max() < 2**-12  # it always takes 12 bits
    assert (found.features_rest - gaussians.features_rest.clamp(-1, 1)).abs().max() < 8.5 / 128


def test_splat_transform_keeps_splats_with_scores(
    splat_transform: tuple[str, int], make: Make, assert_same: Any, tmp_path: Path
) -> None:
    gaussians = make(300, 1)
    scores = GaussianScores.of_queries({"mug": np.linspace(0, 1, 300, dtype=np.float32)}, 0.5)
    write_splats(tmp_path / "a.ply", gaussians, SplatInfo(scores=scores))
    transform(splat_transform[0], tmp_path / "a.ply", tmp_path / "b.ply")
    assert_same(read_splats(tmp_path / "b.ply")[0], gaussians)
