"""Notes of a page of splats: texts that are pinned to places, as their file holds them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from f3rm_ext.errors import ConfigError

_MAX_NOTES = 200
_MAX_LENGTH = 200
_FAR = 1e9
_FORM = 'write [{"text": "...", "position": [x, y, z]}, {"text": "...", "query": "NAME"}]'


@dataclass(frozen=True)
class Note:
    """A text and its place."""

    text: str
    """At most 200 characters."""
    position: tuple[float, float, float] | None
    """In the frame and units of transforms.json; None: the largest place of the query."""
    query: str = ""
    """Name of a question of the page."""


def read_notes(path: Path) -> list[Note]:
    """Reads notes from a JSON file, such as the page itself saves.

    Raises:
        ConfigError: the file cannot be read, or a note has no text or not exactly one place.
    """
    try:
        items = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The notes {path} cannot be read ({error}): {_FORM}.") from error
    if not isinstance(items, list) or len(items) > _MAX_NOTES:
        raise ConfigError(f"The notes {path} are no list of at most {_MAX_NOTES} notes: {_FORM}.")
    return [_read(item, f"Note {number} of {path}") for number, item in enumerate(items, start=1)]


def _read(item: Any, where: str) -> Note:
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str) or not 0 < len(text.strip()) <= _MAX_LENGTH:
        raise ConfigError(f"{where} has no text of 1 to {_MAX_LENGTH} characters: {_FORM}.")
    position, query = item.get("position"), item.get("query")
    if isinstance(query, str) and position is None:
        return Note(text.strip(), None, query)
    numbers = position if isinstance(position, list) and query is None else []
    finite = [float(value) for value in numbers if isinstance(value, int | float) and abs(value) < _FAR]
    if len(numbers) != 3 or len(finite) != 3:
        raise ConfigError(f"{where} has not exactly one place, a position of three numbers or a query: {_FORM}.")
    return Note(text.strip(), (finite[0], finite[1], finite[2]))
