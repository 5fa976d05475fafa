"""Large files written piece by piece: complete or absent."""

import contextlib
import os
import zipfile
from collections.abc import Iterable, Iterator
from io import BufferedIOBase, BufferedWriter
from pathlib import Path

import numpy as np

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import open_atomic


@contextlib.contextmanager
def replace_file(path: Path, option: str = "--out") -> Iterator[BufferedWriter]:
    """Opens a temporary file that takes the name when the ``with`` block succeeds, and is deleted otherwise.

    Args:
        path: the name; its folder is created if needed.
        option: the option that gave the name, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as stream:
            yield stream
    except OSError as error:
        raise write_error(path, error, option) from error


def write_file(path: Path, data: bytes, option: str = "--out") -> None:
    """Writes the whole content of a file, see :func:`replace_file`."""
    with replace_file(path, option) as stream:
        stream.write(data)


def write_error(path: Path, error: OSError, option: str = "--out") -> ConfigError:
    """Returns the error for a file that cannot be written."""
    return ConfigError(
        f"{path} cannot be written ({error.strerror or error}): free some space or choose another {option}."
    )


def require_writable(path: Path, option: str = "--out") -> None:
    """Raises ConfigError where :func:`replace_file` could not write; to be called before the work begins."""
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(None, "its folder is read-only")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another {option}.") from error


class NpzWriter(zipfile.ZipFile):
    """Writes an uncompressed NPZ file array by array, and arrays too large for memory in chunks of rows."""

    def __init__(self, stream: BufferedIOBase) -> None:
        super().__init__(stream, "w", zipfile.ZIP_STORED)

    def array(self, name: str, values: np.ndarray) -> None:
        """Writes an array."""
        with self.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, values, allow_pickle=False)

    def rows(self, name: str, shape: tuple[int, int], dtype: np.dtype, chunks: Iterable[np.ndarray]) -> None:
        """Writes a matrix from chunks of its rows.

        Raises:
            ValueError: together the chunks have another shape.
        """
        written = 0
        with self.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for chunk in chunks:
                if chunk.shape[1:] != shape[1:]:
                    raise ValueError(f"a chunk of {name} has shape {chunk.shape} where rows have {shape[1:]}")
                member.write(np.ascontiguousarray(chunk, dtype=dtype).tobytes())
                written += len(chunk)
        if written != shape[0]:
            raise ValueError(f"{name} has {written} rows where {shape[0]} were announced")
