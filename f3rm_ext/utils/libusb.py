"""A libusb for Open3D on machines without one."""

import contextlib
import ctypes
import functools
import importlib.util
import sys
from pathlib import Path

from f3rm_ext.utils.atomic_files import link_atomic

LIBUSB = "libusb-1.0.so.0"


@functools.cache
def provide_libusb() -> str | None:
    """Makes the libusb of the package libusb-package available to Open3D if the system has none.

    Open3D's wheels for Linux link against it and do not bring it. It is loaded into this process, where Open3D then
    finds it by its name. Programs that import Open3D before this package, such as ns-export, look for it in the folder
    ``lib`` of their environment, so a link is put there, unless Python is not one of an environment.

    Returns:
        ``libusb-1.0.so.0`` where it is the system's or not needed, else the path of the package's; None without any.
    """
    if sys.platform != "linux":
        return LIBUSB
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBUSB)
        return LIBUSB
    try:
        import libusb_package

        path = Path(str(libusb_package.get_library_path()))
        ctypes.CDLL(str(path))
    except (ImportError, OSError):
        return None
    with contextlib.suppress(OSError):
        _link_into_environment(path)
    return str(path)


def _link_into_environment(library: Path) -> None:
    """Puts a link to the library where Open3D's own search path leads: lib/ of a virtual or conda environment."""
    prefix, spec = Path(sys.prefix), importlib.util.find_spec("open3d")
    is_environment = sys.prefix != sys.base_prefix or (prefix / "conda-meta").is_dir()
    if not is_environment or spec is None or spec.origin is None:
        return
    link = Path(spec.origin).parents[3] / LIBUSB
    if link.parent == prefix / "lib" and not link.exists():
        link_atomic(link, library)
