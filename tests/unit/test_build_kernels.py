"""gsplat's kernels built beforehand: what is compiled, what stays, and the wheel; nothing here compiles CUDA."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture(scope="module")
def build(load: Callable[[str], ModuleType]) -> ModuleType:
    """The program."""
    return load("build_kernels")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of Python code, as PyPI has it."""
    path = tmp_path / "gsplat-1.4.0-py3-none-any.whl"
    info = "gsplat-1.4.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gsplat/__init__.py", "answer = 42\n")
        archive.writestr("gsplat/cuda/csrc/a.cu", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gsplat\nVersion: 1.4.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_wheel_has_the_module_and_a_true_record(build: ModuleType, wheel: Path, tmp_path: Path) -> None:
    extension = tmp_path / f"csrc{SUFFIX}"
    extension.write_bytes(b"machine code")
    made = build.packed(wheel, extension, tmp_path / "wheels")
    assert re.fullmatch(r"gsplat-1\.4\.0-cp3\d+-cp3\d+-linux_\w+\.whl", made.name)
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files[f"gsplat/{extension.name}"] == b"machine code" and "gsplat/cuda/csrc/a.cu" in files
    about = files["gsplat-1.4.0.dist-info/WHEEL"].decode()
    assert re.findall("^Tag: (.*)$", about, re.MULTILINE) == [made.stem.removeprefix("gsplat-1.4.0-")]
    assert "Root-Is-Purelib: false" in about
    rows = [line.split(",") for line in files["gsplat-1.4.0.dist-info/RECORD"].decode().splitlines()]
    assert {row[0] for row in rows} == set(files)
    for path, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
        assert digest == f"sha256={expected}" and int(size) == len(files[path])


def test_pip_installs_it(build: ModuleType, wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="environments of uv have no pip")
    extension = tmp_path / f"csrc{SUFFIX}"
    extension.write_bytes(b"machine code")
    made = build.packed(wheel, extension, tmp_path / "wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*command, str(tmp_path / "there"), str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "gsplat" / extension.name).read_bytes() == b"machine code"


def test_a_build_goes_on_where_it_was_ended(build: ModuleType, tmp_path: Path) -> None:
    program = "import sys; open(sys.argv[1], 'w').write('new'); sys.exit(int(sys.argv[2]))"
    done, fails, new = (tmp_path / f"{name}.o" for name in ("done", "fails", "new"))
    done.write_text("old")
    codes = {done: 0, fails: 3, new: 0}
    commands = {path: [sys.executable, "-c", program, str(path), str(code)] for path, code in codes.items()}
    with pytest.raises(SystemExit, match="fails"):
        build.compile_all(commands, jobs=2)
    assert done.read_text() == "old" and new.read_text() == "new" and not fails.exists()
    commands[fails][-1] = "0"
    build.compile_all(commands, jobs=2)
    assert fails.read_text() == "new"


def test_units_have_every_file_once_and_part_those_that_share_names(build: ModuleType, tmp_path: Path) -> None:
    pixels = [f"rasterize_to_pixels_{name}.cu" for name in ("2dgs_bwd", "2dgs_fwd", "bwd", "fwd")]
    ranges = ["rasterize_to_indices_in_range.cu", "rasterize_to_indices_in_range_2dgs.cu"]
    names = ["proj_fwd.cu", *pixels, "isect_tiles.cu", *ranges]
    units = build.write_units([tmp_path / "csrc" / name for name in names], tmp_path)
    found = [re.findall('^#include "(.*)"$', unit.read_text(), re.MULTILINE) for unit in units]
    assert sorted(name for unit in found for name in unit) == sorted(names)
    assert all(len({*unit} & {*alike}) < 2 for unit in found for alike in (pixels, ranges))


def test_what_cannot_be_loaded_is_not_packed(build: ModuleType, tmp_path: Path) -> None:
    extension = tmp_path / f"csrc{SUFFIX}"
    extension.write_bytes(b"no machine code")
    with pytest.raises(SystemExit, match=extension.name):
        build.load(extension)


def test_commands_name_the_module_and_the_architectures(build: ModuleType, tmp_path: Path) -> None:
    flags = build.architecture_flags("8.9;9.0+PTX")
    assert flags == ["-gencode=arch=compute_89,code=sm_89", "-gencode=arch=compute_90,code=[compute_90,sm_90]"]
    with pytest.raises(SystemExit, match="Hopper"):
        build.architecture_flags("Hopper")
    source, target = tmp_path / "a.cu", tmp_path / "a.o"
    command = build.compile_command(source, target, Path("/gsplat"), Path("/cuda"), ["/torch/include"], flags)
    assert command[:5] == ["/cuda/bin/nvcc", "-c", str(source), "-o", str(target)]
    # gsplat imports its kernels as gsplat.csrc.
    assert "-DTORCH_EXTENSION_NAME=csrc" in command and set(flags) <= set(command)
    assert {"-I/gsplat", "-isystem=/cuda/include", "-isystem=/torch/include"} <= set(command)
    linked = build.link_command([target], tmp_path / "csrc.so", Path("/torch/lib"))
    assert str(target) in linked and {"-L/torch/lib", "-ltorch_python", "-lc10_cuda"} <= set(linked)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no linker")
def test_tiny_cuda_nn_is_linked_to_libraries_that_are_not_here(build: ModuleType, tmp_path: Path) -> None:
    build.write_stubs(tmp_path / "stubs", "13")
    command, more = build.tiny_cuda_nn(Path("tcnn"), tmp_path, "8.9 9.0+PTX", tmp_path / "cuda", tmp_path / "stubs")
    assert command[-1] == str(Path("tcnn", "bindings", "torch")) and more["TCNN_CUDA_ARCHITECTURES"] == "89,90"
    target, libraries = tmp_path / "bindings.so", ("-lcuda", "-lcudart", "-lnvrtc")
    linked = ["g++", "-shared", more["LDFLAGS"], "-x", "c++", os.devnull, "-x", "none", *libraries, "-o", str(target)]
    subprocess.run(linked, env={**os.environ, **more}, check=True)
    assert all(name in target.read_bytes() for name in (b"libcuda.so.1\0", b"libcudart.so.13\0", b"libnvrtc.so.13\0"))


@pytest.mark.parametrize("with_kernels", [False, True])
def test_the_gpu_day_installs_the_wheel_with_kernels_alone(with_kernels: bool, tmp_path: Path) -> None:
    names = ["gsplat-1.4.0-py3-none-any.whl", "other-1-py3-none-any.whl"]
    names += ["gsplat-1.4.0-cp312-cp312-linux_x86_64.whl"] if with_kernels else []
    for name in names:
        (tmp_path / name).touch()
    script = (ROOT / "benchmarks" / "gpu_day.sh").read_text().splitlines()
    lines = [line for line in script if re.match(r" *(built=|mapfile)", line)]
    program = "\n".join(["set -euo pipefail", "wheels=$1", *lines, """printf '%s\\n' "${found[@]##*/}\""""])
    done = subprocess.run(["bash", "-c", program, "x", str(tmp_path)], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(names[1:] if with_kernels else names)
