"""Moments in fewer bytes: what is read is near what was written, and zero stays zero."""

import pytest
import torch

from f3rm_ext.splat.memory.moments import MOMENTS, detect_storage

ALL = pytest.mark.parametrize("kind", MOMENTS)
PRECISION = {"float32": 0.0, "bfloat16": 2**-7, "int8": 1 / 127}
"""Largest error: of the value for floating point, of the largest of the row for codes."""
ROW_BYTES = {"float32": 2 * 45 * 4, "bfloat16": 2 * 45 * 2, "int8": 2 * (45 + 4)}
"""Of both moments of 45 numbers."""


@ALL
def test_read_what_was_written(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(50, 15, 3, generator=generator), torch.rand(50, 15, 3, generator=generator)
    moments = MOMENTS[kind]
    state = moments.zeros(first)
    rows = torch.arange(0, 100, 2)[:25]
    moments.write(state, rows, first[rows], second[rows], generator)
    read_first, read_second = moments.read(state, rows)
    largest = first[rows].abs().amax(dim=(1, 2), keepdim=True)
    assert ((read_first - first[rows]).abs() <= PRECISION[kind] * largest).all()
    roots, expected = read_second.sqrt(), second[rows].sqrt()
    assert ((roots - expected).abs() <= PRECISION[kind] * expected.amax(dim=(1, 2), keepdim=True)).all()
    others = [row for row in range(50) if row not in rows.tolist()]
    assert all(value.abs().max() == 0 for value in moments.read(state, torch.tensor(others)))
    assert detect_storage(state) == kind


@ALL
def test_bytes_are_those_of_the_tensors(kind: str) -> None:
    state = MOMENTS[kind].zeros(torch.zeros(10, 15, 3))
    assert sum(value.nbytes for value in state.values()) == 10 * ROW_BYTES[kind]
    assert all(len(value) == 10 for value in state.values())  # so that rows can be added and removed


@ALL
def test_reading_gives_copies(kind: str) -> None:
    state = MOMENTS[kind].zeros(torch.zeros(4, 3))
    for value in MOMENTS[kind].read(state, slice(0, 4)):
        value.add_(1)
    assert all(value.abs().max() == 0 for value in state.values())


def test_a_small_second_moment_beside_a_large_one_is_not_lost() -> None:
    """A zero there would make the next step of that number as long as 1/eps."""
    moments, second = MOMENTS["int8"], torch.tensor([[1.0, 1e-9, 0.0]])
    state = moments.zeros(second)
    moments.write(state, slice(0, 1), torch.zeros(1, 3), second, torch.Generator())
    read = moments.read(state, slice(0, 1))[1][0]
    assert read[0] == 1 and read[1].sqrt().item() == pytest.approx(1 / 255) and read[2] == 0
