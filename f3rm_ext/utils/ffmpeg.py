"""An ffmpeg for machines without one."""

import os
import shutil
from pathlib import Path

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import link_atomic
from f3rm_ext.utils.kernel_cache import user_cache


def provide_ffmpeg() -> str | None:
    """Makes the ffmpeg of the package imageio-ffmpeg available to nerfstudio and mediapy if none is installed.

    They look for a program called ffmpeg on the PATH, but that package's program has another name. So a link to it is
    put in the cache folder ($F3RM_EXT_CACHE, otherwise ~/.cache/f3rm_ext), which is appended to the PATH. Takes almost
    no time once the link exists; safe to call twice.

    Returns:
        Path of the ffmpeg that will be used; None if there is none or the link cannot be written.
    """
    if installed := shutil.which("ffmpeg"):
        return installed
    try:
        folder = user_cache() / "bin"
        link = folder / ("ffmpeg.exe" if os.name == "nt" else "ffmpeg")
        if not os.access(link, os.X_OK):  # missing, or left by an environment that was removed
            import imageio_ffmpeg

            link_atomic(link, Path(imageio_ffmpeg.get_ffmpeg_exe()).absolute())
    except (ConfigError, ImportError, RuntimeError, OSError):  # RuntimeError: no ffmpeg in the package
        return None
    os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH", os.defpath), str(folder.absolute()))))
    return shutil.which("ffmpeg")
