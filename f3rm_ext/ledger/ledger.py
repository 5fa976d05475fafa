"""The ledger's file: SQLite, one transaction per change, safe for several processes at once."""

import contextlib
import datetime
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from f3rm_ext.errors import LedgerError, reason_of
from f3rm_ext.ledger.entry import STATUSES, Entry, Repeat, Status
from f3rm_ext.ledger.intervals import Quartiles, quartiles
from f3rm_ext.utils.json_shape import parse_json

APPLICATION_ID = 0x46334C47  # "F3LG"
SCHEMA = 1
WAIT_S = 30.0
"""How long to wait for another process that writes."""

_Conditions = dict[str, str | int | float | bool | None]


class _Origin(TypedDict, total=False):
    """The entries of an origin that are read."""

    commit: str | None
    changed: bool | None
    config: str | None
    schedule_steps: int | None
    versions: dict[str, str | None]


_DAMAGE = (ValueError, TypeError, OverflowError)
"""Errors that values of an unexpected type raise when they are read."""

_TABLES = """
CREATE TABLE entries (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, date TEXT NOT NULL, method TEXT NOT NULL, status TEXT NOT NULL,
  command TEXT NOT NULL, conditions TEXT NOT NULL, origin TEXT NOT NULL);
CREATE TABLE repeats (
  id INTEGER PRIMARY KEY, entry INTEGER NOT NULL REFERENCES entries(id), number INTEGER NOT NULL,
  session TEXT NOT NULL, seed INTEGER, UNIQUE (entry, number));
CREATE TABLE figures (
  repeat INTEGER NOT NULL REFERENCES repeats(id), name TEXT NOT NULL, value REAL, PRIMARY KEY (repeat, name));
CREATE TABLE notes (
  id INTEGER PRIMARY KEY, entry INTEGER NOT NULL REFERENCES entries(id), date TEXT NOT NULL, text TEXT NOT NULL);
"""


def default_path() -> Path:
    """Returns the ledger of this user: ``$XDG_DATA_HOME/f3rm_ext/ledger.sqlite``, else below ~/.local/share."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "f3rm_ext" / "ledger.sqlite"


def now() -> str:
    """Returns the date and time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Ledger:
    """A ledger on the disk. Every method is one transaction, and raises LedgerError if the file cannot be used.

    The file, by default :func:`default_path`, is made when something is written to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path

    @contextlib.contextmanager
    def _open(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """Opens the file for one transaction.

        Raises:
            LedgerError: it is not there, is no ledger, is of another schema, is locked, or cannot be written.
        """
        if not write and not self.path.is_file():
            raise LedgerError(
                f"There is no ledger {self.path}: measure something with `f3rm-ext bench run`, or name another file "
                "with --ledger."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)) as connection:
                connection.execute("PRAGMA foreign_keys = ON")
                # SQLite waits for a lock that is asked for at once. It refuses one that a transaction asks for after it
                # has read, since two of them would wait for each other.
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    self._check(connection, write)
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(self._sentence(error)) from error

    def _check(self, connection: sqlite3.Connection, write: bool) -> None:
        application, schema = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if write and not application and not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        elif application != APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database, but no ledger of f3rm-ext: name another file with --ledger.")
        elif schema != SCHEMA:
            newer = "a newer" if schema > SCHEMA else "an older"
            raise LedgerError(
                f"The ledger {self.path} has schema {schema}, of {newer} version of f3rm-ext than this, which needs "
                f"{SCHEMA}: use that version, or name another file with --ledger."
            )

    def _sentence(self, error: Exception) -> str:
        reason = reason_of(error)
        if "locked" in reason:
            return (
                f"The ledger {self.path} is locked by another process, after {WAIT_S:.0f} s of waiting: end that "
                "process, or try again."
            )
        if "full" in reason or "No space" in reason:
            return f"The ledger {self.path} was not changed, because the disk is full: make room, then try again."
        if isinstance(error, _DAMAGE) or "not a database" in reason or "malformed" in reason:
            return f"{self.path} is damaged or no ledger ({reason}): name another file with --ledger."
        return f"The ledger {self.path} cannot be used ({reason}): name another file with --ledger."

    # --- writing -----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        method: str,
        *,
        command: Sequence[str] = (),
        conditions: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
        status: Status = "open",
        note: str = "",
    ) -> str:
        """Adds an entry, or turns an idea into one, which keeps its notes.

        Args:
            name: a new name, or that of an idea; if empty, the method's with a number.
            method: method that is trained; empty for an idea.

        Returns:
            The name of the entry.

        Raises:
            LedgerError: there is an entry of that name.
        """
        with self._open(write=True) as connection:
            if not name:
                number = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM entries").fetchone()[0]
                taken = {other for (other,) in connection.execute("SELECT name FROM entries")}
                name = next(free for free in (f"{method}-{n}" for n in itertools.count(number)) if free not in taken)
            self._require_new(connection, name)
            values = (name, now(), method, status, *map(json.dumps, (list(command), conditions or {}, origin or {})))
            connection.execute(
                "INSERT INTO entries (name, date, method, status, command, conditions, origin) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET (date, method, status, command, "
                "conditions, origin) = (excluded.date, excluded.method, excluded.status, excluded.command, "
                "excluded.conditions, excluded.origin)",
                values,
            )
            if note:
                self._note(connection, name, note)
        return name

    def require_new(self, name: str) -> None:
        """Raises LedgerError if an entry that is not only an idea has this name."""
        with self._open(write=True) as connection:
            self._require_new(connection, name)

    def _require_new(self, connection: sqlite3.Connection, name: str) -> None:
        if connection.execute("SELECT 1 FROM entries WHERE name = ? AND method != ''", (name,)).fetchone():
            raise LedgerError(f"The ledger {self.path} has an entry {name} already: choose another --name.")

    def add_repeat(self, name: str, values: Mapping[str, float], *, session: str, seed: int | None = None) -> None:
        """Adds a repeat to an entry; see :class:`~f3rm_ext.ledger.entry.Repeat`.

        Raises:
            LedgerError: there is no such entry.
        """
        with self._open(write=True) as connection:
            entry = self._require(connection, name)
            number = connection.execute("SELECT count(*) FROM repeats WHERE entry = ?", (entry,)).fetchone()[0]
            repeat = connection.execute(
                "INSERT INTO repeats (entry, number, session, seed) VALUES (?, ?, ?, ?)", (entry, number, session, seed)
            ).lastrowid
            connection.executemany(
                "INSERT INTO figures VALUES (?, ?, ?)", [(repeat, key, float(value)) for key, value in values.items()]
            )

    def note(self, name: str, text: str = "", status: Status | None = None) -> None:
        """Adds a note to an entry, or sets its status, or both. The status ``idea`` makes a new entry.

        Raises:
            LedgerError: there is no such entry, or the new idea has the name of a measured one.
        """
        if status == "idea":
            self.add(name, "", status="idea", note=text)
            return
        with self._open(write=True) as connection:
            if text:
                self._note(connection, name, text)
            entry = self._require(connection, name)
            if status is not None:
                connection.execute("UPDATE entries SET status = ? WHERE id = ?", (status, entry))

    def _note(self, connection: sqlite3.Connection, name: str, text: str) -> None:
        entry = self._require(connection, name)
        text = text.encode(errors="backslashreplace").decode()  # an error may name a file whose name is not UTF-8
        connection.execute("INSERT INTO notes (entry, date, text) VALUES (?, ?, ?)", (entry, now(), text))

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Returns all entries, the oldest first."""
        with self._open(write=False) as connection:
            return self._entries(connection)

    def entry(self, name: str) -> Entry:
        """Returns an entry.

        Raises:
            LedgerError: there is no such entry.
        """
        with self._open(write=False) as connection:
            return self._entries(connection, self._require(connection, name))[0]

    def _entries(self, connection: sqlite3.Connection, only: int | None = None) -> list[Entry]:
        try:
            return self._read(connection, only)
        except _DAMAGE as error:
            raise LedgerError(self._sentence(error)) from error

    def _read(self, connection: sqlite3.Connection, only: int | None) -> list[Entry]:
        figures: dict[int, dict[str, float]] = {}
        for repeat, key, value in connection.execute("SELECT repeat, name, value FROM figures ORDER BY rowid"):
            # SQLite has no NaN: what was recorded as one comes back as NULL.
            figures.setdefault(repeat, {})[key] = float("nan") if value is None else float(value)
        repeats: dict[int, list[Repeat]] = {}
        for identity, entry, number, session, seed in connection.execute(
            "SELECT id, entry, number, session, seed FROM repeats ORDER BY entry, number"
        ):
            repeats.setdefault(entry, []).append(
                Repeat(number, str(session), None if seed is None else int(seed), figures.get(identity, {}))
            )
        notes: dict[int, list[tuple[str, str]]] = {}
        for entry, date, text in connection.execute("SELECT entry, date, text FROM notes ORDER BY id"):
            notes.setdefault(entry, []).append((date, text))
        return [
            Entry(
                name=str(name),
                date=str(date),
                method=str(method),
                status=cast(Status, status if status in STATUSES else "open"),
                command=tuple(parse_json(command, list[str])),
                conditions=_add_eval_step(parse_json(conditions, _Conditions)),
                origin=parse_json(origin, _Origin),
                repeats=repeats.get(identity, []),
                notes=notes.get(identity, []),
            )
            for identity, name, date, method, status, command, conditions, origin in connection.execute(
                "SELECT id, name, date, method, status, command, conditions, origin FROM entries ORDER BY id"
            )
            if only in (None, identity)
        ]

    def _require(self, connection: sqlite3.Connection, name: str) -> int:
        row = connection.execute("SELECT id FROM entries WHERE name = ?", (name,)).fetchone()
        if row is None:
            names = ", ".join(row[0] for row in connection.execute("SELECT name FROM entries ORDER BY id")) or "none"
            raise LedgerError(f"The ledger {self.path} has no entry {name}: choose one of its entries ({names}).")
        return row[0]


def _add_eval_step(conditions: _Conditions) -> _Conditions:
    """Adds the step of evaluation, which was the last one before it could be chosen."""
    return {"eval_step": conditions["last_step"], **conditions} if "last_step" in conditions else conditions


@dataclass(frozen=True)
class Throughput:
    """Speed at which a method was trained on a machine."""

    it_per_s: Quartiles
    rays_per_s: Quartiles | None
    """Rays per second over the samples; None where it was not measured."""
    samples: int
    """Number of repeats."""
    date: str
    """Date of the newest of the entries, UTC, ISO 8601."""
    entries: tuple[str, ...]


def throughput(
    method: str,
    *,
    hardware: str,
    ledger: Path | None = None,
    conditions: Mapping[str, Any] | None = None,
    rays_per_step: int | None = None,
    whole: bool = False,
) -> Throughput | None:
    """Returns the speed of a method on a machine, over all repeats of comparable entries that have not failed.

    Args:
        ledger: file of the ledger; by default that of the user.
        conditions: values that an entry must have, such as ``width_px``; see
            :data:`~f3rm_ext.ledger.entry.CONDITIONS`.
        rays_per_step: number of rays (for splats: pixels of the first photo) that a step of an entry must have.
        whole: whether an entry must be of all steps of its run.

    Returns:
        None without a comparable entry, or without a ledger.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    source = Ledger(ledger)
    if not source.path.is_file():
        return None
    filters = {**(conditions or {}), "hardware": hardware}
    chosen = [
        entry
        for entry in source.entries()
        if entry.method == method
        and entry.status != "failed"
        and all(entry.conditions.get(key) == value for key, value in filters.items())
        and (not whole or entry.is_whole)
        and (rays_per_step is None or rays_per_step in entry.values("rays_per_step"))
        and entry.values("it_per_s")
    ]
    if not chosen:
        return None
    speeds = [value for entry in chosen for value in entry.values("it_per_s")]
    rays = [value for entry in chosen for value in entry.values("rays_per_s")]
    return Throughput(
        quartiles(speeds),
        quartiles(rays) if rays else None,
        len(speeds),
        max(entry.date for entry in chosen),
        tuple(entry.name for entry in chosen),
    )
