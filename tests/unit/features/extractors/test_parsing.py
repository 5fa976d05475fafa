"""Reading NAME:key=value,key=value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.extractors.parsing import build_config, extractor_name, parse_options


@dataclass
class Options:
    count: int = 1
    ratio: float = 0.5
    flag: bool = False
    label: str = "a"
    kind: Literal["x", "y"] = "x"
    path: Path | None = None
    limit: int | None = 7
    layers: tuple[int, ...] = (-1,)


@pytest.mark.parametrize(
    ("text", "name"),
    [("clip", "clip"), ("clip:model=ViT-B-16", "clip"), (" dinov2 :weights=C:/x", "dinov2"), ("a:b=c:d", "a")],
)
def test_name_is_what_stands_before_the_first_colon(text: str, name: str) -> None:
    assert extractor_name(text) == name


def test_options_as_written() -> None:
    assert parse_options("x: short-side-px = 3 ,label=a=b,") == {"short_side_px": "3", "label": "a=b"}
    assert parse_options("x") == parse_options("x:") == {}


def test_values_take_the_type_of_their_field() -> None:
    text = "x:count=3,ratio=2,flag=Yes,label=tag,kind=y,path=/a/b.pth,limit=none,layers=6+7+-1"
    assert build_config(Options, text) == Options(
        count=3, ratio=2.0, flag=True, label="tag", kind="y", path=Path("/a/b.pth"), limit=None, layers=(6, 7, -1)
    )
    assert build_config(Options, "x") == Options()
    assert build_config(Options, "x:limit=3,flag=off") == Options(limit=3, flag=False)


def test_home_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert build_config(Options, "x:path=~/w.pth").path == Path("/home/somebody/w.pth")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x:count", ["'count'", "key=value"]),
        ("x:=3", ["'=3'", "key=value"]),
        ("x:count=1,count=2", ["count", "twice"]),
        ("x:cuont=1", ["'cuont'", "did you mean count", "ratio", "layers"]),
        ("x:count=two", ["count", "'two'", "whole number"]),
        ("x:count=1.5", ["count", "whole number"]),
        ("x:ratio=much", ["ratio", "a number"]),
        ("x:flag=maybe", ["flag", "true or false"]),
        ("x:kind=z", ["kind", "one of x, y"]),
        ("x:layers=1+b", ["layers", "whole number"]),
        ("x:limit=many", ["limit", "whole number"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str]) -> None:
    with pytest.raises(ExtractorError) as caught:
        build_config(Options, text)
    for word in words:
        assert word in str(caught.value)
