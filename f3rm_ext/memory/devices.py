"""Devices and their memory: a table of known cards, and the device of this machine."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.control_groups import own_groups

GIB = 1 << 30
CARD_SHARE = 0.95
"""Share of a card's memory that a plan may use: cards report 2 to 4 % less than their data sheets say, and what CUDA
takes is an assumption."""


@dataclass(frozen=True)
class Device:
    """A device that a run is planned for."""

    type: str
    """``"cuda"`` or ``"cpu"``."""
    memory_bytes: int
    """Memory of the card, or of the machine for the CPU, bytes."""
    name: str = ""
    """Name of the card, such as ``RTX 4090``; empty if only its memory was given."""

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may use, bytes."""
        return self.memory_bytes if self.type == "cpu" else int(CARD_SHARE * self.memory_bytes)

    @property
    def bandwidth_gb_s(self) -> int | None:
        """Bandwidth of a known card's memory, 10⁹ bytes per second; None for others."""
        return next((card.bandwidth_gb_s for card in CARDS if card.name == self.name), None)


class Card(NamedTuple):
    """A graphics card, by its maker's data sheet."""

    name: str
    memory_gib: int
    bandwidth_gb_s: int
    """Bandwidth of its memory, 10⁹ bytes per second."""


CARDS = (
    Card("GTX 1080 Ti", 11, 484),
    Card("RTX 2060", 6, 336),
    Card("RTX 2070", 8, 448),
    Card("RTX 2080", 8, 448),
    Card("RTX 2080 Ti", 11, 616),
    Card("Titan RTX", 24, 672),
    Card("RTX 3050", 8, 224),
    Card("RTX 3060", 12, 360),
    Card("RTX 3060 Ti", 8, 448),
    Card("RTX 3070", 8, 448),
    Card("RTX 3070 Ti", 8, 608),
    Card("RTX 3080", 10, 760),
    Card("RTX 3080 12GB", 12, 912),
    Card("RTX 3080 Ti", 12, 912),
    Card("RTX 3090", 24, 936),
    Card("RTX 3090 Ti", 24, 1008),
    Card("RTX 4060", 8, 272),
    Card("RTX 4060 Ti", 8, 288),
    Card("RTX 4060 Ti 16GB", 16, 288),
    Card("RTX 4070", 12, 504),
    Card("RTX 4070 Super", 12, 504),
    Card("RTX 4070 Ti", 12, 504),
    Card("RTX 4070 Ti Super", 16, 672),
    Card("RTX 4080", 16, 717),
    Card("RTX 4080 Super", 16, 736),
    Card("RTX 4090", 24, 1008),
    Card("RTX 5060", 8, 448),
    Card("RTX 5060 Ti", 8, 448),
    Card("RTX 5060 Ti 16GB", 16, 448),
    Card("RTX 5070", 12, 672),
    Card("RTX 5070 Ti", 16, 896),
    Card("RTX 5080", 16, 960),
    Card("RTX 5090", 32, 1792),
    Card("RTX 3060 Laptop", 6, 336),
    Card("RTX 3070 Laptop", 8, 448),
    Card("RTX 4060 Laptop", 8, 256),
    Card("RTX 4070 Laptop", 8, 256),
    Card("RTX 4080 Laptop", 12, 432),
    Card("RTX 4090 Laptop", 16, 576),
    Card("RTX A4000", 16, 448),
    Card("RTX A5000", 24, 768),
    Card("RTX A6000", 48, 768),
    Card("RTX 4000 Ada", 20, 360),
    Card("RTX 5000 Ada", 32, 576),
    Card("RTX 6000 Ada", 48, 960),
    Card("RTX PRO 6000", 96, 1792),
    Card("T4", 16, 320),
    Card("P100", 16, 732),
    Card("V100", 16, 900),
    Card("V100 32GB", 32, 900),
    Card("A10", 24, 600),
    Card("A30", 24, 933),
    Card("A40", 48, 696),
    Card("A100", 40, 1555),
    Card("A100 80GB", 80, 1935),
    Card("L4", 24, 300),
    Card("L40", 48, 864),
    Card("L40S", 48, 864),
    Card("H100", 80, 3350),
    Card("H200", 141, 4800),
    Card("B200", 180, 8000),
)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", name.lower())) - {"nvidia", "geforce", "tesla", "gpu"}


def find_card(name: str) -> Card:
    """Returns a known card by part of its name, such as ``4090`` or ``rtx4090``: the one with the shortest such name.

    >>> find_card("nvidia 4090").name, find_card("4060 ti 16 gb").name
    ('RTX 4090', 'RTX 4060 Ti 16GB')

    Raises:
        ConfigError: no card has such a name, or several have.
    """
    words = _words(name)
    lengths = {card: len(_words(card.name)) for card in CARDS if words and words <= _words(card.name)}
    if not lengths:
        raise ConfigError(
            f"No card named {name!r} is known: give its memory instead, such as --vram-gib 16, or one of "
            f"{', '.join(card.name for card in CARDS)}."
        )
    shortest = [card for card, length in lengths.items() if length == min(lengths.values())]
    if len(shortest) > 1:
        raise ConfigError(
            f"{name!r} matches several cards ({', '.join(card.name for card in shortest)}): give more of the name."
        )
    return shortest[0]


def choose_device(device_type: str, gpu: str | None = None, vram_gib: float | int | None = None) -> Device:
    """Returns the device to plan for: the card that was named, or that of this machine.

    Args:
        device_type: type of the device of this machine, such as ``"cpu"``.
        vram_gib: memory of a card, GiB; goes before that of a named card.

    Raises:
        ConfigError: the card is unknown, or the memory of this machine.
    """
    if gpu is not None:
        card = find_card(gpu)
        memory_gib = card.memory_gib if vram_gib is None else vram_gib
        return Device("cuda", int(memory_gib * GIB), card.name)
    if vram_gib is not None:
        return Device("cuda", int(vram_gib * GIB))
    device = this_device(device_type)
    if not device.memory_bytes:
        raise ConfigError("The memory of this machine is not known: give that of a card by --vram-gib.")
    return device


def this_device(device_type: str) -> Device:
    """Returns the first GPU of this machine, or its CPU.

    Raises:
        ConfigError: there is no device of this type, or its memory is not known.
    """
    if device_type == "cpu":
        return Device("cpu", total_bytes(torch.device("cpu")), "the CPU")
    compat.check_device(device_type)
    if device_type != "cuda":
        raise ConfigError(f"The memory of the device {device_type} is not known: give it by --vram-gib.")
    properties = torch.cuda.get_device_properties(0)
    return Device(device_type, properties.total_memory, properties.name)


def total_bytes(device: torch.device) -> int:
    """Returns the memory of a CUDA device; for the CPU the machine's or what its container may use; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0
    return min([total, *read_limits(own_groups("memory"))])


def read_limits(folders: Iterable[Path]) -> list[int]:
    """Returns the limits of memory, bytes, that control groups of version 2 or 1 set."""
    limits = []
    for path in (folder / name for folder in folders for name in ("memory.max", "memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int(path.read_text()))
    return limits
