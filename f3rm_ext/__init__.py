"""f3rm_ext: feature fields and Gaussian splats for Nerfstudio. :mod:`f3rm_ext.api` describes the public functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from f3rm_ext.utils.kernel_cache import ensure_kernel_cache

if TYPE_CHECKING:
    from f3rm_ext.api import EstimatedPoses, Match, Scene, estimate_poses, extract_features, load

__version__ = "0.1.0"

__all__ = ["EstimatedPoses", "Match", "Scene", "__version__", "estimate_poses", "extract_features", "load"]

ensure_kernel_cache()  # before any kernel is imported


def __getattr__(name: str) -> Any:
    """Imports the public functions when they are first used: torch alone takes seconds (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("f3rm_ext.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
