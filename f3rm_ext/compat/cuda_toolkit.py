"""Whether PyTorch finds the CUDA toolkit with which gsplat compiles its kernels at first use."""

import os
import shutil
from pathlib import Path

_HEADER = "cuda_runtime.h"
_LIKELY = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/usr/lib/cuda")


def missing_headers() -> tuple[str, str] | None:
    """Returns where PyTorch will not find CUDA's headers, and what to do, as middles of a sentence; else None.

    PyTorch takes the folder above that of ``nvcc`` for the toolkit, unless ``CUDA_HOME`` names it. Where ``nvcc`` is a
    wrapper script, such as /usr/local/bin/nvcc, no headers are there.
    """
    home = _home()
    if home is None or _has_headers(home):
        return None
    toolkit = next((folder for folder in _likely_toolkits() if _has_headers(folder)), None)
    name = toolkit or f"the folder of the CUDA toolkit, which has include/{_HEADER}"
    return f"PyTorch looks for CUDA's headers in {home / 'include'}, where they are not", f"set CUDA_HOME to {name}"


def _home() -> Path | None:
    """The toolkit by the rule of ``torch.utils.cpp_extension``, which answers once per process."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    compiler = shutil.which("nvcc")
    return None if compiler is None else Path(compiler).parent.parent


def _has_headers(home: Path) -> bool:
    named = (os.environ.get(name, "") for name in ("CUDA_INC_PATH", "CPATH", "CPLUS_INCLUDE_PATH"))
    folders = [home / "include", *(Path(path) for paths in named for path in paths.split(os.pathsep) if path)]
    return any((folder / _HEADER).is_file() for folder in folders)


def _likely_toolkits() -> list[Path]:
    root = Path("/")
    return [path for pattern in _LIKELY for path in sorted(root.glob(pattern[1:]), reverse=True)]
