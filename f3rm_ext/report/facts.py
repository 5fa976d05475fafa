"""Where and with what a report was made."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path

_PACKAGES = ("f3rm-ext", "nerfstudio", "torch", "numpy", "numba")


def machine_facts(device: str) -> list[tuple[str, str]]:
    """(name, value) of versions, device and date; no names of users, hosts or folders.

    Args:
        device: what the field was rendered on.
    """
    facts = [("date", time.strftime("%Y-%m-%d %H:%M %Z")), ("device", device or "cpu")]
    facts.append(("processor", f"{_processor()}, {os.cpu_count()} cores"))
    facts.append(("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"))
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    facts.append(("packages", ", ".join(versions)))
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
