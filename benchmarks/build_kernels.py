"""Compiles gsplat's kernels for a GPU that is not here, and adds them to its wheel: the GPU day then begins at once.

    python benchmarks/build_kernels.py wheels/kernels                  # for compute capability 9.0
    python benchmarks/build_kernels.py wheels/kernels --only rasterize_to_pixels_fwd.cu   # tries one file

Run it with the GPU machine's versions of Python and PyTorch, and with nvcc of PyTorch's CUDA version: from a toolkit,
or from PyPI (nvidia-cuda-nvcc, -cccl, -crt, nvidia-nvvm and nvidia-cuda-runtime, all ==13.0.*, which lie in
site-packages/nvidia/cu13). No GPU is needed. The wheel has ``gsplat.csrc``, which gsplat takes before it thinks of
compiling. Objects stay in --work, so a build that was ended goes on. With --tiny-cuda-nn, a checkout with its
submodules, its wheel is made, too.
"""

import argparse
import base64
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GSPLAT = "gsplat==1.4.0"
MODULE = "csrc"
"""Module of the package gsplat in which it looks for compiled kernels."""
UNITS = 4
"""Number of files that all of gsplat's .cu files are compiled as."""
TORCH = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")
"""Libraries of PyTorch; CUDA's runtime comes with them."""


def architecture_flags(capabilities: str) -> list[str]:
    """Returns nvcc's options for compute capabilities, as in ``TORCH_CUDA_ARCH_LIST``.

    >>> architecture_flags("8.9 9.0+PTX")
    ['-gencode=arch=compute_89,code=sm_89', '-gencode=arch=compute_90,code=[compute_90,sm_90]']
    """
    flags = []
    for word in re.split(r"[;\s]+", capabilities.strip()):
        number, _, ptx = word.partition("+")
        if not re.fullmatch(r"\d+\.\d[af]?", number) or ptx not in ("", "PTX"):
            raise SystemExit(f"{word} is no compute capability such as 9.0: see --arch.")
        code = number.replace(".", "")
        both = f"[compute_{code},sm_{code}]" if ptx else f"sm_{code}"
        flags.append(f"-gencode=arch=compute_{code},code={both}")
    return flags


def find_toolkit(named: str | None) -> Path:
    """Returns the folder with nvcc and CUDA's headers: the one that is named, else a likely one."""
    packages = [Path(path, "nvidia") for path in sys.path if path.endswith("-packages")]
    likely = [Path("/usr/local/cuda"), *(folder for path in packages for folder in sorted(path.glob("cu1*")))]
    for home in [Path(named)] if named else likely:
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home
    raise SystemExit(
        f"There is no bin/nvcc with include/cuda_runtime.h in {named or 'the usual places'}: set CUDA_HOME."
    )


def write_units(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Writes files that include several of gsplat's, as PyTorch's headers cost more than the kernels; returns them.

    Files that are neighbours in the order of their names share names of functions, and come into different units.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> [unit.read_text().split() for unit in write_units([Path("fwd.cu"), Path("bwd.cu")], folder)]
    [['#include', '"bwd.cu"'], ['#include', '"fwd.cu"']]
    """
    groups = [sorted(sources)[index::UNITS] for index in range(UNITS)]
    units = {folder / f"unit-{index}.cu": group for index, group in enumerate(groups, 1) if group}
    for unit, group in units.items():
        unit.write_text("".join(f'#include "{path.name}"\n' for path in group))
    return list(units)


def compile_command(
    source: Path, target: Path, csrc: Path, home: Path, includes: Sequence[str], flags: Sequence[str]
) -> list[str]:
    """Returns the command that compiles a file of gsplat, or a unit.

    Args:
        csrc: folder of gsplat's files.
        includes: folders of PyTorch's headers.
    """
    return [
        *(str(home / "bin" / "nvcc"), "-c", str(source), "-o", str(target)),
        *(f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *(f"-I{csrc}", f"-I{csrc / 'third_party' / 'glm'}"),
        *(f"-isystem={folder}" for folder in (home / "include", *includes, sysconfig.get_paths()["include"])),
        *("--compiler-options", "-fPIC", "-O3", "--use_fast_math", "-std=c++20", *flags),
    ]


def compile_all(commands: Mapping[Path, Sequence[str]], jobs: int) -> None:
    """Runs the commands of objects that are not there; an object has its name only when it is whole.

    Args:
        commands: by object, with the object's path in it.
    """

    def one(target: Path) -> str:
        part = target.with_suffix(".part.o")
        words = [str(part) if word == str(target) else word for word in commands[target]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{target.stem}: {(done.stderr or done.stdout)[-1000:]}"
        part.rename(target)
        print(f"{target.stem} is compiled.", flush=True)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        failures = list(filter(None, pool.map(one, [target for target in commands if not target.is_file()])))
    if failures:
        raise SystemExit("\n".join(failures))


def link_command(objects: Sequence[Path], target: Path, torch_lib: Path) -> list[str]:
    """Returns the command that links objects to an extension of Python."""
    libraries = [f"-l{name}" for name in TORCH]
    return ["g++", "-shared", *map(str, objects), f"-L{torch_lib}", "-Wl,--no-as-needed", *libraries, "-o", str(target)]


def load(extension: Path) -> None:
    """Loads an extension of Python, which needs no GPU, so that a symbol which is missing is told here."""
    spec = importlib.util.spec_from_file_location(MODULE, extension)
    assert spec is not None
    try:
        importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise SystemExit(
            f"The kernels are linked and cannot be loaded: {error}. Empty --work and try again."
        ) from error


def packed(wheel: Path, extension: Path, folder: Path) -> Path:
    """Writes a wheel with the extension in its package, for this Python and platform; returns its path.

    Args:
        wheel: of Python code alone.
        extension: whose file name is that of the module.
    """
    name, version = wheel.name.split("-")[:2]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_')}"
    target = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as old:
        files = {entry: old.read(entry) for entry in old.namelist() if not entry.endswith("/")}
    del files[f"{info}/RECORD"]
    about = files[f"{info}/WHEEL"].decode()
    about = re.sub(r"^Tag: .*\n", "", about, flags=re.MULTILINE).rstrip("\n")
    about = about.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false") + f"\nTag: {tag}\n"
    files |= {f"{info}/WHEEL": about.encode(), f"{name}/{extension.name}": extension.read_bytes()}
    record = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as new:
        for path, content in files.items():
            new.writestr(path, content)
    temporary.rename(target)
    return target


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def build_gsplat(options: argparse.Namespace, home: Path) -> None:
    """Compiles gsplat, and writes its wheel unless only one file was asked for."""
    import torch
    from torch.utils import cpp_extension

    if torch.version.cuda is None:
        raise SystemExit("This PyTorch is built without CUDA: install the GPU machine's.")
    options.work.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, "--dest", str(options.work), GSPLAT], check=True)
    wheel = next(options.work.glob("gsplat-*-none-any.whl"))
    source = options.work / "source"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source)
    csrc = source / "gsplat" / "cuda" / "csrc"
    # Objects of other versions are others.
    objects = options.work / f"{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}-{options.arch}".replace(
        " ", "_"
    )
    objects.mkdir(exist_ok=True)
    files = [*csrc.glob("*.cpp"), *write_units([*csrc.glob("*.cu")], objects)]
    if options.only:
        files = [csrc / options.only]
        if not files[0].is_file():
            raise SystemExit(f"gsplat has no file {options.only}: see {csrc}.")
    flags = [*cpp_extension.COMMON_NVCC_FLAGS, *architecture_flags(options.arch)]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    includes = cpp_extension.include_paths()
    targets = {objects / f"{path.name}.o": path for path in files}
    commands = {target: compile_command(path, target, csrc, home, includes, flags) for target, path in targets.items()}
    compile_all(commands, options.jobs)
    if options.only:
        return
    extension = objects / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(link_command(list(targets), extension, Path(torch.__file__).parent / "lib"), check=True)
    load(extension)
    made = packed(wheel, extension, options.folder)
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB")


def write_stubs(folder: Path, cuda_major: str) -> None:
    """Writes empty libraries by whose names an extension is linked to the GPU machine's driver and CUDA."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libcuda.so.1", f"libcudart.so.{cuda_major}", f"libnvrtc.so.{cuda_major}"):
        target = folder / f"{name.partition('.')[0]}.so"
        command = ["g++", "-shared", f"-Wl,-soname,{name}", "-x", "c++", os.devnull, "-o", str(target)]
        subprocess.run(command, check=True)


def tiny_cuda_nn(
    source: Path, folder: Path, capabilities: str, home: Path, stubs: Path
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that makes tiny-cuda-nn's wheel, and what its environment needs."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    numbers = re.sub(r"[;\s]+", ",", re.sub(r"\.|\+PTX", "", capabilities.strip()))
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return [*command, str(source / "bindings" / "torch")], {
        "TCNN_CUDA_ARCHITECTURES": numbers,
        "CUDA_HOME": str(home),
        "PATH": path,
        "LIBRARY_PATH": str(stubs.resolve()),  # comes after the toolkit's own folder
        "LDFLAGS": "-Wl,--no-as-needed",
    }


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the wheels")
    parser.add_argument("--arch", default=os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"), help="compute capabilities")
    parser.add_argument("--work", type=Path, default=Path(".kernels"), help="folder of what is compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files at a time; each takes 4 GiB or so")
    parser.add_argument("--only", default="", help="compile this file alone, and pack nothing")
    parser.add_argument("--tiny-cuda-nn", type=Path, help="its source, to make its wheel, too")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    home = find_toolkit(os.environ.get("CUDA_HOME"))
    build_gsplat(options, home)
    if options.tiny_cuda_nn is not None:
        import torch

        stubs = options.work / "stubs"
        write_stubs(stubs, str(torch.version.cuda).partition(".")[0])
        command, more = tiny_cuda_nn(options.tiny_cuda_nn, options.folder, options.arch, home, stubs)
        subprocess.run(command, env={**os.environ, **more, "MAX_JOBS": str(options.jobs)}, check=True)


if __name__ == "__main__":
    main()
