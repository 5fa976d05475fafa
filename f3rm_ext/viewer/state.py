"""What is asked of a model at present, as one immutable value that is exchanged whole.

The render thread of nerfstudio's viewer reads it once per picture, and can be interrupted at any line; others change it
at the same time, some of them slowly (text weights take seconds to load). So nothing is ever half changed, and what was
asked first but answered last is dropped.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Query

DEFAULT_THRESHOLD = 0.5
"""Relevancy at which a thing is as much like the query as like the nearest negative."""


@dataclass(frozen=True)
class QueryState:
    """Everything that decides what the panel's outputs show."""

    live: Query | None = None
    """What is looked for now."""
    named: tuple[Query, ...] = ()
    """What the label map tells apart; names are unique."""
    threshold: float = DEFAULT_THRESHOLD
    """Least score of a find, 0 to 1."""
    temperature: float = DEFAULT_TEMPERATURE
    """Of every query here."""
    displays: Mapping[str, DisplayBasis] = field(default_factory=dict)
    """By head: the projection to colours that stands in for the stored one. Never changed in place."""

    @property
    def are_any(self) -> bool:
        """Whether anything is asked that a model renders by itself not."""
        return self.live is not None or bool(self.named) or bool(self.displays)

    def looking_for(self, query: Query | None) -> "QueryState":
        """The same with another live query."""
        return replace(self, live=None if query is None else replace(query, temperature=self.temperature))

    def with_named(self, query: Query) -> "QueryState":
        """The same with one more named query; it replaces one of the same name."""
        if any(query.name == other.name for other in self.named):
            named = tuple(query if query.name == other.name else other for other in self.named)
        else:
            named = (*self.named, query)
        return replace(self, named=named)

    def at_temperature(self, temperature: float) -> "QueryState":
        """The same with all queries at another temperature."""
        live = None if self.live is None else replace(self.live, temperature=temperature)
        named = tuple(replace(query, temperature=temperature) for query in self.named)
        return replace(self, live=live, named=named, temperature=temperature)


Change = Callable[[QueryState], QueryState]


class QueryStateStore:
    """Holds the questions; every change is one assignment. Any thread may read and change."""

    def __init__(self) -> None:
        self.questions = QueryState()
        """To be read once where several parts of it are needed."""
        self._lock = threading.Lock()
        self._newest = 0

    def change(self, change: Change) -> None:
        """Exchanges the questions at once, whatever is still being answered."""
        with self._lock:
            self.questions = change(self.questions)

    def ticket(self) -> int:
        """Announces a request: answers to older ones are dropped from now on."""
        with self._lock:
            self._newest += 1
            return self._newest

    def is_newest(self, ticket: int) -> bool:
        """Whether nothing was requested since."""
        return ticket == self._newest

    def answer(self, ticket: int, change: Change) -> bool:
        """Exchanges the questions unless something was requested since.

        Returns:
            Whether it did.
        """
        with self._lock:
            if ticket != self._newest:
                return False
            self.questions = change(self.questions)
            return True
