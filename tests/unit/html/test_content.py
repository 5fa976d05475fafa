"""Durations, plurals, and the facts about the machine."""

from pathlib import Path

import pytest

from f3rm_ext.html.content import capture_name, machine_facts


def test_a_folder_named_images_is_called_by_what_it_is_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fox" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "fox")
    assert {capture_name(Path(name)) for name in ("images", "../fox/images", ".", "../fox")} == {"fox"}
    assert capture_name(Path("../fox/transforms.json")) == "fox"
    assert capture_name(Path("/photos")) == "photos"


def test_facts_name_versions_and_no_folders() -> None:
    facts = dict(machine_facts("cpu"))
    assert facts["device"] == "cpu" and "f3rm-ext" in facts["packages"] and "nerfstudio" in facts["packages"]
    assert str(Path.home()) not in str(facts)
