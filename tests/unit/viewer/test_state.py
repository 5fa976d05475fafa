"""Questions are exchanged whole; what was asked first and answered last is dropped."""

import threading
from collections.abc import Callable

import pytest

from f3rm_ext.query.embeddings import Query
from f3rm_ext.viewer.state import QueryState, QueryStateStore
from f3rm_ext.viewer.worker import LatestJob


def test_an_answer_to_an_older_request_is_dropped(query_for: Callable[..., Query]) -> None:
    board = QueryStateStore()
    first, second = board.ticket(), board.ticket()
    assert not board.is_newest(first) and board.is_newest(second)
    assert board.answer(second, lambda q: q.looking_for(query_for("mug")))
    assert not board.answer(first, lambda q: q.looking_for(query_for("book")))
    assert board.questions.live is not None and board.questions.live.name == "mug"


def test_a_change_is_not_dropped_and_supersedes_nothing(query_for: Callable[..., Query]) -> None:
    board = QueryStateStore()
    ticket = board.ticket()
    board.change(lambda q: q.with_named(query_for("book")))
    assert board.answer(ticket, lambda q: q.looking_for(query_for("mug")))
    assert [query.name for query in board.questions.named] == ["book"]


def test_changes_of_many_threads_all_count() -> None:
    from dataclasses import replace

    board = QueryStateStore()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(200):
            board.change(lambda q: replace(q, threshold=q.threshold + 1.0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.questions.threshold == pytest.approx(1600.5)


def test_a_reader_keeps_what_it_has_read(query_for: Callable[..., Query]) -> None:
    board = QueryStateStore()
    board.change(lambda q: q.with_named(query_for("mug")))
    read = board.questions
    board.change(lambda q: q.with_named(query_for("book")))
    assert len(read.named) == 1 and len(board.questions.named) == 2


def test_names_are_unique_and_keep_their_place(query_for: Callable[..., Query]) -> None:
    questions = QueryState().with_named(query_for("mug")).with_named(query_for("book"))
    again = query_for("mug", "thing")
    questions = questions.with_named(again)
    assert [query.name for query in questions.named] == ["mug", "book"] and questions.named[0] is again


def test_one_temperature_holds_for_all_queries(query_for: Callable[..., Query]) -> None:
    questions = QueryState().looking_for(query_for("mug")).with_named(query_for("book")).at_temperature(0.5)
    assert questions.live is not None and questions.live.temperature == 0.5
    assert questions.named[0].temperature == 0.5
    later = questions.looking_for(query_for("book"))
    assert later.live is not None and later.live.temperature == 0.5


def test_anything_asked(query_for: Callable[..., Query]) -> None:
    assert not QueryState().are_any
    assert QueryState().looking_for(query_for("mug")).are_any and QueryState().with_named(query_for("mug")).are_any


def test_of_jobs_that_wait_only_the_newest_runs() -> None:
    job, ran = LatestJob("test"), []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(30)
        ran.append(1)

    job.submit(first)
    assert begun.wait(30)
    job.submit(lambda: ran.append(2))
    job.submit(lambda: ran.append(3))
    assert not job.join(0.01)
    go_on.set()
    assert job.join(30.0) and ran == [1, 3]
    job.submit(lambda: ran.append(4))
    assert job.join(30.0) and ran == [1, 3, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_does_not_keep_the_next_from_running() -> None:
    job, ran = LatestJob("test"), []
    job.submit(lambda: {}["no such key"])
    assert job.join(30.0)
    job.submit(lambda: ran.append(1))
    assert job.join(30.0) and ran == [1]
