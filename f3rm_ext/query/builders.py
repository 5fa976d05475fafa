"""From what was typed, or from the classes of a labelled capture, to queries with embeddings."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from f3rm_ext.capture.ground_truth import LabelledView, LabelSource
from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query, add_mutual_negatives, load_embeddings
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, ExampleEncoder, TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX
from f3rm_ext.query.exemplar import background_clusters, deepest_pixel, embed_region
from f3rm_ext.query.options import NO_NEGATIVES, QuerySpec, Region
from f3rm_ext.query.queryable import QueryHead, get_head
from f3rm_ext.query.run import Photos

Negatives = Literal["common", "others", "both", "none"]
"""What the query of a class is compared with: *common* phrases like `object` (by example, the rest of the photo), the
*others* among the queries, *both*, or *none* (its score is then the cosine)."""


def encode_queries(specs: Sequence[QuerySpec], photos: Photos, text_encoder: TextEncoder | None = None) -> list[Query]:
    """Turns queries as they were typed into queries with embeddings, by default on the model's device.

    Raises:
        UserError: there is no such feature or photo, the feature understands no text, or weights are missing.
    """
    heads = photos.model.query_heads()
    text_encoder = text_encoder or TextEncoder(photos.model.device)
    example_encoder = ExampleEncoder(photos, photos.model.device)
    return [encode(spec, get_head(heads, spec.feature), text_encoder, example_encoder) for spec in specs]


def encode(spec: QuerySpec, head: QueryHead, text_encoder: TextEncoder, example_encoder: ExampleEncoder) -> Query:
    """Turns one query as it was typed into a query with embeddings.

    Raises:
        UserError: there is no such photo, the feature understands no text, or weights are missing.
    """
    background = Embeddings.empty(head.dim)
    if isinstance(spec.positives, tuple):
        positives = text_encoder.encode(head, spec.positives)
    elif isinstance(spec.positives, Region):
        example = example_encoder.encode(head, spec.positives)
        positives, background = example.positives, example.background_clusters
    else:
        positives = load_embeddings(spec.positives, head.dim, head.basis)
    if spec.negatives == (NO_NEGATIVES,):
        negatives = Embeddings.empty(head.dim)
    elif spec.negatives:
        negatives = text_encoder.encode(head, spec.negatives)
    elif isinstance(spec.positives, tuple):
        negatives = text_encoder.encode(head, DEFAULT_NEGATIVES)
    else:
        negatives = background if len(background) else mean_of_photos(head)
    return Query(spec.name, head.name, positives, negatives, spec.temperature)


def mean_of_photos(head: QueryHead) -> Embeddings:
    """Returns the mean feature of the training photos: the negative where neither texts nor a background can be."""
    return Embeddings.from_codes(head.display_mean[None].detach().cpu(), ("the mean of all photos",))


def text_queries(
    head: QueryHead,
    names: Sequence[str],
    encoder: TextEncoder,
    negatives: Negatives,
    temperature: float = DEFAULT_TEMPERATURE,
) -> list[Query]:
    """Builds a query for each name, by text.

    Raises:
        UserError: see :meth:`~f3rm_ext.query.encoders.TextEncoder.encode`.
    """
    common = encoder.encode(head, DEFAULT_NEGATIVES) if negatives in ("common", "both") else Embeddings.empty(head.dim)
    embeddings = encoder.encode(head, names)
    queries = [
        Query(name, head.name, Embeddings(embeddings.values[i : i + 1], (name,)), common, temperature)
        for i, name in enumerate(names)
    ]
    return add_mutual_negatives(queries) if negatives in ("others", "both") else queries


def exemplar_queries(
    photos: Photos,
    head: QueryHead,
    truth: LabelSource,
    names: Sequence[str],
    negatives: Negatives,
    temperature: float = DEFAULT_TEMPERATURE,
    photo: str = "",
) -> list[Query]:
    """Builds a query for each class, by the 2D feature of its innermost pixel in one training photo.

    Args:
        names: the classes; those that the photo does not show get no query.
        photo: name of the training photo; by default the one that shows most classes.

    Raises:
        ConfigError: there is no such training photo with labels.
        UserError: the photo's features are not available.
    """
    index, view = _exemplar_view(photos, truth, photo)
    name = photos.files("train")[index].name
    feature_map = photos.feature_map("train", index, head.name)
    queries = []
    for thing in names:
        mask = view.masks.get(thing)
        if mask is not None and int(mask.sum()) >= MIN_VISIBLE_PX:
            row, col = deepest_pixel(mask)
            region = Region(name, col + 0.5, row + 0.5)
            positives, common = embed_region(feature_map, region), Embeddings.empty(head.dim)
            if negatives in ("common", "both"):
                common = background_clusters(feature_map, region)
            queries.append(Query(thing, head.name, positives, common, temperature))
    return add_mutual_negatives(queries) if negatives in ("others", "both") else queries


def _exemplar_view(photos: Photos, truth: LabelSource, photo: str) -> tuple[int, LabelledView]:
    """Index and labels of the training photo that shows most classes, or of the one of this name."""
    cameras, candidates = photos.cameras("train"), []
    for index, file in enumerate(photos.files("train")):
        if photo and file.name != photo:
            continue
        view = truth.view(file, int(cameras.height[index].item()), int(cameras.width[index].item()))
        if view is not None:
            sizes = [int(mask.sum()) for mask in view.masks.values()]
            seen = sum(size >= MIN_VISIBLE_PX for size in sizes)
            candidates.append((seen, float(np.median(sizes)) if sizes else 0.0, -index, view))
    if not candidates:
        which = f"called {photo} " if photo else ""
        raise ConfigError(f"There is no training photo {which}with labels to take examples from: name another one.")
    _, _, negative_index, view = max(candidates, key=lambda entry: entry[:3])
    return -negative_index, view
