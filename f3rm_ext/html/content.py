"""The content of the demo's report, and facts about captures and machines for all reports."""

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PHOTO_FOLDERS = ("images", "photos", "input")
"""Names of folders that do not tell what the photos show."""
_PACKAGES = ("f3rm-ext", "nerfstudio", "torch", "numpy", "numba")


def capture_name(folder: Path) -> str:
    """Returns the name of a capture, of a folder of photos, or of a video.

    >>> tuple(capture_name(Path(path)) for path in ("/data/fox", "/data/fox/images", "/data/fox/transforms.json"))
    ('fox', 'fox', 'fox')
    """
    folder = folder.resolve()
    if folder.suffix == ".json":
        folder = folder.parent
    named = folder.parent.name if folder.name.lower() in _PHOTO_FOLDERS else ""
    return named or (folder.stem if folder.is_file() else folder.name)


@dataclass
class Stage:
    """One stage of the demo."""

    name: str
    seconds: float
    """Wall time, summed over all runs of the stage."""
    command: str = ""
    """The command, as a user would type it."""
    reused: bool = False
    """Whether the stage was finished by an earlier call of the demo."""
    note: str = ""
    """A remark, such as the number of steps."""


@dataclass
class ReportContent:
    """Everything that the report shows."""

    title: str
    data_name: str
    synthetic: bool
    measured: dict[str, Any]
    """Content of measure.json."""
    pictures: Path
    """Folder of the pictures that ``measured`` names."""
    metrics: dict[str, float]
    """Means over the held-out views, as ns-eval names them."""
    lpips_note: str = ""
    coverage: dict[str, Any] = field(default_factory=dict)
    """Content of coverage.json."""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """TensorBoard scalars by tag."""
    stages: list[Stage] = field(default_factory=list)
    folder: str = "."
    """Folder in which the commands were run, as the user would write it."""
    next_commands: list[tuple[str, str]] = field(default_factory=list)
    """Commands to try next: (purpose, command)."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Versions, device and similar facts: (name, value)."""
    splats_page: str = ""
    """File of the page of the splats, beside the report; empty where there is none."""
    method: str = "f3rm-ext-lite"

    @property
    def is_field(self) -> bool:
        """Whether a field was trained; otherwise splats were."""
        return self.method.startswith("f3rm")


def machine_facts(device: str) -> list[tuple[str, str]]:
    """Returns versions, device and date as (name, value), without names of users, hosts or folders."""
    return [
        ("date", time.strftime("%Y-%m-%d %H:%M %Z")),
        ("device", device or "cpu"),
        ("processor", f"{processor()}, {os.cpu_count()} cores"),
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in package_versions(_PACKAGES).items())),
    ]


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def processor() -> str:
    """Returns the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
