"""Point clouds as PLY files (binary, little-endian) with any further properties per point."""

import re
from collections.abc import Mapping, Sequence
from io import BufferedIOBase

import numpy as np

TYPES = {"float32": "float", "float64": "double", "uint8": "uchar", "int32": "int", "uint32": "uint"}
"""Kinds of numbers, as numpy and as PLY call them; those that every reader knows."""
LONGEST_COMMENT = 200
"""Characters; some readers allow no more than 1024 in a line."""
_CHUNK = 1 << 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def property_name(text: str, prefix: str) -> str:
    """A name that PLY readers accept: letters and digits of a text after a prefix."""
    plain = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    return f"{prefix}_{plain}" if plain else prefix


def write_ply(stream: BufferedIOBase, columns: Mapping[str, np.ndarray], comments: Sequence[str] = ()) -> None:
    """Writes points; memory holds no more than a chunk of them beside the columns.

    Args:
        stream: binary, at its start.
        columns: one value per point each, in the order of the file, of a kind in :data:`TYPES`; readers look for ``x``,
            ``y``, ``z``, ``nx``, ``ny``, ``nz``, ``red``, ``green`` and ``blue``.
        comments: go into the header, line breaks as spaces, in several lines where they are long.

    Raises:
        ValueError: columns differ in length, have names or kinds that PLY does not know, or there are none.
    """
    sizes = {len(column) for column in columns.values()}
    if len(sizes) != 1:
        raise ValueError(f"the columns are of {len(sizes)} different lengths")
    for name, column in columns.items():
        if not _NAME.fullmatch(name) or column.ndim != 1 or column.dtype.name not in TYPES:
            raise ValueError(f"the column {name!r} ({column.dtype}, {column.ndim} axes) cannot be in a PLY file")
    (count,) = sizes
    stream.write(header({"vertex": (count, {name: column.dtype.name for name, column in columns.items()})}, comments))
    row = np.dtype([(name, column.dtype.newbyteorder("<")) for name, column in columns.items()])
    for start in range(0, count, _CHUNK):
        rows = np.empty(min(_CHUNK, count - start), dtype=row)
        for name, column in columns.items():
            rows[name] = column[start : start + len(rows)]
        stream.write(rows.tobytes())


def header(elements: Mapping[str, tuple[int, Mapping[str, str]]], comments: Sequence[str] = ()) -> bytes:
    """The header of a binary, little-endian PLY file.

    Args:
        elements: by name, in the order of the file: how many, and the properties of each with their kind in
            :data:`TYPES`.
        comments: line breaks become spaces, long ones take several lines.
    """
    lines = ["ply", "format binary_little_endian 1.0"]
    lines += [f"comment {line}" for comment in comments for line in _lines(comment)]
    for element, (count, properties) in elements.items():
        lines.append(f"element {element} {count}")
        lines += [f"property {TYPES[kind]} {name}" for name, kind in properties.items()]
    lines.append("end_header")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def read_comments(stream: BufferedIOBase) -> list[str]:
    """The comments of a PLY file; none where it is no such file."""
    if stream.readline(8).strip() != b"ply":
        return []
    comments = []
    for _ in range(10_000):
        line = stream.readline(4096).decode("ascii", "replace").strip()
        if not line or line == "end_header":
            break
        if line.startswith("comment "):
            comments.append(line.removeprefix("comment "))
    return comments


def _lines(comment: str) -> list[str]:
    """A comment in ASCII, in pieces that are not too long."""
    text = " ".join(comment.split()).encode("ascii", "backslashreplace").decode("ascii")
    return [text[i : i + LONGEST_COMMENT] for i in range(0, len(text), LONGEST_COMMENT)] or [""]
