"""Sets of queries: one for each class of a labelled capture, by text or by example."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from f3rm_ext.capture.ground_truth import GroundTruth, LabelledView
from f3rm_ext.errors import ConfigError
from f3rm_ext.query.background import background_clusters
from f3rm_ext.query.choice import deepest_pixel
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query, against_each_other
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX
from f3rm_ext.query.exemplar import Region, exemplar
from f3rm_ext.query.queryable import QueryHead
from f3rm_ext.query.run import Photos

Negatives = Literal["common", "others", "both", "none"]
"""What a query is told from: what is common (phrases like `object`, or for examples what else their photo shows), the
other queries, both, or nothing (the score is then the cosine)."""


def mean_of_photos(head: QueryHead) -> Embeddings:
    """The mean feature of the training photos: the negative where no texts can be."""
    return Embeddings.of_codes(head.display_mean[None].detach().cpu(), ("the mean of all photos",))


def text_queries(
    head: QueryHead,
    names: Sequence[str],
    encoder: TextEncoder,
    negatives: Negatives,
    temperature: float = DEFAULT_TEMPERATURE,
) -> list[Query]:
    """A query for each name.

    Raises:
        UserError: see :meth:`~f3rm_ext.query.encoders.TextEncoder.encode`.
    """
    common = encoder.encode(head, DEFAULT_NEGATIVES) if negatives in ("common", "both") else _nothing(head)
    vectors = encoder.encode(head, names)
    queries = [
        Query(name, head.name, Embeddings(vectors.values[i : i + 1], (name,)), common, temperature)
        for i, name in enumerate(names)
    ]
    return against_each_other(queries) if negatives in ("others", "both") else queries


def exemplar_queries(
    photos: Photos,
    head: QueryHead,
    truth: GroundTruth,
    names: Sequence[str],
    negatives: Negatives,
    temperature: float = DEFAULT_TEMPERATURE,
    photo: str = "",
) -> list[Query]:
    """A query for each class, by its innermost pixel in one training photo, and that pixel's 2D feature.

    Args:
        photos: of the capture.
        head: in whose space.
        truth: labels of the training photos.
        names: classes to ask for; those the photo does not show are left out.
        negatives: what each is told from.
        temperature: of the relevancy.
        photo: name of the training photo; by default the one that shows most classes.

    Raises:
        ConfigError: there is no such training photo with labels.
        UserError: its features cannot be had.
    """
    index, view = _exemplar_view(photos, truth, photo)
    name = photos.files("train")[index].name
    feature_map = photos.feature_map("train", index, head.name)
    queries = []
    for thing in names:
        mask = view.masks.get(thing)
        if mask is not None and int(mask.sum()) >= MIN_VISIBLE_PX:
            row, col = deepest_pixel(mask)
            place = Region(name, col + 0.5, row + 0.5)
            vector = exemplar(feature_map, place)
            common = background_clusters(feature_map, place) if negatives in ("common", "both") else _nothing(head)
            queries.append(Query(thing, head.name, vector, common, temperature))
    return against_each_other(queries) if negatives in ("others", "both") else queries


def _exemplar_view(photos: Photos, truth: GroundTruth, photo: str) -> tuple[int, LabelledView]:
    cameras, found = photos.cameras("train"), []
    for index, file in enumerate(photos.files("train")):
        if photo and file.name != photo:
            continue
        view = truth.view(file, int(cameras.height[index].item()), int(cameras.width[index].item()))
        if view is not None:
            sizes = [int(mask.sum()) for mask in view.masks.values()]
            seen = sum(size >= MIN_VISIBLE_PX for size in sizes)
            found.append((seen, float(np.median(sizes)) if sizes else 0.0, -index, view))
    if not found:
        which = f"called {photo} " if photo else ""
        raise ConfigError(f"There is no training photo {which}with labels to take examples from: name another one.")
    _, _, negative, view = max(found, key=lambda entry: entry[:3])
    return -negative, view


def _nothing(head: QueryHead) -> Embeddings:
    return Embeddings.empty(head.dim)
