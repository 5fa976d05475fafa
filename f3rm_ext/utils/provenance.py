"""What files say of their origin, and who may overwrite what: a command replaces files that it wrote, and no others."""

import gzip
import io
import itertools
import json
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from PIL import Image

from f3rm_ext.errors import ConfigError, SplatFileError
from f3rm_ext.utils.json_shape import convert_json, parse_json
from f3rm_ext.utils.pictures import UNREADABLE
from f3rm_ext.utils.ply import PlyTables

MADE_BY = "made_by"
"""Key of the command that wrote a file."""
PROVENANCE, PNG_KEY = "provenance", "f3rm-ext"
"""Names under which NPZ files and PNG text hold the provenance, as JSON."""
_GLB_JSON = 0x4E4F534A
"""Type of the chunk with JSON: these letters as a little-endian number."""
_LONGEST_HEADER = 64 << 20
_MOST_LINES = 1000
_COMMENT = re.compile(rb"<!-- made_by: ([\w -]+) -->\n$")
_GZIP_NAME = re.compile(rb"\x1f\x8b\x08\x08.{6}([\w -]+)\0", re.DOTALL)
_LONGEST_LINE = 1000
"""Longest comment, characters: some readers of PLY have buffers of 1024."""
_LONGEST_COMMENT = 200
_AFTER_IHDR = 33
"""Bytes of a PNG's signature (8) and of its first chunk, IHDR (25), which has to stay the first."""


class _GlbAsset(TypedDict, total=False):
    extras: dict[str, Any]


class _GlbTree(TypedDict, total=False):
    asset: _GlbAsset


def require_ours(
    path: Path,
    makers: str | Collection[str],
    option: str = "--out",
    read: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:
    """Checks, before the work begins, that a command may write a file: where there is none, or one that it wrote.

    Args:
        makers: the command as in ``f3rm-ext export mesh``, or all commands whose files it may replace.
        option: the option that gave the name, for messages.
        read: reads the provenance of formats that :func:`read_provenance` does not know.

    Raises:
        ConfigError: a folder, or a file that none of these commands wrote, is in its place.
    """
    makers = (makers,) if isinstance(makers, str) else makers
    # os.path's, since that of pathlib raises where a folder above may not be entered; writing says so in a sentence.
    if os.path.exists(path) and (path.is_dir() or (read or read_provenance)(path).get(MADE_BY) not in makers):
        raise ConfigError(
            f"{path} is there already and does not say that `{'` or `'.join(makers)}` wrote it: move it away, or "
            f"choose another {option}."
        )


def require_own_folder(
    folder: Path,
    marker: str,
    maker: str,
    option: str = "--output",
    ignored: Collection[str] = (".lock",),
    kind: Any = dict[str, Any],
) -> Any:
    """Checks, before the work begins, that a command may use a folder: a new or empty one, or one that it made.

    Empty folders inside do not count.

    Args:
        marker: name of the JSON file that the command writes first; its ``made_by`` says whose folder it is.
        maker: the command as in ``f3rm-ext moco train``.
        option: the option that gave the folder, for messages.
        ignored: names of files that may be there without the marker.
        kind: type of the marker's content, see :func:`~f3rm_ext.utils.json_shape.convert_json`.

    Returns:
        The content of the marker; None where the folder is new or empty.

    Raises:
        ConfigError: the folder is a file, cannot be read, or holds what the command did not make.
    """
    try:
        if not folder.is_dir():
            if folder.exists():
                raise ConfigError(f"{option} {folder} is a file: choose a folder.")
            return None
        if (folder / marker).exists():
            record = read_provenance(folder / marker)
            if record.get(MADE_BY) == maker:
                return convert_json(record, kind)
            raise ConfigError(
                f"{folder / marker} is damaged or was not written by `{maker}`: choose a new folder with {option}."
            )
        others = sorted(
            path.name
            for path in folder.iterdir()
            if path.name not in ignored and path.suffix != ".tmp" and (not path.is_dir() or any(path.iterdir()))
        )
    except ValueError as error:
        raise ConfigError(f"{folder / marker} is damaged ({error}): choose a new folder with {option}.") from error
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be used ({error.strerror}): choose another folder.") from error
    if others:
        raise ConfigError(
            f"The folder {folder} holds files that `{maker}` did not write ({others[0]}), and it overwrites nothing: "
            f"choose a new folder with {option}."
        )
    return None


def read_provenance(path: Path) -> dict[str, Any]:
    """Returns what a file says of its origin; empty for files of others and damaged ones.

    It stands in the comments of .ply, .obj, .mtl and .usda, in the asset's extras of .glb, in an entry of .npz, in the
    text of .png, at the top level of .json, in a comment of .html and .md, and as the name of what .jgz holds.
    """
    reader = _READERS.get(path.suffix.lower())
    try:
        return {} if reader is None else reader(path)
    except (*UNREADABLE, SplatFileError, KeyError, EOFError, struct.error, zipfile.BadZipFile):
        return {}


def comment_lines(provenance: Mapping[str, object]) -> list[str]:
    """Returns the provenance as comments of a PLY or OBJ file in ASCII, one for each entry.

    Longer ones than readers accept, as of a query with many negatives, are cut off.
    """
    lines = (f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in provenance.items())
    return [" ".join(line.splitlines()).encode("ascii", "backslashreplace").decode()[:_LONGEST_LINE] for line in lines]


def sign_text(text: str, maker: str) -> bytes:
    """Returns a text in Markdown or HTML with a comment at its end that says who wrote it, and is not shown.

    >>> sign_text("Figures", "f3rm-ext bench report").decode()
    'Figures\\n<!-- made_by: f3rm-ext bench report -->\\n'
    """
    return f"{text.rstrip()}\n<!-- made_by: {maker} -->\n".encode(errors="backslashreplace")


def sign_png(data: bytes, provenance: Mapping[str, object]) -> bytes:
    """Returns an encoded PNG with its provenance as text."""
    body = b"tEXt" + PNG_KEY.encode() + b"\0" + json.dumps(provenance).encode("ascii")
    # The length counts the data without the type, the checksum both.
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:_AFTER_IHDR] + chunk + data[_AFTER_IHDR:]


def sign_gzip(data: bytes, maker: str) -> bytes:
    """Returns data compressed by gzip; its header names who wrote it as the original file."""
    stream = io.BytesIO()
    with gzip.GzipFile(maker, "wb", fileobj=stream, mtime=0) as archive:
        archive.write(data)
    return stream.getvalue()


def _read_npz(path: Path) -> dict[str, Any]:
    # numpy does not close a damaged file that it has opened itself.
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return parse_json(str(archive[PROVENANCE]), dict[str, Any])


def _read_ply(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return _entries(PlyTables.read_header(path, stream).comments)


def _read_comment_lines(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        lines = itertools.takewhile(lambda line: line.startswith(b"#"), itertools.islice(stream, _MOST_LINES))
        return _entries([line[1:].decode("ascii", "replace").strip() for line in lines])


def _read_glb(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        magic, _, _, length, chunk = struct.unpack("<4sIIII", stream.read(20))
        if magic != b"glTF" or chunk != _GLB_JSON or length > _LONGEST_HEADER:
            return {}
        return parse_json(stream.read(length), _GlbTree).get("asset", {}).get("extras", {})


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json(path.read_bytes(), dict[str, Any])


def _read_png(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large pictures, whose pixels are not read
        with Image.open(path) as image:
            return parse_json(image.info.get(PNG_KEY, "{}"), dict[str, Any])


def _read_text(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _LONGEST_COMMENT))
        match = _COMMENT.search(stream.read())
    return {} if match is None else {MADE_BY: match[1].decode()}


def _read_gzip(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        match = _GZIP_NAME.match(stream.read(_LONGEST_COMMENT))
    return {} if match is None else {MADE_BY: match[1].decode()}


def _entries(comments: Collection[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    for comment in comments:
        key, colon, value = comment.partition(": ")
        if colon:
            entries.setdefault(key, value)
    return entries


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".npz": _read_npz,
    ".ply": _read_ply,
    ".obj": _read_comment_lines,
    ".mtl": _read_comment_lines,
    ".usda": _read_comment_lines,
    ".glb": _read_glb,
    ".json": _read_json,
    ".png": _read_png,
    ".html": _read_text,
    ".md": _read_text,
    ".jgz": _read_gzip,
}
