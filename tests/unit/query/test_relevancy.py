"""Relevancy against hand-computed cases and the paper's own form in float64."""

import math

import pytest
import torch

from f3rm_ext.query.relevancy import OTHER, label_map, relevancy, relevancy_reference


def cosines(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize("negatives", [1, 2, 4, 8])
def test_equal_negatives_count_once(negatives: int) -> None:
    """One softmax over all of them would give .818, .409, .204, .102."""
    found = relevancy(torch.tensor([0.30]), torch.full((negatives,), 0.15), 0.1)
    assert float(found) == pytest.approx(0.8176, abs=1e-4)


def test_known_values() -> None:
    both = torch.tensor([0.2])
    assert float(relevancy(both, both, 0.1)) == 0.5
    assert float(relevancy(torch.tensor([0.3]), torch.tensor([0.1]), 0.2)) == pytest.approx(1 / (1 + math.exp(-1)))
    # The worst negative and the best positive decide.
    found = relevancy(torch.tensor([-0.4, 0.1]), torch.tensor([-0.9, 0.2, 0.0]), 0.1)
    assert float(found) == pytest.approx(1 / (1 + math.exp(1)))


@pytest.mark.parametrize("temperature", [0.01, 0.1, 1.0])
def test_it_equals_the_reference(temperature: float) -> None:
    positive, negative = cosines(50, 3), cosines(50, 4, seed=1)
    expected = relevancy_reference(positive, negative, temperature)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(relevancy(positive, negative, temperature).double(), expected, atol=2e-6, rtol=0)


def test_the_reference_is_a_softmax_over_pairs() -> None:
    """Written out once more, in plain Python."""
    positive, negative = [0.3, -0.2], [0.1, 0.25, -0.6]

    def pair(p: float, n: float) -> float:
        return math.exp(p / 0.1) / (math.exp(p / 0.1) + math.exp(n / 0.1))

    expected = max(min(pair(p, n) for n in negative) for p in positive)
    found = relevancy_reference(
        torch.tensor(positive, dtype=torch.float64), torch.tensor(negative, dtype=torch.float64), 0.1
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_label_map_takes_the_best_or_other() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3], [0.2, 0.1, 0.4], [0.5, 0.1, 0.2], [0.0, 0.0, 0.49]])
    assert label_map(scores, 0.5).tolist() == [1, OTHER, 0, OTHER]
    assert label_map(scores, -1.0).tolist() == [1, 2, 0, 2]
    assert label_map(scores.view(2, 2, 3), 0.5).shape == (2, 2)
