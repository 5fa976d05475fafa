"""Memory of this machine."""

from pathlib import Path

import pytest
import torch

from f3rm_ext.profiling import memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(("written", "expected"), [("1073741824\n", 1 << 30), ("max\n", None), (None, None)])
def test_a_container_s_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str | None, expected: int | None
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", ())
    machine = memory.total_bytes(CPU)
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", (limit,))
    if written is not None:
        limit.write_text(written)
    assert memory.total_bytes(CPU) == (expected or machine) and machine > 1 << 30


def test_libraries_of_a_package_are_mapped() -> None:
    torch_bytes = memory.mapped_bytes("torch")
    assert 20 << 20 < torch_bytes < memory.resident_bytes()
    assert memory.mapped_bytes("torch", "numpy") > torch_bytes and memory.mapped_bytes("no such package") == 0
