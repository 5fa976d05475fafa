"""The state is replaced as a whole, and late answers to older requests are dropped."""

from collections.abc import Callable

from f3rm_ext.query.embeddings import Query
from f3rm_ext.viewer.state import QueryState, QueryStateStore


def test_the_result_of_an_older_request_is_dropped(query_for: Callable[..., Query]) -> None:
    store = QueryStateStore()
    first, second = store.new_request(), store.new_request()
    assert not store.is_newest(first) and store.is_newest(second)
    assert store.resolve(second, lambda q: q.set_live(query_for("mug")))
    assert not store.resolve(first, lambda q: q.set_live(query_for("book")))
    assert store.state.live is not None and store.state.live.name == "mug"


def test_a_change_is_not_dropped_and_supersedes_nothing(query_for: Callable[..., Query]) -> None:
    store = QueryStateStore()
    request_id = store.new_request()
    store.change(lambda q: q.add_named(query_for("book")))
    assert store.resolve(request_id, lambda q: q.set_live(query_for("mug")))
    assert [query.name for query in store.state.named] == ["book"]


def test_names_are_unique_and_keep_their_place(query_for: Callable[..., Query]) -> None:
    state = QueryState().add_named(query_for("mug")).add_named(query_for("book"))
    again = query_for("mug", "thing")
    state = state.add_named(again)
    assert [query.name for query in state.named] == ["mug", "book"] and state.named[0] is again


def test_one_temperature_holds_for_all_queries(query_for: Callable[..., Query]) -> None:
    state = QueryState().set_live(query_for("mug")).add_named(query_for("book")).set_temperature(0.5)
    assert state.live is not None and state.live.temperature == 0.5
    assert state.named[0].temperature == 0.5
    later = state.set_live(query_for("book"))
    assert later.live is not None and later.live.temperature == 0.5
