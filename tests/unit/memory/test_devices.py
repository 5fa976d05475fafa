"""Cards by name, and the memory of this machine."""

from pathlib import Path

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.memory import devices
from f3rm_ext.memory.control_groups import group_folders
from f3rm_ext.memory.devices import CARDS, GIB, choose_device, find_card, read_limits, total_bytes


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX4090", "RTX 4090"),
        ("4090 laptop", "RTX 4090 Laptop"),
        ("5060ti-16gb", "RTX 5060 Ti 16GB"),
        ("a100", "A100"),
        ("A100-80GB", "A100 80GB"),
        ("l40s", "L40S"),
    ],
)
def test_part_of_a_name_is_enough(typed: str, name: str) -> None:
    assert find_card(typed).name == name


def test_a_machine_that_hides_its_memory_cannot_be_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "total_bytes", lambda device: 0)
    with pytest.raises(ConfigError, match=r"memory of this machine is not known.*--vram-gib"):
        choose_device("cpu")


@pytest.mark.parametrize(("typed", "reason"), [("voodoo", "No card named"), ("", "No card"), ("rtx", "several cards")])
def test_unclear_names_are_refused_with_what_there_is(typed: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        find_card(typed)
    assert "RTX 4090" in str(raised.value)


def test_every_card_is_found_by_its_own_name() -> None:
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


def test_memory_by_hand_goes_before_a_name() -> None:
    assert choose_device("cpu", "4090").memory_bytes == 24 * GIB
    device = choose_device("cpu", "4090", 20.5)
    assert (device.type, device.memory_bytes, device.name) == ("cuda", 20.5 * GIB, "RTX 4090")
    assert choose_device("cpu", None, 8).type == "cuda"


def test_this_machine() -> None:
    device = choose_device("cpu")
    assert device.type == "cpu" and device.memory_bytes == total_bytes(torch.device("cpu")) > GIB // 4


def test_memory_that_is_not_known_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"mps.*--vram-gib"):
        choose_device("mps")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1073741824\n"}, [1 << 30]),
        ({"job/memory.max": "max\n", "memory.max": "99\n"}, [99]),
        ({"memory/job/memory.limit_in_bytes": "5\n", "memory/memory.limit_in_bytes": "7\n"}, [5, 7]),
        ({}, []),
    ],
)
def test_limits_of_all_groups_around_count(tmp_path: Path, files: dict[str, str], expected: list[int]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(read_limits(group_folders("memory", "5:memory:/job\n0::/job/step\n", tmp_path))) == expected


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "own_groups", lambda controller: [tmp_path])
    machine = total_bytes(torch.device("cpu"))
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert total_bytes(torch.device("cpu")) == 1 << 30 < machine
