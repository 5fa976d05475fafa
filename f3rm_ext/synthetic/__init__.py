"""A synthetic, ray-traced room with exact depth, normals, labels and mesh. Importing this package is cheap."""

from pathlib import Path

from f3rm_ext.synthetic.config import PictureConfig, SynthConfig

__all__ = ["PictureConfig", "SynthConfig", "synthesize", "take_picture"]


def synthesize(out: Path, config: SynthConfig, progress: bool = True) -> Path:
    """Writes a synthetic capture in nerfstudio's format, which docs/synthetic-scene.md describes.

    The capture is made in a hidden folder beside ``out`` and moved into place once it is complete. On the same machine
    and library versions, the same options give the same files, byte for byte.

    Args:
        out: Folder to make. It may exist if it is empty, or with ``config.overwrite``.
        progress: Show a progress bar on stderr if that is a terminal.

    Returns:
        ``out``.

    Raises:
        f3rm_ext.errors.ConfigError: An option is out of range.
        f3rm_ext.errors.CaptureError: ``out`` is in use or cannot be written.
    """
    from f3rm_ext.synthetic.capture import write_capture  # imports numba and compiles kernels

    return write_capture(out, config, progress)


def take_picture(out: Path, config: PictureConfig) -> Path:
    """Writes one picture of the room to an image file.

    Args:
        out: File to write; its suffix, .jpg or .png, determines the format.

    Returns:
        ``out``.

    Raises:
        f3rm_ext.errors.ConfigError: An option is out of range, or the suffix is neither .jpg nor .png.
        f3rm_ext.errors.CaptureError: ``out`` exists or cannot be written.
    """
    from f3rm_ext.synthetic.picture import write_picture

    return write_picture(out, config)
