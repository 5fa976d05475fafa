"""From what was typed, or from the classes of a labelled capture, to queries with embeddings."""

from collections.abc import Sequence
from pathlib import Path
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

_SEED = 0
"""Draws the photos that examples come from."""
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
    if isinstance(spec.positives, Path):
        positives = load_embeddings(spec.positives, head.dim, head.basis)
    elif regions := [part for part in spec.positives if isinstance(part, Region)]:
        examples = [example_encoder.encode(head, region) for region in regions]
        positives = Embeddings.join([example.positives for example in examples])
        background = Embeddings.join([example.background_clusters for example in examples])
    else:
        positives = text_encoder.encode(head, [part for part in spec.positives if isinstance(part, str)])
    if spec.negatives == (NO_NEGATIVES,):
        negatives = Embeddings.empty(head.dim)
    elif spec.negatives:
        negatives = text_encoder.encode(head, spec.negatives)
    elif not isinstance(spec.positives, Path) and isinstance(spec.positives[0], str):
        negatives = text_encoder.encode(head, DEFAULT_NEGATIVES)
    else:
        negatives = background if len(background) else mean_of_photos(head)
    unlike = [example_encoder.encode(head, region).positives for region in spec.negative_examples]
    negatives = Embeddings.join([negatives, *unlike])
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
    *,
    photo: str = "",
    draws: int = 1,
) -> list[list[Query]]:
    """Builds queries for each class by the 2D feature of one pixel: the innermost one of the class in a training photo.

    The photos are drawn at random for each class, always the same ones, and not twice unless there are too few.

    Args:
        names: the classes; those that no photo shows get no query.
        photo: name of the training photo to take all examples from; by default any.
        draws: number of examples of each class, at least 1.

    Returns:
        The queries of each draw, of which there is only one from a single photo.

    Raises:
        ConfigError: there is no such training photo with labels.
        UserError: the photo's features are not available.
    """
    shown = _find_shown(photos, truth, photo)
    files, chances = photos.files("train"), np.random.default_rng(_SEED)
    order = {name: chances.permutation(shown[name]).tolist() for name in names if name in shown}
    drawn = []
    for number in range(1 if photo else draws):
        queries = []
        for name, indices in order.items():
            index = indices[number % len(indices)]
            view = _train_view(photos, truth, index)
            assert view is not None
            row, col = deepest_pixel(view.masks[name])
            region = Region(files[index].name, col + 0.5, row + 0.5)
            feature_map = photos.feature_map("train", index, head.name)
            positives, common = embed_region(feature_map, region), Embeddings.empty(head.dim)
            if negatives in ("common", "both"):
                common = background_clusters(feature_map, region)
            queries.append(Query(name, head.name, positives, common, temperature))
        drawn.append(add_mutual_negatives(queries) if negatives in ("others", "both") else queries)
    return drawn


def _find_shown(photos: Photos, truth: LabelSource, photo: str) -> dict[str, list[int]]:
    """The training photos that show each class, or the one of this name."""
    shown: dict[str, list[int]] = {}
    is_labelled = False
    for index, file in enumerate(photos.files("train")):
        view = None if photo and file.name != photo else _train_view(photos, truth, index)
        if view is not None:
            is_labelled = True
            for name, mask in view.masks.items():
                if int(mask.sum()) >= MIN_VISIBLE_PX:
                    shown.setdefault(name, []).append(index)
    if not is_labelled:
        which = f"called {photo} " if photo else ""
        raise ConfigError(f"There is no training photo {which}with labels to take examples from: name another one.")
    return shown


def _train_view(photos: Photos, truth: LabelSource, index: int) -> LabelledView | None:
    camera = photos.cameras("train")[index]
    return truth.view(photos.files("train")[index], int(camera.height.item()), int(camera.width.item()))
