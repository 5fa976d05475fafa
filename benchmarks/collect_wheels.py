"""Collects the wheels that a machine without network needs for the GPU day, in folders small enough to be sent.

    python benchmarks/collect_wheels.py wheels              # into wheels/part-1, wheels/part-2 … and wheels/test-room
    python benchmarks/collect_wheels.py wheels --all        # also what such a machine usually has beside PyTorch

The machine has to have Python 3.12 with PyTorch and Triton, and what is listed in ``USUAL``. Left out are open3d, which
only ns-export and some data parsers import, and everything else that neither training nor evaluation imports: the list
was made by importing what the GPU day runs. benchmarks/gpu_day.sh installs the wheels there.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from f3rm_ext.synthetic import SynthConfig, synthesize

TINY_ROOM = SynthConfig(num_images=12, width=64, height=48, seed=1, light_rays=1, holdout_every=4)
"""As in tests/conftest.py."""
NEEDED = (
    "nerfstudio==1.1.5",
    "gsplat==1.4.0",
    "nerfacc==0.5.2",
    "viser==0.2.7",
    "splines==0.3.0",
    "open_clip_torch==2.32.0",
    *("appdirs", "beartype", "dill", "docstring_parser", "fpsample", "ftfy", "mediapy", "msgspec", "multiprocess"),
    *("pathos", "pox", "ppft", "pyquaternion", "pytorch-msssim", "rawpy", "tensorly", "tyro", "typeguard", "wandb"),
    *("setuptools", "trimesh", "wcwidth", "websockets", "zstandard"),
    # of f3rm-ext sfm train
    *("accelerate", "diffusers"),
    # of wandb
    *("annotated-types", "platformdirs", "pydantic==2.14.3", "pydantic_core==2.50.4", "typing-inspection"),
    # of mediapy
    *("ipython", "traitlets", "decorator", "matplotlib-inline"),
)
"""Wheels to bring; versions are nerfstudio's pins, and those of pairs that have to fit each other."""
USUAL = (
    *("numpy<2.6", "scipy", "numba", "llvmlite", "opencv-python-headless", "scikit-image", "matplotlib", "pillow"),
    *("tensorboard", "tensorboard-data-server", "torchmetrics", "lightning-utilities", "transformers", "tokenizers"),
    *("safetensors", "huggingface-hub", "rich", "pyyaml", "requests", "jaxtyping", "imageio", "networkx", "ninja"),
    *("pytest", "pytest-timeout", "pytest-xdist", "psutil", "tqdm", "protobuf", "h5py", "regex"),
)
"""What the machine is expected to have, in any recent version; brought along with --all."""
GLIBC = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_17")
PART_MIB = 40
"""With the tracked files and what else is carried, a part stays below the 64 MiB that one call may send."""


def download(names: Iterable[str], folder: Path, python: str) -> None:
    """Downloads wheels for Linux on x86-64, each without the packages it needs."""
    platforms = [f"manylinux_{version}_x86_64" for version in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *names], check=True)


def split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Divides files into parts, first fit, the largest first.

    Args:
        limit: bytes of a part at most; a larger file is a part of its own.

    >>> split({"a": 5, "b": 4, "c": 3, "d": 9}, 8)
    [['d'], ['a', 'c'], ['b']]
    """
    parts: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        for part in parts:
            if sum(sizes[other] for other in part) + sizes[name] <= limit:
                part.append(name)
                break
        else:
            parts.append([name])
    return parts


def main() -> None:
    """Downloads, divides, and prints the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to make; must not exist or be empty")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--part-mib", type=float, default=PART_MIB, help="size of a part at most")
    parser.add_argument("--all", action="store_true", help="also what the machine is expected to have")
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"The folder {options.folder} is not empty: name another one.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        download([*NEEDED, *(USUAL if options.all else ())], folder, options.python)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        for index, part in enumerate(split(sizes, int(options.part_mib * 2**20)), 1):
            target = options.folder / f"part-{index}"
            target.mkdir(parents=True)
            for name in part:
                shutil.move(folder / name, target / name)
            print(f"{target}: {len(part)} wheels, {sum(sizes[name] for name in part) / 2**20:.1f} MiB")
    # The tests there need the tiny room, which only a machine with open3d can draw.
    print(f"{synthesize(options.folder / 'test-room', TINY_ROOM, progress=False)}: the capture of tests/gpu")
    for name in sorted(sizes, key=lambda name: -sizes[name])[:5]:
        print(f"  {sizes[name] / 2**20:6.1f} MiB  {name}")
    print(f"{len(sizes)} wheels, {sum(sizes.values()) / 2**20:.1f} MiB in all.")


if __name__ == "__main__":
    main()
