"""Durations, plurals, and the facts about the machine."""

from pathlib import Path

import pytest

from f3rm_ext.report.content import duration, machine_facts, plural


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60.0, "1 min 00 s"), (605.0, "10 min 05 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plurals() -> None:
    assert (plural(1, "photo"), plural(0, "photo"), plural(3, "photo")) == ("1 photo", "0 photos", "3 photos")


def test_facts_name_versions_and_no_folders() -> None:
    facts = dict(machine_facts("cpu"))
    assert facts["device"] == "cpu" and "f3rm-ext" in facts["packages"] and "nerfstudio" in facts["packages"]
    assert str(Path.home()) not in str(facts)
