"""PLY files: writes tables of points (binary, little-endian), and reads tables from files with any header."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from f3rm_ext.errors import SplatFileError
from f3rm_ext.utils.names import unique_name

TYPES = {"float32": "float", "float64": "double", "uint8": "uchar", "int32": "int", "uint32": "uint"}
"""PLY's name of each kind of number (by numpy's name) that every reader knows."""
LONGEST_COMMENT = 200
"""Characters in a comment line; some readers allow no more than 1024 in a line."""
_KINDS = {
    **{"char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1"},
    **{"short": "i2", "int16": "i2", "ushort": "u2", "uint16": "u2"},
    **{"int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4"},
    **{"float": "f4", "float32": "f4", "double": "f8", "float64": "f8"},
}
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_CHUNK = 1 << 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_LINE, _MOST_LINES = 4096, 10_000


def property_name(text: str, prefix: str) -> str:
    """Returns a name that PLY readers accept: a prefix, then the letters and digits of a text.

    >>> property_name("blue mug", "relevancy")
    'relevancy_blue_mug'
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    return f"{prefix}_{plain}" if plain else prefix


def property_names(named: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a name for each text and prefix; the second of the same name is ``NAME_2``.

    >>> property_names([("mug", "score"), ("mug!", "score")])
    ['score_mug', 'score_mug_2']
    """
    names: list[str] = []
    for text, prefix in named:
        names.append(unique_name(property_name(text, prefix), names.__contains__))
    return names


def write_ply(stream: BufferedIOBase, columns: Mapping[str, np.ndarray], comments: Sequence[str] = ()) -> None:
    """Writes a PLY file of points, chunk by chunk: memory holds the columns and one chunk.

    Args:
        columns: one value for each point, in the order of the file, of a kind in :data:`TYPES`. Readers look for ``x``,
            ``y``, ``z``, ``nx``, ``ny``, ``nz``, ``red``, ``green`` and ``blue``.

    Raises:
        ValueError: there are no columns, their lengths differ, or a name or kind is unknown to PLY.
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
    """Returns the header of a binary, little-endian PLY file.

    Args:
        elements: by name, in the order of the file: the number of rows, and the kind of each property in :data:`TYPES`.
        comments: line breaks become spaces; a long comment takes several lines.
    """
    lines = ["ply", "format binary_little_endian 1.0"]
    lines += [f"comment {line}" for comment in comments for line in _comment_lines(comment)]
    for element, (count, properties) in elements.items():
        lines.append(f"element {element} {count}")
        lines += [f"property {TYPES[kind]} {name}" for name, kind in properties.items()]
    lines.append("end_header")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _comment_lines(comment: str) -> list[str]:
    """A comment in ASCII, split into lines that readers accept."""
    text = " ".join(comment.split()).encode("ascii", "backslashreplace").decode("ascii")
    return [text[i : i + LONGEST_COMMENT] for i in range(0, len(text), LONGEST_COMMENT)] or [""]


@dataclass
class Table:
    """An element of a PLY file: rows of the same properties."""

    name: str
    """Name of the element, such as ``vertex``."""
    count: int
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each property, numpy's name without the byte order."""
    has_lists: bool = False
    """Whether its rows have lists, as faces do; they cannot be read here."""

    def row(self, order: str) -> np.dtype:
        """Returns the type of a row in a byte order."""
        return np.dtype([(name, f"{order}{kind}") for name, kind in self.kinds.items()])


@dataclass
class PlyTables:
    """The tables of a PLY file, ASCII or binary. Its header is in memory; rows are read in chunks."""

    path: Path
    order: str
    """Byte order, ``<`` or ``>``; empty for ASCII."""
    tables: dict[str, Table]
    """Tables by their names, in the order of the file."""
    comments: list[str]
    start: int
    """Offset of the first row, bytes."""

    @classmethod
    def open(cls, path: Path) -> "PlyTables":
        """Reads the header and checks that the rows are there.

        Raises:
            SplatFileError: the file is not PLY, damaged or cut short.
            OSError: the file cannot be read.
        """
        with path.open("rb") as stream:
            ply = cls.read_header(path, stream)
            if ply.order:
                ply._require_rows(os.fstat(stream.fileno()).st_size)
        return ply

    @classmethod
    def read_header(cls, path: Path, stream: BufferedIOBase) -> "PlyTables":
        """Reads the header alone; raises SplatFileError where it is damaged or none."""
        if stream.readline(8).rstrip() != b"ply":
            raise SplatFileError(f"{path} is not a PLY file: give a file of splats.")
        order: str | None = None
        tables: dict[str, Table] = {}
        comments: list[str] = []
        for _ in range(_MOST_LINES):
            raw = stream.readline(_LONGEST_LINE)
            line = raw.decode("ascii", "replace").strip()
            if line == "end_header" or not raw.endswith(b"\n"):
                break
            word, _, rest = line.partition(" ")
            words = rest.split()
            try:
                if word == "format":
                    order = _ORDERS[words[0]]
                elif word in ("comment", "obj_info"):
                    comments.append(rest)
                elif word == "element":
                    if words[0] in tables or int(words[1]) < 0:
                        raise ValueError
                    tables[words[0]] = Table(words[0], int(words[1]))
                elif word == "property":
                    _add_property(next(reversed(tables.values())), words)
                elif word:
                    raise ValueError
            except (ValueError, KeyError, IndexError, StopIteration):
                raise _damage_error(path, f"its header has the line {line[:80]!r}") from None
        else:
            raise _damage_error(path, "its header has no end")
        if line != "end_header" or order is None:
            raise _damage_error(path, "its header is cut short" if order else "its header names no format")
        return cls(path, order, tables, comments, stream.tell())

    def _require_rows(self, size: int) -> None:
        """Raises SplatFileError where a binary file is too short for its rows."""
        end = self.start
        for table in self.tables.values():
            width = table.row(self.order).itemsize
            end += width * table.count
            if size < end:
                raise self._cut_error(table, max(table.count + (size - end) // max(width, 1), 0))
            if table.has_lists:
                return

    def _cut_error(self, table: Table, there: int) -> SplatFileError:
        return SplatFileError(
            f"{self.path} is cut short, with {there} of {table.count} rows of its element {table.name}: copy or export "
            "it again."
        )

    def extra_bytes(self) -> int:
        """Returns the number of bytes after the last row; 0 for ASCII files and rows with lists."""
        if not self.order or any(table.has_lists for table in self.tables.values()):
            return 0
        end = self.start + sum(table.row(self.order).itemsize * table.count for table in self.tables.values())
        return self.path.stat().st_size - end

    def rows(self, name: str, names: list[str], chunk: int = _CHUNK) -> Iterator[tuple[slice, np.ndarray]]:
        """Reads some properties of an element, in chunks of rows.

        Yields:
            A slice of rows, and a structured array of their values; values of ASCII files are float64.

        Raises:
            SplatFileError: the rows cannot be understood.
        """
        before = list(itertools.takewhile(lambda table: table.name != name, self.tables.values()))
        table = self.tables[name]
        if table.has_lists or (self.order and any(other.has_lists for other in before)):
            raise SplatFileError(f"{self.path} has lists in or before its element {name}: export the splats again.")
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            if not self.order:
                yield from self._ascii_rows(stream, sum(other.count for other in before), table, names, chunk)
                return
            stream.seek(sum(other.count * other.row(self.order).itemsize for other in before), os.SEEK_CUR)
            dtype = table.row(self.order)
            for start in range(0, table.count, chunk):
                count = min(chunk, table.count - start)
                data = stream.read(count * dtype.itemsize)
                yield slice(start, start + count), np.frombuffer(data, dtype)[names]

    def _ascii_rows(
        self, stream: BufferedIOBase, skipped: int, table: Table, names: list[str], chunk: int
    ) -> Iterator[tuple[slice, np.ndarray]]:
        lines = itertools.islice(filter(bytes.strip, stream), skipped, None)
        columns = [list(table.kinds).index(name) for name in names]
        for start in range(0, table.count, chunk):
            some = list(itertools.islice(lines, min(chunk, table.count - start)))
            if len(some) < min(chunk, table.count - start):
                raise self._cut_error(table, start + len(some))
            try:
                values = np.loadtxt(some, dtype=np.float64, comments=None, ndmin=2)
                if values.shape[1] != len(table.kinds):
                    raise ValueError
            except ValueError:
                raise _damage_error(
                    self.path, f"a row of its element {table.name} is not {len(table.kinds)} numbers"
                ) from None
            rows = np.empty(len(some), dtype=[(name, np.float64) for name in names])
            for name, column in zip(names, columns, strict=True):
                rows[name] = values[:, column]
            yield slice(start, start + len(some)), rows


def _add_property(table: Table, words: list[str]) -> None:
    kind, name = words[0], words[-1]
    if name in table.kinds or len(words) != (4 if kind == "list" else 2):
        raise ValueError
    if kind == "list":
        table.has_lists = True
    else:
        table.kinds[name] = _KINDS[kind]


def _damage_error(path: Path, reason: str) -> SplatFileError:
    return SplatFileError(f"{path} is damaged ({reason}): copy or export it again.")
