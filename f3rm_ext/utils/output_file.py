"""Large files written piece by piece: whole or not there, and never over somebody else's."""

import contextlib
import json
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import sync_folder
from f3rm_ext.utils.ply import read_comments

PROVENANCE = "provenance"
"""Name of the entry in NPZ files that holds the provenance, as JSON."""


@contextlib.contextmanager
def replacing(path: Path, option: str = "--out") -> Iterator[BufferedIOBase]:
    """A stream to a temporary file that gets its name when the ``with`` block ends well, and is gone otherwise.

    Args:
        path: the name; its folder is made where it is not there.
        option: that gave the name, for messages.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}): free some space or choose another {option}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def require_writable(path: Path, option: str = "--out") -> None:
    """Raises ConfigError where a file of this name cannot be; found out before the work and not after it.

    Args:
        path: the name; its folder is made where it is not there.
        option: that gave the name, for messages.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another {option}.") from error


class NpzWriter:
    """An NPZ file (not compressed) written array by array; one that is too large for memory in chunks of rows.

    Args:
        stream: where to, at its start.
    """

    def __init__(self, stream: BufferedIOBase) -> None:
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True)

    def __enter__(self) -> "NpzWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def array(self, name: str, values: np.ndarray) -> None:
        """Writes an array."""
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, values, allow_pickle=False)

    def rows(self, name: str, shape: tuple[int, int], dtype: np.dtype, chunks: Iterable[np.ndarray]) -> None:
        """Writes a matrix from chunks of its rows.

        Args:
            name: of the array.
            shape: of all of it.
            dtype: of all of it.
            chunks: in order; together they have that shape.

        Raises:
            ValueError: they have not.
        """
        written = 0
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for chunk in chunks:
                if chunk.shape[1:] != shape[1:]:
                    raise ValueError(f"a chunk of {name} has shape {chunk.shape} where rows have {shape[1:]}")
                member.write(np.ascontiguousarray(chunk, dtype=dtype).tobytes())
                written += len(chunk)
        if written != shape[0]:
            raise ValueError(f"{name} has {written} rows where {shape[0]} were announced")


def require_ours(path: Path, made_by: str) -> None:
    """Raises ConfigError where a file is there that was not made by a command of this name, or a folder."""
    if path.exists() and _maker(path) != made_by:
        raise ConfigError(
            f"{path} is there already and was not written by `{made_by}`: move it away, or choose another --out."
        )


def _maker(path: Path) -> str | None:
    try:
        if path.suffix == ".npz":
            # numpy leaves a damaged file open that it has opened itself.
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                record = json.loads(str(archive[PROVENANCE]))
                return record.get("made_by") if isinstance(record, dict) else None
        with path.open("rb") as stream:
            makers = [line.removeprefix("made_by: ") for line in read_comments(stream) if line.startswith("made_by: ")]
            return makers[0] if makers else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def comments_of(provenance: Mapping[str, object]) -> list[str]:
    """The provenance as comments of a PLY file, one per entry."""
    return [f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in provenance.items()]
