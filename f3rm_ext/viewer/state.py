"""The queries and settings of a panel, as one immutable value that is replaced as a whole.

The render thread of nerfstudio's viewer reads the state once per picture and can be interrupted at any line. Other
threads change it meanwhile, some of them slowly: text weights take seconds to load. So no reader sees a half-changed
state, and the answer to a request is dropped if a newer request was made in the meantime.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Query

DEFAULT_THRESHOLD = 0.5
"""The relevancy of a place that is as similar to the query as to the nearest negative."""


@dataclass(frozen=True)
class QueryState:
    """Everything that determines what the panel's outputs show."""

    live: Query | None = None
    """The query that relevancy is rendered for."""
    named: tuple[Query, ...] = ()
    """The queries that the label map distinguishes, with unique names."""
    threshold: float = DEFAULT_THRESHOLD
    """Lowest score that counts as found, 0 to 1."""
    temperature: float = DEFAULT_TEMPERATURE
    """Temperature of all queries, above 0."""
    group: tuple[str, int] | None = None
    """The group that is lit: name of the feature, and number."""
    displays: Mapping[str, DisplayBasis] = field(default_factory=dict)
    """Refitted projections to colours by head, in place of the stored ones. Never changed in place."""

    @property
    def is_active(self) -> bool:
        """Whether there is a query or a refitted projection, so that pictures need outputs of the panel."""
        return self.live is not None or bool(self.named) or bool(self.displays)

    def set_live(self, query: Query | None) -> "QueryState":
        """Returns a copy with another live query, at the panel's temperature, in place of any group that is lit."""
        if query is None:
            return replace(self, live=None)
        return replace(self, live=replace(query, temperature=self.temperature), group=None)

    def add_named(self, query: Query) -> "QueryState":
        """Returns a copy with one more named query, which replaces any of the same name."""
        named = {other.name: other for other in self.named} | {query.name: query}
        return replace(self, named=tuple(named.values()))

    def set_temperature(self, temperature: float) -> "QueryState":
        """Returns a copy with all queries at another temperature."""
        live = None if self.live is None else replace(self.live, temperature=temperature)
        named = tuple(replace(query, temperature=temperature) for query in self.named)
        return replace(self, live=live, named=named, temperature=temperature)


Change = Callable[[QueryState], QueryState]


class QueryStateStore:
    """Holds the current state. Any thread may read and change it; a change is one assignment.

    >>> store = QueryStateStore()
    >>> first, second = store.new_request(), store.new_request()
    >>> store.is_newest(first), store.is_newest(second)
    (False, True)
    >>> store.resolve(first, lambda state: replace(state, threshold=0.9))
    False
    >>> store.resolve(second, lambda state: replace(state, threshold=0.7)), store.state.threshold
    (True, 0.7)
    """

    def __init__(self) -> None:
        self.state = QueryState()
        """The current state. Read it once where several of its fields have to agree."""
        self._lock = threading.Lock()
        self._newest_id = 0

    def change(self, change: Change) -> None:
        """Changes the state at once, without superseding any request."""
        with self._lock:
            self.state = change(self.state)

    def new_request(self) -> int:
        """Starts a request and returns its ID. From now on, answers to older requests are dropped."""
        with self._lock:
            self._newest_id += 1
            return self._newest_id

    def is_newest(self, request_id: int) -> bool:
        """Whether no newer request was started."""
        return request_id == self._newest_id

    def resolve(self, request_id: int, change: Change) -> bool:
        """Changes the state in answer to a request unless a newer one was started; returns whether it did."""
        with self._lock:
            if request_id != self._newest_id:
                return False
            self.state = change(self.state)
            return True
