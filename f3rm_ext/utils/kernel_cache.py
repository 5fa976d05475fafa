"""Finds the folders for what is kept between commands, and one in which numba can keep compiled kernels."""

import atexit
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from f3rm_ext.errors import ConfigError

VARIABLE = "NUMBA_CACHE_DIR"
PREFIX = "f3rm_ext-kernels-"


def user_cache() -> Path:
    """Returns the folder for what is kept between commands: $F3RM_EXT_CACHE, otherwise ~/.cache/f3rm_ext.

    Raises:
        ConfigError: the variable is not set, and this user has no home folder.
    """
    try:
        return Path(os.environ.get("F3RM_EXT_CACHE") or "~/.cache/f3rm_ext").expanduser()
    except RuntimeError as error:
        raise ConfigError("There is no home folder: set F3RM_EXT_CACHE to a folder that you can write to.") from error


def ensure_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Gives numba a folder for compiled kernels where it has none, for this process and those it starts.

    numba keeps them beside the code or in the user's cache folder, and its kernels cannot even be imported where
    neither can be written, as by a user without a home in a container. They are kept in $F3RM_EXT_CACHE then; where
    that is not set or cannot be written, in a folder that goes with this process.
    """
    if sys.platform != "linux" or environment.get(VARIABLE):
        return
    # Without HOME it is that of the system's list of users; who is not in it has none, and "~" stays as it is.
    home = environment.get("HOME") or os.path.expanduser("~")  # pathlib's fails there
    cache = Path(environment.get("XDG_CACHE_HOME") or f"{home}/.cache")
    if any(_is_writable(folder) for folder in (Path(__file__).parents[1], cache)):
        return
    chosen = environment.get("F3RM_EXT_CACHE")
    if chosen and _is_writable(Path(chosen)):
        environment[VARIABLE] = str(Path(chosen).absolute() / "numba")
        return
    import shutil
    import tempfile

    # Not a name that others can guess: what numba reads there runs.
    folder = environment[VARIABLE] = tempfile.mkdtemp(prefix=PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def is_temporary() -> bool:
    """Returns whether every command has to compile its kernels anew."""
    return Path(os.environ.get(VARIABLE, "")).name.startswith(PREFIX)


def _is_writable(folder: Path) -> bool:
    """Whether files can be written into a folder, which is made if need be."""
    return os.access(nearest_existing(folder), os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """Returns the path itself or, where it is not there, the nearest of its parents that is."""
    return next((each for each in (path, *path.parents) if each.exists()), Path(path.anchor))
