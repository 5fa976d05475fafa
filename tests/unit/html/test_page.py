"""The page: one file, well formed, escaped, honest about what is missing."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from f3rm_ext.html.content import ReportContent, Stage
from f3rm_ext.html.demo_page import build_page, lead

VOID = {"meta", "img", "input", "br", "link", "hr"}
MakeContent = Callable[..., ReportContent]


class Checker(HTMLParser):
    """Follows the tags of a page: what is open, which addresses it names, what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.addresses: list[str] = []
        self.pictures: set[str] = set()
        self.wanted: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [values[name] or "" for name in ("src", "href", "srcset", "data", "action") if name in values]
        if "data-picture" in values:
            self.pictures.add(values["data-picture"] or "")
        self.wanted |= {values[name] or "" for name in ("data-left", "data-right") if name in values}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    return checker


def words(page: str) -> str:
    return re.sub(r"\s+", " ", " ".join(check(page).text))


def test_page_is_well_formed_complete_and_needs_nothing_else(make_content: MakeContent) -> None:
    page = build_page(make_content())
    checker = check(page)
    assert checker.wrong == [] and checker.open == []
    assert checker.addresses and all(address.startswith(("data:image/", "#")) for address in checker.addresses)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert checker.wanted == {"true", "rendered", "true_features", "features", "true_depth", "depth"}
    assert checker.pictures == {f"{view}-{name}" for view in (0, 1) for name in checker.wanted}


def test_texts_are_escaped(make_content: MakeContent) -> None:
    bad = "<script>alert('x')</script>&\""
    content = make_content(
        title=bad,
        data_name=bad,
        synthetic=False,
        folder=bad,
        lpips_note=bad,
        stages=[Stage(bad, 1.0, bad, note=bad)],
        facts=[(bad, bad)],
        next_commands=[(bad, bad)],
    )
    content.measured["heads"] = {"x": bad}
    content.measured["query"]["object"] = bad
    content.measured["query"]["image"] = bad
    content.measured["query"]["head"] = bad
    content.measured["query"]["objects"][0]["name"] = bad
    content.measured["views"][0]["image"] = bad
    content.coverage["per_image"][0]["image"] = bad
    page = build_page(content)
    assert "<script>alert" not in page
    checker = check(page)
    assert checker.wrong == [] and checker.open == []
    assert page.count("<script>") == 1


def test_what_was_measured_is_said(make_content: MakeContent) -> None:
    text = words(build_page(make_content()))
    for expected in ("24.50 dB ± 0.50", "0.800", "0.0300", "2.1 cm", "0.021 m", "75%", "12,345 rays/s", "8,000 rays/s"):
        assert expected in text, expected
    assert "2 min 00 s" in text  # all stages together
    assert "f3rm-ext scene synth capture" in text and "ns-viewer --load-config config.yml" in text
    # Every object that was tried counts.
    assert "all 3 labelled objects" in text and "Found in 3 of 4 tries (75%)" in text
    assert "Mean IoU 0.50" in text and "1 more object could not be judged" in text
    assert text.index("vase") < text.index("duck", text.index("All objects")), "best objects come first"
    assert "view 1: best 0.97, on the object" in text and "view 2: best 0.97, not on the object" in text


def test_missing_lpips_is_explained(make_content: MakeContent) -> None:
    content = make_content()
    assert content.lpips_note and content.lpips_note in words(build_page(content))
    content.metrics["lpips"] = 0.123
    text = words(build_page(content))
    assert "0.123" in text and content.lpips_note not in text


@pytest.mark.parametrize("nothing", ["coverage", "curves", "stages", "metrics"])
def test_parts_without_data_are_left_out(make_content: MakeContent, nothing: str) -> None:
    empty: Any = [] if nothing == "stages" else {}
    page = build_page(make_content(**{nothing: empty}))
    checker = check(page)
    assert checker.wrong == [] and checker.open == []
    heading = {"coverage": "What training has seen", "curves": "How training went"}.get(nothing)
    assert heading is None or heading not in page


def test_a_plain_radiance_field_has_no_query(make_content: MakeContent) -> None:
    content = make_content()
    content.measured.update(query=None, heads={}, depth=None)
    for view in content.measured["views"]:
        view["files"] = {name: view["files"][name] for name in ("true", "rendered", "depth")}
    page = build_page(content)
    assert "query by example" not in page and 'class="strip three"' in page
    assert check(page).wanted == {"true", "rendered", "depth"}
    assert "queried" not in lead(content)


def test_missing_pictures_are_left_out(make_content: MakeContent) -> None:
    content = make_content()
    (content.pictures / "view_0_depth.png").unlink()
    (content.pictures / "view_1_true.png").unlink()
    checker = check(build_page(content))
    assert checker.wrong == [] and "0-depth" not in checker.pictures and "1-true" not in checker.pictures


@pytest.mark.parametrize(("is_point", "said"), [(True, "x = 3, y = 4"), (False, "mean feature")])
def test_the_page_says_what_the_query_is(make_content: MakeContent, is_point: bool, said: str) -> None:
    content = make_content()
    content.measured["query"]["is_point"] = is_point
    page = build_page(content)
    assert said in words(page) and check(page).wrong == [] and "the frame</figcaption>" in page
