"""``f3rm-ext doctor``: reports what is installed and how to get what is missing, offline and in seconds."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

import rich.box
import rich.markup
from rich.console import Console
from rich.table import Table

from f3rm_ext import __version__, compat
from f3rm_ext.errors import ConfigError, library_advice, reason_of
from f3rm_ext.utils import kernel_cache, threads
from f3rm_ext.utils.ffmpeg import provide_ffmpeg
from f3rm_ext.utils.libusb import LIBUSB, provide_libusb

_GIB = 1 << 30
_MIN_FREE_GIB = 5
_PACKAGES = {  # distribution: (module, whether it is essential, purpose)
    "torch": ("torch", True, "everything"),
    "nerfstudio": ("nerfstudio", True, "everything"),
    "viser": ("viser", True, "the viewer"),
    "numba": ("numba", True, "training on the CPU"),
    "pycolmap": ("pycolmap", False, "poses of photos (f3rm-ext sfm process)"),
    "open_clip_torch": ("open_clip", False, "CLIP features"),
    "gsplat": ("gsplat", False, "sugar-ext on CUDA, and splatfacto"),
    "tinycudann": ("tinycudann", False, "the fastest hash grid on CUDA (without it, Triton's is used)"),
    "triton": ("triton", False, "hash grids on CUDA without tiny-cuda-nn (it comes with PyTorch on Linux)"),
}


class Verdict(str, Enum):
    """Result of a check."""

    OK = "ok"
    ABSENT = "absent"
    """Something optional is missing."""
    BROKEN = "broken"
    """Something essential is missing or does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    """Group of checks."""
    name: str
    verdict: Verdict
    status: str
    """State of the part in words: a version, a path, or that it is missing."""
    advice: str = ""
    """What to do; empty if nothing needs to be done."""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {reason_of(error)}"


def check_packages() -> Iterator[Finding]:
    """Checks versions of packages and whether they can be imported."""
    yield Finding("packages", "f3rm_ext", Verdict.OK, __version__)
    advice = "" if (3, 10) <= sys.version_info < (3, 15) else "3.10 to 3.14 have been tried."
    yield Finding("packages", "python", Verdict.ABSENT if advice else Verdict.OK, platform.python_version(), advice)
    for distribution, (module, essential, purpose) in _PACKAGES.items():
        verdict = Verdict.BROKEN if essential else Verdict.ABSENT
        install = f"`pip install {distribution}`; needed for {purpose}."
        if distribution == "tinycudann":
            install = f"For {purpose}: see github.com/NVlabs/tiny-cuda-nn."
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("packages", distribution, verdict, "not installed", install)
            continue
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(module) is not None:
                yield Finding("packages", distribution, Verdict.OK, version)
                continue
        yield Finding("packages", distribution, verdict, f"{version}, but it cannot be imported", install)


def check_devices() -> Iterator[Finding]:
    """Checks CPU, GPUs and their memory."""
    yield Finding("devices", "cpu", Verdict.OK, f"{os.cpu_count()} cores, {platform.machine()}")
    import torch

    if not compat.has_cuda():
        if torch.version.cuda is None:
            status = "none: this PyTorch is built without CUDA"
            advice = "Training runs on the CPU; with an NVIDIA GPU, install a CUDA build of PyTorch."
        else:
            status = f"none seen by PyTorch (built for CUDA {torch.version.cuda})"
            advice = "Training runs on the CPU; with an NVIDIA GPU, check its driver with `nvidia-smi`."
        yield Finding("devices", "cuda", Verdict.ABSENT, status, advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0] / _GIB
        memory = f"{properties.total_memory / _GIB:.1f} GiB, {free:.1f} GiB free"
        yield Finding("devices", f"cuda:{index}", Verdict.OK, f"{properties.name}, {memory}")


def check_threads() -> Iterator[Finding]:
    """Checks how many threads compute on the CPU, what limits them, and how they wait."""
    advice = ""
    if threads.numba_layer() == "workqueue":
        advice = (
            "Install GNU OpenMP (Debian: apt-get install libgomp1): with the layer `workqueue`, numba ends the process "
            "when two threads compute at once."
        )
    yield Finding("devices", "threads", Verdict.ABSENT if advice else Verdict.OK, threads.describe(), advice)


def _cuda_grids(hash_backends: ModuleType) -> Iterator[Finding]:
    """Tries the hash grid's CUDA backends, where there is a GPU."""
    if not compat.has_cuda():
        for name, module in (("tcnn", "tinycudann"), ("triton", "triton")):
            there = importlib.util.find_spec(module) is not None
            status = f"{'installed' if there else 'not installed'}; not needed without a GPU"
            yield Finding("backends", f"hash grid ({name})", Verdict.OK if there else Verdict.ABSENT, status)
        return
    import torch

    from f3rm_ext.utils.kernel_trials import REMEDIES

    device = torch.device("cuda", torch.cuda.current_device())
    reasons = {name: hash_backends.try_backend(name, device) for name in hash_backends.FASTEST_FIRST}
    taken = next((name for name, reason in reasons.items() if reason is None), "torch")
    for name, reason in reasons.items():
        if reason is None:
            status = f"works on {device}; {'`auto` takes it' if name == taken else 'used if chosen'}"
            yield Finding("backends", f"hash grid ({name})", Verdict.OK, status)
            continue
        advice = f"Not needed: `auto` takes {taken}."
        if taken == "torch":
            advice = f"`auto` takes torch, which is slower: {REMEDIES[name]}."
        yield Finding("backends", f"hash grid ({name})", Verdict.ABSENT, reason, advice)


def check_backends() -> Iterator[Finding]:
    """Checks which implementations of the hash grid work, which one `auto` takes, and gsplat."""
    try:
        hash_backends = importlib.import_module("f3rm_ext.nerf.hash_backends")
        importlib.import_module("f3rm_ext.nerf.hash_grid")
        yield Finding("backends", "hash grid (torch, numba)", Verdict.OK, "works on CPU and CUDA")
    except Exception as error:
        yield Finding("backends", "hash grid (torch, numba)", Verdict.BROKEN, _reason(error), "Install f3rm_ext again.")
    else:
        yield from _cuda_grids(hash_backends)
    try:
        importlib.import_module("gsplat.strategy")
        works, status, advice = True, "importable; its CUDA kernels are not needed without a GPU", ""
        if compat.has_cuda():
            works, status, advice = compat.describe_gsplat()
        yield Finding("backends", "gsplat", Verdict.OK if works else Verdict.ABSENT, status, advice)
    except Exception as error:
        advice = "`pip install gsplat==1.4.0`; splatfacto needs it, and sugar-ext on CUDA (but not on the CPU)."
        yield Finding("backends", "gsplat", Verdict.ABSENT, _reason(error), advice)


def check_open3d() -> Iterator[Finding]:
    """Checks whether meshes can be made, and whose libusb Open3D gets."""
    from f3rm_ext.utils.open3d_library import open3d

    try:
        version = open3d().__version__
    except ConfigError as error:
        yield Finding("backends", "open3d", Verdict.ABSENT, "cannot be imported", str(error))
        return
    library = provide_libusb()
    source = "the system's libusb" if library == LIBUSB else f"libusb from {library}"
    yield Finding("backends", "open3d", Verdict.OK, f"{version}, with {source}")


def check_weights() -> Iterator[Finding]:
    """Checks extractors and whether their weights and those of LPIPS are on this machine."""
    try:
        from f3rm_ext.features.extractors.registry import available_extractors

        extractors = available_extractors()
    except Exception as error:
        yield Finding("weights", "extractors", Verdict.BROKEN, _reason(error), "Install f3rm_ext again.")
        extractors = {}
    for name, info in extractors.items():
        try:
            status = info.weights_status()
        except Exception as error:
            advice = f"Mend or remove the package that provides it ({info.provider})."
            yield Finding("weights", name, Verdict.ABSENT, _reason(error), advice)
            continue
        if status.missing:
            yield Finding("weights", name, Verdict.ABSENT, "weights not on this machine", status.advice)
        else:
            yield Finding("weights", name, Verdict.OK, str(status.path) if status.path else status.advice)
    from f3rm_ext.model_components.image_metrics import find_alexnet

    path = find_alexnet()
    if path.is_file():
        yield Finding("weights", "LPIPS (AlexNet)", Verdict.OK, str(path))
    else:
        advice = f"Fetched by the first evaluation; off-line, put the file at {path}. Other metrics do not need it."
        yield Finding("weights", "LPIPS (AlexNet)", Verdict.ABSENT, "not on this machine", advice)


def check_storage() -> Iterator[Finding]:
    """Checks the feature store's folder and its disk, and that compiled kernels can be kept."""
    if kernel_cache.is_temporary():
        advice = "Every command compiles its kernels anew: set F3RM_EXT_CACHE to a folder that you can write to."
        yield Finding("storage", "compiled kernels", Verdict.ABSENT, "nowhere to keep them", advice)
    try:
        folder = kernel_cache.user_cache()
    except ConfigError as error:
        yield Finding("storage", "feature store", Verdict.ABSENT, "nowhere to keep it", str(error))
        return
    existing = kernel_cache.nearest_existing(folder)
    free = shutil.disk_usage(existing).free / _GIB
    status = f"{folder} ({free:.1f} GiB free)"
    if not os.access(existing, os.W_OK):
        yield Finding("storage", "feature store", Verdict.ABSENT, f"{folder} cannot be written", "Set F3RM_EXT_CACHE.")
    elif free < _MIN_FREE_GIB:
        yield Finding("storage", "feature store", Verdict.ABSENT, status, "Make room, or set F3RM_EXT_CACHE elsewhere.")
    else:
        yield Finding("storage", "feature store", Verdict.OK, status)


def check_methods() -> Iterator[Finding]:
    """Checks that every method registered with nerfstudio loads. One that does not stops every ``ns-*`` command."""
    compat.tolerate_missing_gsplat()
    for group in ("nerfstudio.method_configs", "nerfstudio.dataparser_configs"):
        for point in importlib.metadata.entry_points(group=group):
            name = f"{point.name} ({group.split('.')[1].removesuffix('_configs')})"
            package = point.dist.name if point.dist else point.value.partition(":")[0]
            try:
                loaded = point.load()
            except Exception as error:
                advice = library_advice(error) or f"mend or uninstall {package}"
                advice = f"Until this loads, no ns-* command works: {advice}."
                yield Finding("methods", name, Verdict.BROKEN, _reason(error), advice)
                continue
            broken = getattr(getattr(loaded, "config", None), "reason", "")
            if broken and package.replace("-", "_") == "f3rm_ext":
                yield Finding("methods", name, Verdict.BROKEN, broken, "Install what is missing (see above).")
            else:
                yield Finding("methods", name, Verdict.OK, f"registered by {package}")


def check_programs() -> Iterator[Finding]:
    """Checks programs that other commands call."""
    path = provide_ffmpeg()
    if path:
        yield Finding("programs", "ffmpeg", Verdict.OK, str(Path(path).resolve()))
    else:
        advice = "`pip install imageio-ffmpeg`, or install ffmpeg: `ns-render` and videos need it."
        yield Finding("programs", "ffmpeg", Verdict.ABSENT, "not on the PATH", advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_packages,
    check_devices,
    check_threads,
    check_backends,
    check_open3d,
    check_weights,
    check_storage,
    check_methods,
    check_programs,
)


def examine() -> list[Finding]:
    """Runs all checks and returns their findings. A check that fails is a finding too."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations in other packages
                findings.extend(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(name, name, Verdict.BROKEN, _reason(error), "Install f3rm_ext again."))
    return findings


_STYLES = {Verdict.OK: "green", Verdict.ABSENT: "yellow", Verdict.BROKEN: "bold red"}


@dataclass
class Doctor:
    """Report what is installed, and how to get what is missing. Works offline."""

    json: bool = False
    """Print JSON instead of a table."""

    def main(self) -> int:
        """Prints the report. Returns exit code 1 if something essential is broken."""
        findings = examine()
        broken = any(finding.verdict is Verdict.BROKEN for finding in findings)
        if self.json:
            print(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
            return int(broken)
        console = Console()
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in ("", "what", "", "found"):
            table.add_column(column, overflow="fold")
        topic = ""
        for finding in findings:
            mark = f"[{_STYLES[finding.verdict]}]{finding.verdict.value}"
            name, status = rich.markup.escape(finding.name), rich.markup.escape(finding.status)
            table.add_row(f"[bold]{finding.topic}" if finding.topic != topic else "", name, mark, status)
            topic = finding.topic
        console.print(table)
        for finding in findings:
            if finding.advice:
                console.print(f"[{_STYLES[finding.verdict]}]{rich.markup.escape(finding.name)}[/]:", end=" ")
                console.print(finding.advice, markup=False, highlight=False, soft_wrap=True)
        print("\nSomething essential is broken (see above)." if broken else "\nEverything essential works.")
        return int(broken)
