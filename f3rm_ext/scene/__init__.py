"""A synthetic room to test on: ray traced, with exact depth, normals, labels and mesh. Importing this is cheap."""

from pathlib import Path

from f3rm_ext.scene.config import PictureConfig, SynthConfig

__all__ = ["PictureConfig", "SynthConfig", "synthesize", "take_picture"]


def synthesize(out: Path, config: SynthConfig, progress: bool = True) -> Path:
    """Writes a synthetic capture in nerfstudio's format; docs/synthetic-scene.md says what is in it.

    The capture is made in a hidden folder beside ``out`` and moved into place when complete. The same configuration
    gives the same files, byte for byte, on the same machine and library versions.

    Args:
        out: Folder to make. It may exist if it is empty, or with ``config.overwrite``.
        config: What to make.
        progress: Show a progress bar on stderr where that is a terminal.

    Returns:
        ``out``.

    Raises:
        f3rm_ext.errors.ConfigError: An option cannot work.
        f3rm_ext.errors.CaptureError: ``out`` is in use or cannot be written.
    """
    from f3rm_ext.scene.capture import write_capture  # numba and the kernels

    return write_capture(out, config, progress)


def take_picture(out: Path, config: PictureConfig) -> Path:
    """Writes one picture of the room to an image file.

    Args:
        out: File to write; its ending, .jpg or .png, says the format.
        config: What to show.

    Returns:
        ``out``.

    Raises:
        f3rm_ext.errors.ConfigError: An option cannot work.
        f3rm_ext.errors.CaptureError: ``out`` exists or cannot be written.
    """
    from f3rm_ext.scene.picture import write_picture

    return write_picture(out, config)
