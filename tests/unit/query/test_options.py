"""From what is typed to specifications of queries."""

import math
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.options import QueryOptions, QueryTarget, Region, parse_queries, split_prompts


def options(**given: Any) -> QueryOptions:
    return QueryOptions(load_config=Path("config.yml"), **given)


def test_texts_with_and_without_names() -> None:
    given = options(text=("blue mug", "fruit = banana | plantain", "kiwi|fig"), negative=("wall",), temperature=0.3)
    specs = parse_queries(given)
    assert {spec.name: spec.positives for spec in specs} == {
        "blue mug": ("blue mug",),
        "fruit": ("banana", "plantain"),
        "kiwi": ("kiwi", "fig"),
    }
    assert {(spec.negatives, spec.feature, spec.temperature) for spec in specs} == {(("wall",), "", 0.3)}


def test_names_in_any_script() -> None:
    given = options(text=("🦊=fox | wolf", "Ben's mug (left)=mug"), exemplar=("Löwe, groß=a/b.png:1,2",))
    assert [(spec.name, spec.positives) for spec in parse_queries(given)] == [
        ("🦊", ("fox", "wolf")),
        ("Ben's mug (left)", ("mug",)),
        ("Löwe, groß", (Region("a/b.png", 1.0, 2.0),)),
    ]


def test_examples_and_vectors_with_and_without_names() -> None:
    places = ("a/b.png:1,2", "face=a/b.png:1,2,3,4 | c.png", "runs/lr=3/c.png:1,2")
    given = options(exemplar=places, vector=("v/mug.npy", "cup=v/mug.npy"), negative_exemplar=("d.png:5,6",))
    assert {spec.negative_examples for spec in parse_queries(given)} == {(Region("d.png", 5.0, 6.0),)}
    assert [(spec.name, spec.positives) for spec in parse_queries(given)] == [
        ("b.png:1,2", (Region("a/b.png", 1.0, 2.0),)),
        ("face", (Region("a/b.png", 1.0, 2.0, 3.0, 4.0), Region("c.png"))),
        ("c.png:1,2", (Region("runs/lr=3/c.png", 1.0, 2.0),)),
        ("mug", Path("v/mug.npy")),
        ("cup", Path("v/mug.npy")),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": ("",)}, "empty"),
        ({"text": ("mug | ",)}, "empty"),
        ({"text": ("name=",)}, "empty"),
        ({"text": ("mug", "mug | cup")}, "'mug'"),
        ({"exemplar": ("a.png:1,2,3",)}, "IMAGE:x,y,w,h"),
        ({"vector": ("cup=",)}, "cup="),
        ({"text": ("mug",), "negative": ("none", "table")}, "--negative"),
        ({"text": ("mug",), "negative": (" ",)}, "--negative"),
        ({"text": ("mug",), "negative": ("none",), "negative_exemplar": ("a.png:1,2",)}, "--negative none"),
        ({"text": ("mug",), "negative_exemplar": ("a.png:1",)}, "IMAGE:x,y"),
        ({"exemplar": ("a.png:1,2 |",)}, "IMAGE:x,y"),
        *(({"temperature": value}, "--temperature") for value in (0.0, -0.1, math.nan, math.inf)),
        ({"threshold": 1.5}, "--threshold is 1.5"),
    ],
)
def test_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**given)


def test_either_a_run_or_a_mesh_is_queried() -> None:
    config, mesh = Path("run/config.yml"), Path("room/room.ply")
    assert QueryTarget(load_config=config).target_folder() == Path("run")
    assert QueryTarget(mesh=mesh, data=Path("photos")).target_folder() == Path("room")
    for given, message in (
        ({}, "--load-config or --mesh"),
        ({"load_config": config, "mesh": mesh}, "--load-config or --mesh"),
        ({"load_config": config, "data": Path("photos")}, "--data.* --mesh"),
    ):
        with pytest.raises(ConfigError, match=message):
            QueryTarget(**given)


def test_alternatives_are_split() -> None:
    assert split_prompts("blue mug") == ["blue mug"]
    assert split_prompts(" mug| cup ") == ["mug", "cup"]
    for text in ("", "  ", "mug|", "|"):
        with pytest.raises(ConfigError, match="empty"):
            split_prompts(text)


# --- regions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.png", Region("a.png")),
        ("images/a.png:12.5,7", Region("images/a.png", 12.5, 7.0)),
        ("a.png:1,2,30,4", Region("a.png", 1.0, 2.0, 30.0, 4.0)),
        ("C:/odd:name.png:1,2", Region("C:/odd:name.png", 1.0, 2.0)),
        ("C:/photos/a.png", Region("C:/photos/a.png")),
        ("C:\\photos\\a.png", Region("C:\\photos\\a.png")),
        ("a.png: 1, 2", Region("a.png", 1.0, 2.0)),
    ],
)
def test_regions_are_read(text: str, expected: Region) -> None:
    assert Region.parse(text) == expected
    assert Region.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":1,2", "a.png:1", "a.png:1,2,3", "a.png:x,y", "a.png:nan,2", "a.png:1,inf", "a:1,2,0,5", "a:1,2,5,-1"]
)
def test_regions_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"IMAGE:x,y,w,h|is empty"):
        Region.parse(text)


def test_a_region_at_another_size_is_the_same_place() -> None:
    assert Region("a", 10.0, 20.0, 30.0, 40.0).scale(0.5, 2.0) == Region("a", 5.0, 40.0, 15.0, 80.0)
    assert Region("a", 10.0, 20.0).scale(0.5, 2.0) == Region("a", 5.0, 40.0)
    assert Region("a").scale(0.5, 2.0) == Region("a")


def test_extent_and_middle() -> None:
    assert Region("a", 10.0, 20.0, 30.0, 40.0).box_px(99, 99) == (10, 20, 40, 60)
    assert Region("a", 10.0, 20.0).box_px(99, 99) == (10, 20, 10, 20)
    assert Region("a").box_px(80, 60) == (0, 0, 80, 60)
    assert Region("a", 10.0, 20.0, 30.0, 40.0).middle_px(99, 99) == (25, 40)
    assert Region("a").middle_px(80, 60) == (40, 30)
    assert [Region.parse(text).is_point for text in ("a:1,2", "a:1,2,3,4", "a")] == [True, False, False]


@pytest.mark.parametrize("inside", ["a", "a:0,0", "a:40,30", "a:0,0,40,30", "a:39,29,1,1"])
def test_places_inside_are_taken(inside: str) -> None:
    Region.parse(inside).require_inside(40, 30)


@pytest.mark.parametrize("outside", ["a:-1,0", "a:0,-0.5", "a:40.5,3", "a:3,31", "a:30,0,11,5", "a:0,20,5,11"])
def test_places_outside_are_refused(outside: str) -> None:
    with pytest.raises(ConfigError, match="40 x 30"):
        Region.parse(outside).require_inside(40, 30)
