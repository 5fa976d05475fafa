"""From what was typed or saved, or from the classes of a labelled capture, to queries with embeddings."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from f3rm_ext.capture.ground_truth import LabelledView, LabelSource
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query, add_mutual_negatives, load_embeddings
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, ExampleEncoder, TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX
from f3rm_ext.query.exemplar import Example, deepest_pixel, join_examples, take_example
from f3rm_ext.query.options import NO_NEGATIVES, QuerySpec, Region
from f3rm_ext.query.queryable import QueryHead, get_head
from f3rm_ext.query.run import Photos, Run
from f3rm_ext.utils.output_folder import SUMMARY

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
    background: Embeddings | None = None
    if isinstance(spec.positives, Path):
        positives = load_embeddings(spec.positives, head.dim, head.basis)
    elif regions := [part for part in spec.positives if isinstance(part, Region)]:
        example = join_examples([example_encoder.encode(head, region) for region in regions])
        positives, background = example.positives, query_example(spec.name, head, example).negatives
    else:
        texts = [part for part in spec.positives if isinstance(part, str)]
        positives = text_encoder.encode(head, texts, known=texts)
    if spec.negatives == (NO_NEGATIVES,):
        negatives = Embeddings.empty(head.dim)
    elif spec.negatives:
        negatives = text_encoder.encode(head, spec.negatives)
    elif not isinstance(spec.positives, Path) and isinstance(spec.positives[0], str):
        negatives = text_encoder.encode(head, DEFAULT_NEGATIVES)
    else:
        negatives = mean_of_photos(head) if background is None else background
    unlike = [example_encoder.encode(head, region).positives for region in spec.negative_examples]
    negatives = Embeddings.join([negatives, *unlike])
    return Query(spec.name, head.name, positives, negatives, spec.temperature)


def load_queries(path: Path, run: Run) -> list[tuple[Query, float]]:
    """Reads queries that were saved of the same run, each with the score from which upwards it matches.

    They have their embeddings, so that no encoder is needed.

    Args:
        path: the folder that ``f3rm-ext query`` wrote, or the summary.json in it.

    Raises:
        ConfigError: there is no such file, it is not of ``f3rm-ext query`` or of another run, or a file of vectors is
            missing or has other dimensions.
    """
    file = path / SUMMARY if path.is_dir() else path
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        described, files, negatives = record["queries"], record["vectors"], record["negative_vectors"]
        step, checkpoint, threshold = record["step"], Path(record["checkpoint"]), float(record["threshold"])
        names = [(str(one["name"]), str(one["feature"]), one["temperature"]) for one in described]
        vectors = [(file.parent / files[name], negatives.get(name)) for name, _, _ in names]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The saved query {file} cannot be read ({error}): give a folder of `f3rm-ext query`."
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no saved query of a run, or one of an earlier version ({error} is missing): ask again with "
            "`f3rm-ext query`, and give the folder that it writes."
        ) from error
    if (step, checkpoint) != (run.step, run.checkpoint.resolve()):
        raise ConfigError(
            f"The saved query {file} is of another run ({checkpoint}): ask this one with `f3rm-ext query`, or give the "
            "vectors alone with --vector."
        )
    queries = []
    for (name, feature, temperature), (positive, negative) in zip(names, vectors, strict=True):
        head = get_head(run.model.query_heads(), feature)
        looked_for = load_embeddings(positive, head.dim, head.basis)
        against = Embeddings.empty(head.dim)
        if negative is not None:
            against = load_embeddings(file.parent / negative, head.dim, head.basis)
        queries.append((Query(name, head.name, looked_for, against, temperature or DEFAULT_TEMPERATURE), threshold))
    return queries


def query_example(name: str, head: QueryHead, example: Example) -> Query:
    """Builds a query of an example; where there is nothing to tell it from, that is the mean of all photos."""
    negatives = example.negatives if len(example.negatives) else mean_of_photos(head)
    return Query(name, head.name, example.positives, negatives)


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
    """Builds a query for each name, by text; see :meth:`~f3rm_ext.query.encoders.TextEncoder.encode`."""
    common = encoder.encode(head, DEFAULT_NEGATIVES) if negatives in ("common", "both") else Embeddings.empty(head.dim)
    embeddings = encoder.encode(head, names, known=names)
    queries = [
        Query(name, head.name, Embeddings(embeddings.values[i : i + 1], (name,)), common, temperature)
        for i, name in enumerate(names)
    ]
    return add_mutual_negatives(queries) if negatives in ("others", "both") else queries


@dataclass(frozen=True)
class ExamplePlace:
    """The place in a photo from which an example of a class is taken."""

    name: str
    draw: int
    """Number of the example."""
    photo: int
    """Index of the training photo."""
    region: Region
    """The innermost pixel of the class there."""


def draw_places(
    photos: Photos, truth: LabelSource, names: Sequence[str], draws: int = 1, photo: str = ""
) -> list[ExamplePlace]:
    """Draws places to take examples of each class from, in training photos: always the same ones.

    No photo is drawn twice for a class unless there are too few.

    Args:
        names: the classes; those that no photo shows get no place.
        draws: number of examples of each class, at least 1.
        photo: name of the training photo to take one example of each class from; by default any.

    Raises:
        ConfigError: there is no such training photo with labels.
    """
    photos_of, chances = _find_photos(photos, truth, photo), np.random.default_rng(_SEED)
    draws_in: dict[int, list[tuple[str, int]]] = {}
    for name in names:
        indices = chances.permutation(photos_of.get(name, [])).tolist()
        for draw in range(1 if photo else draws) if indices else ():
            draws_in.setdefault(int(indices[draw % len(indices)]), []).append((name, draw))
    places = []
    # Photo by photo, so that the labels of each are read once for all examples in it.
    for index, drawn in draws_in.items():
        view, file = _train_view(photos, truth, index), photos.files("train")[index]
        assert view is not None
        for name, draw in drawn:
            row, col = deepest_pixel(view.masks[name])
            places.append(ExamplePlace(name, draw, index, Region(file.name, col + 0.5, row + 0.5)))
    return sorted(places, key=lambda place: (place.draw, names.index(place.name)))


def exemplar_queries(
    photos: Photos,
    head: QueryHead,
    places: Sequence[ExamplePlace],
    negatives: Negatives,
    temperature: float = DEFAULT_TEMPERATURE,
    load: Callable[[int], FeatureMap] | None = None,
) -> list[list[Query]]:
    """Builds a query for each place, by the feature there.

    Args:
        load: returns the features of a training photo; by default those of the scene, seen from there.

    Returns:
        The queries of each draw.

    Raises:
        UserError: the photo's features are not available.
    """
    scene = photos.scene_clusters(head.name, load)
    load = load or (lambda index: photos.scene_map("train", index, head.name))
    built: dict[ExamplePlace, Query] = {}
    for index in dict.fromkeys(place.photo for place in places):
        feature_map = load(index)
        for place in places:
            if place.photo == index:
                example = take_example(feature_map, place.region, scene)
                common = example.negatives if negatives in ("common", "both") else Embeddings.empty(head.dim)
                built[place] = Query(place.name, head.name, example.positives, common, temperature)
    drawn = [[built[place] for place in places if place.draw == draw] for draw in sorted({p.draw for p in places})]
    return list(map(add_mutual_negatives, drawn)) if negatives in ("others", "both") else drawn


def _find_photos(photos: Photos, truth: LabelSource, photo: str) -> dict[str, list[int]]:
    """The training photos that show each class, or the one of this name."""
    photos_of: dict[str, list[int]] = {}
    is_labelled = False
    for index, file in enumerate(photos.files("train")):
        view = None if photo and file.name != photo else _train_view(photos, truth, index)
        if view is not None:
            is_labelled = True
            for name, mask in view.masks.items():
                if int(mask.sum()) >= MIN_VISIBLE_PX:
                    photos_of.setdefault(name, []).append(index)
    if not is_labelled:
        which = f"called {photo} " if photo else ""
        raise ConfigError(f"There is no training photo {which}with labels to take examples from: name another one.")
    return photos_of


def _train_view(photos: Photos, truth: LabelSource, index: int) -> LabelledView | None:
    camera = photos.cameras("train")[index]
    return truth.view(photos.files("train")[index], int(camera.height.item()), int(camera.width.item()))
