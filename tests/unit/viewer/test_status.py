"""What the status says, and that no text a user writes breaks the markdown."""

import html
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from viser import ViserServer

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.viewer import status


def test_any_text_is_left_as_it_is_by_markdown() -> None:
    text = "{alert(1)} <b>*bold*</b> `code` [a](b) ![c](d) # e_f | g & h\n\n- i"
    shown = status.plain(text)
    assert not set(shown) & set("{}<>*`[]()!|_#") - set("#")
    assert html.unescape(shown) == " ".join(text.split())


def test_long_words_may_be_broken_and_others_not() -> None:
    path = "/a/long/path/to/some_folder/with-weights.pt=" + "x" * 60
    shown = status.plain(f"look at {path} now")
    assert html.unescape(shown.replace("<wbr/>", "")) == f"look at {path} now"
    pieces = shown.split(" ")[2].split("<wbr/>")
    assert "some&#95;" in pieces and max(len(html.unescape(piece)) for piece in pieces) <= 24
    assert "<wbr/>" not in status.plain("short words " * 20)


@pytest.mark.parametrize(
    ("extractor", "expected"),
    [
        ("labels:data=somewhere", "Needs no weights"),
        ("dense-daisy", "understands no text, so query by click"),
        ("dense-daisy:a=/some/where/w.pt,b=2", "dense-daisy:a&#61;w.pt,b&#61;2"),
        ("dinov2:weights=/no/such/file", "understands no text"),
        ("clip:pretrained=/no/such/file", "does not exist"),
        ("klip", "There is no extractor"),
        ("clip:size=3", "has no option"),
    ],
)
def test_the_feature_line_says_what_was_found_or_what_to_do(extractor: str, expected: str) -> None:
    head: Any = SimpleNamespace(extractor=extractor)
    shown = status.describe_feature(head)
    assert shown.startswith("**Feature** ") and expected in shown


def test_queries_are_described_by_what_they_were_made_of() -> None:
    two = Embeddings.from_full(torch.eye(3)[:2], ["blue mug", "cup"])
    query = Query("q", "toy", two, Embeddings.from_full(torch.eye(3)[2:], ["object"]))
    assert status.describe_query(query, 0.5) == "**Query** “blue mug”, “cup” against “object”, found from 0.50"
    assert "plain cosine" in status.describe_query(Query("q", "toy", two, Embeddings.empty(3)), 0.5)
    assert status.describe_query(None, 0.5) == ""
    assert status.describe_labels([query]) == "**Named** `#e69f00` q"
    assert status.describe_labels([]) == ""
    many = Query("q", "toy", Embeddings.from_full(torch.ones(9, 3), [str(i) for i in range(9)]), Embeddings.empty(3))
    assert "“4”, …" in status.describe_query(many, 0.5)
    example = Embeddings.from_full(torch.eye(3)[:2], ["click 1:60,60", "click 1:60,60, part 1"])
    rest = Embeddings.from_full(torch.eye(3)[:2], ["scene, cluster 1", "scene, cluster 2"])
    clicked = status.describe_query(Query("q", "toy", example, rest), 0.5)
    assert clicked == f"**Query** “{status.plain('click 1:60,60')}” against “scene”, found from 0.50"


def test_errors_speak_for_themselves_if_they_are_for_users() -> None:
    assert status.sentence(ConfigError("Do this.")) == "Do this."
    assert status.sentence(ZeroDivisionError("by zero\nmore")) == "ZeroDivisionError: by zero"


def test_the_line_is_shown_before_and_after_there_is_a_viewer() -> None:
    installs: list[int] = []
    line = status.StatusLine(lambda: installs.append(1))
    line.show("one")
    assert not line.is_installed and not installs
    handle = SimpleNamespace(content="")

    def add_markdown(content: str) -> Any:
        handle.content = content
        return handle

    server = object.__new__(ViserServer)
    server.gui = SimpleNamespace(add_markdown=add_markdown)  # type: ignore[assignment]
    line.install(server)
    assert line.is_installed and installs == [1] and handle.content == "one"
    line.show("two")
    assert handle.content == "two"


def test_the_memory_is_said_with_every_picture_but_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    said = iter(["1 MiB", "2 MiB"])
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(status, "describe_use", lambda device: next(said))
    line = status.MemoryLine(lambda: torch.device("cpu"))
    line.update()
    line.update()
    assert line.content == "**Memory** 1 MiB"
    now[0] += 1.0
    line.update()
    assert line.content == "**Memory** 2 MiB"


def test_the_memory_of_a_process_is_in_use_and_at_its_peak() -> None:
    line = status.MemoryLine(lambda: torch.device("cpu"))
    line.update()
    assert re.fullmatch(
        r"\*\*Memory\*\* [\d.]+ [MG]iB in use, [\d.]+ [MG]iB at the last peak, of [\d.]+ GiB", line.content
    )
