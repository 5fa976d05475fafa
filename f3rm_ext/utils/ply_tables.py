"""PLY files as tables: any header, ASCII or binary, read in chunks of rows."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from f3rm_ext.errors import SplatFileError

_KINDS = {
    **{"char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1"},
    **{"short": "i2", "int16": "i2", "ushort": "u2", "uint16": "u2"},
    **{"int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4"},
    **{"float": "f4", "float32": "f4", "double": "f8", "float64": "f8"},
}
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_CHUNK = 1 << 16
_LONGEST_LINE, _MOST_LINES = 4096, 10_000


@dataclass
class Table:
    """An element of a PLY file: rows of the same properties."""

    name: str
    count: int
    """Number of rows."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each property, as numpy calls it without the order of bytes."""
    has_lists: bool = False
    """Whether rows have lists, as faces do; they cannot be read here."""

    def row(self, order: str) -> np.dtype:
        """A row, in an order of bytes."""
        return np.dtype([(name, f"{order}{kind}") for name, kind in self.kinds.items()])


@dataclass
class PlyTables:
    """A PLY file whose header was read."""

    path: Path
    order: str
    """Order of bytes, ``<`` or ``>``; empty for ASCII."""
    tables: dict[str, Table]
    """By name, in the order of the file."""
    comments: list[str]
    start: int
    """Where the rows begin, bytes."""

    @classmethod
    def open(cls, path: Path) -> "PlyTables":
        """Reads the header and checks that the rows are there.

        Raises:
            SplatFileError: it is no PLY file, damaged or cut short.
            OSError: it cannot be read.
        """
        with path.open("rb") as stream:
            return cls._parse(path, stream)

    @classmethod
    def _parse(cls, path: Path, stream: BufferedIOBase) -> "PlyTables":
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
                raise _damaged(path, f"its header has the line {line[:80]!r}") from None
        else:
            raise _damaged(path, "its header has no end")
        if line != "end_header" or order is None:
            raise _damaged(path, "its header is cut short" if order else "its header names no format")
        found = cls(path, order, tables, comments, stream.tell())
        if order:
            found._require_rows(os.fstat(stream.fileno()).st_size)
        return found

    def _require_rows(self, size: int) -> None:
        """Raises SplatFileError where a binary file is too short for its rows."""
        end = self.start
        for table in self.tables.values():
            width = table.row(self.order).itemsize
            end += width * table.count
            if size < end:
                there = max(table.count + (size - end) // max(width, 1), 0)
                raise SplatFileError(
                    f"{self.path} is cut short, with {there} of {table.count} rows of its element {table.name}: "
                    "copy or export it again."
                )
            if table.has_lists:
                return

    def extra_bytes(self) -> int:
        """Bytes after the last row of a binary file, where that can be told."""
        if not self.order or any(table.has_lists for table in self.tables.values()):
            return 0
        end = self.start + sum(table.row(self.order).itemsize * table.count for table in self.tables.values())
        return self.path.stat().st_size - end

    def rows(self, name: str, names: list[str], chunk: int = _CHUNK) -> Iterator[tuple[slice, np.ndarray]]:
        """Some properties of an element, in chunks of rows.

        Args:
            name: of the element.
            names: of its properties.
            chunk: rows at a time.

        Yields:
            Which rows, and their values: of a structured type (binary), or float64 by name (ASCII).

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
                raise SplatFileError(
                    f"{self.path} is cut short, with {start + len(some)} of {table.count} rows of its element "
                    f"{table.name}: copy or export it again."
                )
            try:
                values = np.loadtxt(some, dtype=np.float64, comments=None, ndmin=2)
                if values.shape[1] != len(table.kinds):
                    raise ValueError
            except ValueError:
                raise _damaged(
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


def _damaged(path: Path, reason: str) -> SplatFileError:
    return SplatFileError(f"{path} is damaged ({reason}): copy or export it again.")
