"""Losses against loops in float64, in value and gradient."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.moco import losses


def unit(rows: int, dim: int, seed: int) -> Tensor:
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values, dim=1)


def cross_entropy(similarities: list[float], positive: int, temperature: float) -> float:
    total = sum(math.exp(value / temperature) for value in similarities)
    return -math.log(math.exp(similarities[positive] / temperature) / total)


def loop_info_nce(
    query: np.ndarray, key: np.ndarray, queue: np.ndarray, temperature: float, ids: list[int], queue_ids: list[int]
) -> float:
    """InfoNCE as the paper writes it, one query after the other."""
    found = []
    for row, vector in enumerate(query):
        others = [float(vector @ other) for other, image in zip(queue, queue_ids, strict=True) if image != ids[row]]
        found.append(cross_entropy([float(vector @ key[row]), *others], 0, temperature))
    return sum(found) / len(found)


def numeric_gradient(function, at: np.ndarray) -> np.ndarray:
    gradient = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-6
        gradient[index] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


@pytest.mark.parametrize("temperature", [0.07, 0.2, 1.0])
def test_info_nce_is_that_of_the_paper(temperature: float) -> None:
    query, key, queue = unit(4, 6, 0).requires_grad_(), unit(4, 6, 1), unit(7, 6, 2)
    ids, queue_ids = [3, 1, 4, 5], [1, 9, 1, 4, 8, 8, 2]
    logits = losses.info_nce_logits(query, key, queue, temperature, torch.tensor(ids), torch.tensor(queue_ids))
    loss = losses.info_nce(logits)
    loss.backward()

    def reference(at: np.ndarray) -> float:
        return loop_info_nce(at, key.double().numpy(), queue.double().numpy(), temperature, ids, queue_ids)

    at = query.detach().double().numpy()
    assert loss.item() == pytest.approx(reference(at), rel=1e-5)
    assert query.grad is not None
    np.testing.assert_allclose(query.grad.numpy(), numeric_gradient(reference, at), rtol=1e-3, atol=1e-5)


def test_keys_of_the_same_image_are_no_negatives() -> None:
    query, key = unit(2, 5, 0), unit(2, 5, 1)
    queue = torch.cat([query, unit(3, 5, 2)])  # its first keys are the queries themselves
    ids, queue_ids = torch.tensor([0, 1]), torch.tensor([0, 1, 7, 8, 9])
    masked = losses.info_nce_logits(query, key, queue, 0.2, ids, queue_ids)
    plain = losses.info_nce_logits(query, key, queue, 0.2)
    assert masked[0, 1] == masked[1, 2] == -math.inf
    assert torch.isfinite(masked).sum() == masked.numel() - 2
    assert losses.info_nce(masked) < losses.info_nce(plain)
    assert losses.pretext_accuracy(masked) >= losses.pretext_accuracy(plain)


def test_without_negatives_the_loss_is_zero() -> None:
    logits = losses.info_nce_logits(unit(2, 5, 0), unit(2, 5, 1), torch.zeros(0, 5), 0.2)
    assert losses.info_nce(logits) == 0 and losses.pretext_accuracy(logits) == 1


def test_symmetric_loss_is_that_of_v3() -> None:
    one, two = unit(5, 4, 0).requires_grad_(), unit(5, 4, 1).requires_grad_()
    key_1, key_2 = unit(5, 4, 2), unit(5, 4, 3)
    loss = losses.symmetric_loss(one, two, key_1, key_2, 0.2)
    loss.backward()

    def side(query: np.ndarray, keys: Tensor) -> float:
        rows = [[float(vector @ key) for key in keys.double().numpy()] for vector in query]
        return sum(cross_entropy(row, index, 0.2) for index, row in enumerate(rows)) / len(rows)

    def reference(first: np.ndarray) -> float:
        return 2 * 0.2 * (side(first, key_2) + side(two.detach().double().numpy(), key_1))

    at = one.detach().double().numpy()
    assert loss.item() == pytest.approx(reference(at), rel=1e-5)
    assert one.grad is not None
    np.testing.assert_allclose(one.grad.numpy(), numeric_gradient(reference, at), rtol=1e-3, atol=1e-5)


def test_each_process_finds_its_positives_among_the_keys_of_all() -> None:
    queries, keys = unit(6, 4, 0), unit(6, 4, 1)
    whole = losses.info_nce(losses.batch_logits(queries, keys, 0.2))
    parts = [losses.info_nce(losses.batch_logits(queries[at : at + 3], keys, 0.2, first=at)) for at in (0, 3)]
    assert whole.item() == pytest.approx(sum(part.item() for part in parts) / 2, rel=1e-5)


def test_alignment_and_uniformity_by_loops() -> None:
    one, two = unit(5, 3, 0), unit(5, 3, 1)
    distances = [float(((a - b) ** 2).sum()) for a, b in zip(one.double(), two.double(), strict=True)]
    assert losses.alignment(one, two).item() == pytest.approx(sum(distances) / 5, rel=1e-5)
    pairs = [math.exp(-2 * float(((one[i] - one[j]).double() ** 2).sum())) for i in range(5) for j in range(i)]
    assert losses.uniformity(one).item() == pytest.approx(math.log(sum(pairs) / len(pairs)), rel=1e-5)


def test_spread_tells_collapse_from_even_outputs() -> None:
    assert losses.output_spread(unit(1, 64, 0).expand(32, 64)).item() == pytest.approx(0, abs=1e-6)
    assert losses.output_spread(unit(4096, 64, 0)).item() == pytest.approx(1, abs=0.02)
