"""Pairs of photos to match: all, neighbours in time, or the most similar."""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32, UInt8

from f3rm_ext.sfm.database import FeatureDatabase, Pair, translate_errors

Matching = Literal["exhaustive", "sequential", "vocabulary"]
MOST_EXHAUSTIVE = 200
"""Largest number of photos of which all pairs are matched: 19,900 pairs."""
OVERLAP = 10
SIMILAR = 40
"""Number of most similar photos to match each photo with."""
_WORDS, _SAMPLE = 64, 50_000
"""Number of visual words, and of descriptors that they are computed from."""


def choose_pairs(
    matching: Literal["auto"] | Matching, database: FeatureDatabase, names: Sequence[str], is_video: bool = False
) -> tuple[Matching, list[Pair]]:
    """Returns the pairs of photos to match, which are given in the order of time, and how they were chosen."""
    if matching == "auto":
        matching = "sequential" if is_video else "exhaustive" if len(names) <= MOST_EXHAUSTIVE else "vocabulary"
    if matching == "exhaustive":
        return matching, list(itertools.combinations(names, 2))
    return matching, sequential_pairs(names) if matching == "sequential" else similar_pairs(database, names)


def sequential_pairs(names: Sequence[str], overlap: int = OVERLAP) -> list[Pair]:
    """Returns pairs at most ``overlap`` apart, and pairs 16, 32, 64 … apart, which close loops.

    >>> len(sequential_pairs([str(i) for i in range(20)], overlap=3))
    58
    """
    number = len(names)
    gaps = [*range(1, overlap + 1), *(16 << k for k in range(number.bit_length()) if overlap < 16 << k < number)]
    return [(names[i], names[i + gap]) for i in range(number) for gap in gaps if i + gap < number]


def similar_pairs(database: FeatureDatabase, names: Sequence[str], similar: int = SIMILAR) -> list[Pair]:
    """Returns pairs of each photo and so many most similar ones, by visual words of the photos' own features."""
    ids = database.ids()
    with database.open() as opened, translate_errors("comparing photos"):
        signatures = vlad_signatures([opened.read_descriptors(ids[name]).data for name in names])
    scores = signatures @ signatures.T
    np.fill_diagonal(scores, -np.inf)
    nearest = np.argsort(-scores, axis=1)[:, : min(similar, len(names) - 1)]
    pairs = {(min(i, int(j)), max(i, int(j))) for i, row in enumerate(nearest) for j in row}
    return [(names[i], names[j]) for i, j in sorted(pairs)]


def vlad_signatures(descriptors: Sequence[UInt8[np.ndarray, "_ 128"]]) -> Float32[np.ndarray, "photos signature"]:
    """Returns a unit vector for each photo; those of photos that show the same things have a large product.

    VLAD (Jégou et al. 2010), normalised as by Arandjelović and Zisserman (2013): for each visual word, the sum of how
    descriptors differ from it. That of a photo without descriptors is 0.
    """
    from scipy.cluster.vq import kmeans2

    random = np.random.default_rng(0)
    share = max(1, _SAMPLE // max(1, len(descriptors)))
    sample = np.concatenate([unit_rows(random.permutation(rows)[:share]) for rows in descriptors])
    if not len(sample):
        return np.zeros((len(descriptors), 1), np.float32)
    words = kmeans2(sample, min(_WORDS, len(sample)), iter=10, minit="points", rng=0, missing="warn")[0]
    signatures = []
    for rows in map(unit_rows, descriptors):
        # The nearest word w of a row r: |r - w|² = |r|² - 2 (r · w - |w|² / 2).
        nearest = (rows @ words.T - (words**2).sum(axis=1) / 2).argmax(axis=1)
        member = np.eye(len(words), dtype=np.float32)[nearest]
        sums = member.T @ rows - member.sum(axis=0)[:, None] * words
        signatures.append(unit_rows(unit_rows(sums).reshape(1, -1))[0])
    return np.stack(signatures).astype(np.float32)


def unit_rows(rows: np.ndarray) -> Float32[np.ndarray, "rows columns"]:
    """Returns descriptors as float32 vectors of length 1."""
    rows = rows.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
