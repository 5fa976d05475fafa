"""gsplat: life without it, its version, and whether its CUDA kernels are compiled or can be."""

import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

from f3rm_ext.errors import ConfigError, reason_of

_HEADER = "cuda_runtime.h"
_LIKELY = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/usr/lib/cuda")


def _make_stand_ins(reason: str) -> dict[str, types.ModuleType]:
    """Returns stand-ins for the modules that splatfacto imports, whose classes raise an explanation when used."""

    class DefaultStrategy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ImportError(f"gsplat cannot be imported ({reason}): `pip install gsplat==1.4.0` and try again.")

    package, strategy, rendering = (types.ModuleType(f"gsplat{part}") for part in ("", ".strategy", ".rendering"))
    package.__path__ = []
    strategy.DefaultStrategy = DefaultStrategy  # type: ignore[attr-defined]
    rendering.rasterization = DefaultStrategy  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, strategy, rendering)}


def tolerate_missing_gsplat() -> None:
    """Lets every method but splatfacto run if gsplat is missing or broken.

    Nerfstudio 1.1.5 imports splatfacto with every trainer and viewer, and splatfacto imports gsplat at its top, so
    without gsplat no ``ns-*`` command starts. If importing gsplat fails, splatfacto is imported here with a stand-in,
    which is removed again at once: for all other code gsplat stays missing. Must be called before nerfstudio imports
    splatfacto; costs nothing if gsplat works.
    """
    if "nerfstudio.models.splatfacto" in sys.modules:
        return
    try:
        import gsplat.strategy  # noqa: F401

        return
    except Exception as error:  # a broken build can raise anything, such as OSError or RuntimeError
        stand_in = _make_stand_ins(f"{type(error).__name__}: {error}")
    before = {name: sys.modules[name] for name in stand_in if name in sys.modules}
    sys.modules.update(stand_in)
    try:
        import nerfstudio.models.splatfacto  # noqa: F401
    finally:
        for name in stand_in:
            del sys.modules[name]
        sys.modules.update(before)


def gsplat_version() -> tuple[int, int]:
    """Returns the major and minor version of gsplat.

    Raises:
        ConfigError: it cannot be imported, or that version cannot be used.
    """
    try:
        import gsplat
    except Exception as error:  # a broken build can raise anything, such as OSError or RuntimeError
        raise ConfigError(
            f"Splats on CUDA need gsplat, which cannot be imported ({reason_of(error)}): `pip install gsplat==1.4.0`, "
            "or use --machine.device-type cpu."
        ) from error

    major, minor = (int(number) for number in gsplat.__version__.split(".")[:2])
    if (major, minor) not in ((1, 4), (1, 5)):
        raise ConfigError(f"Splats need gsplat 1.4 or 1.5, not {gsplat.__version__}: `pip install gsplat==1.4.0`.")
    return major, minor


def _gsplat_kernels() -> Any:
    """Returns gsplat's CUDA kernels, compiling them first if needed (minutes); None if they cannot be compiled."""
    from gsplat.cuda import _backend

    return _backend._C  # type: ignore[attr-defined]


def _gsplat_is_compiled() -> bool:
    """Returns whether gsplat's kernels came with it, were compiled by an earlier process, or are imported."""
    import importlib.util

    from torch.utils.cpp_extension import _get_build_directory

    if "gsplat.cuda._backend" in sys.modules or importlib.util.find_spec("gsplat.csrc") is not None:
        return True
    return os.path.isfile(os.path.join(_get_build_directory("gsplat_cuda", verbose=False), "gsplat_cuda.so"))


def gsplat_wheels() -> str | None:
    """Returns the URL of the wheel index with gsplat 1.4.0 for this Python, torch and CUDA; None if there is none."""
    import torch

    version = torch.__version__.split("+")[0].split(".")
    cuda = (torch.version.cuda or "").replace(".", "")
    built = {"20": ("118",), "21": ("118", "121"), "22": ("118", "121"), "23": ("118", "121")}
    built["24"] = ("118", "121", "124")
    if sys.version_info[:2] != (3, 10) or cuda not in built.get("".join(version[:2]), ()):
        return None
    return f"https://docs.gsplat.studio/whl/pt{''.join(version[:2])}cu{cuda}"


def gsplat_advice() -> str:
    """Returns how to get CUDA kernels for gsplat, as the middle of a sentence."""
    import torch

    toolkit = f"install the CUDA toolkit {torch.version.cuda or 'of the same version as PyTorch'} (its compiler nvcc)"
    wheels = gsplat_wheels()
    if wheels is None:
        return f"{toolkit}, with which gsplat compiles them at its first use"
    return f"`pip install gsplat==1.4.0 --index-url {wheels}`, or {toolkit}"


def check_gsplat_kernels() -> None:
    """Makes sure that gsplat can render on CUDA; compiles its kernels if that was not done yet.

    gsplat comes from PyPI as source. If it cannot be compiled, its import still succeeds, and its first use fails with
    ``'NoneType' object has no attribute 'CameraModelType'``.

    Raises:
        ConfigError: gsplat cannot render on CUDA.
    """
    gsplat_version()
    reason, advice = "they are not compiled, and there is no CUDA toolkit to compile them", gsplat_advice()
    if not _gsplat_is_compiled() and (missing := _find_missing_headers()) is not None:
        reason, advice = missing
    else:
        try:
            if _gsplat_kernels() is not None:
                return
        except Exception as error:  # errors of compilers, linkers and loaders
            reason = reason_of(error)
    raise ConfigError(
        f"Splats cannot be rendered on CUDA, because gsplat has no kernels here ({reason}): {advice}, or use "
        "--machine.device-type cpu."
    )


def has_gsplat_kernels() -> bool:
    """Returns whether gsplat's kernels can be called; see :func:`check_gsplat_kernels`."""
    try:
        return _gsplat_kernels() is not None
    except Exception:  # errors of compilers, linkers and loaders
        return False


def describe_gsplat() -> tuple[bool, str, str]:
    """Returns whether gsplat can render on CUDA, what is there, and advice; compiles nothing to find out."""
    import importlib.util

    try:
        gsplat_version()
        if importlib.util.find_spec("gsplat.csrc") is not None:
            import gsplat.csrc  # noqa: F401  # pyright: ignore[reportMissingImports]

            return True, "with CUDA kernels", ""
        reason = "not compiled"
    except ConfigError as error:
        return False, "missing or of a version that cannot be used", str(error)
    except ImportError as error:
        reason = reason_of(error)
    if not _gsplat_is_compiled() and (missing := _find_missing_headers()) is not None:
        return (
            False,
            f"without CUDA kernels ({reason}, and {missing[0]})",
            f"For sugar-ext and splatfacto {missing[1]}.",
        )
    if shutil.which("nvcc"):
        return True, f"its CUDA kernels ({reason}) are compiled at first use, which takes minutes", ""
    advice = gsplat_advice()
    return False, f"without CUDA kernels ({reason}, and no nvcc)", f"For sugar-ext and splatfacto {advice}."


def _find_missing_headers() -> tuple[str, str] | None:
    """Returns where PyTorch will not find CUDA's headers, and what to do, as middles of a sentence; else None.

    PyTorch takes the folder above that of ``nvcc`` for the toolkit, unless ``CUDA_HOME`` names it. Where ``nvcc`` is a
    wrapper script, such as /usr/local/bin/nvcc, no headers are there.
    """
    home = _toolkit_folder()
    if home is None or _has_headers(home):
        return None
    likely = (folder for pattern in _LIKELY for folder in sorted(Path("/").glob(pattern[1:]), reverse=True))
    toolkit = next(filter(_has_headers, likely), None)
    name = toolkit or f"the folder of the CUDA toolkit, which has include/{_HEADER}"
    return f"PyTorch looks for CUDA's headers in {home / 'include'}, where they are not", f"set CUDA_HOME to {name}"


def _toolkit_folder() -> Path | None:
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
