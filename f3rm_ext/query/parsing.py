"""From what a user types on the command line to queries: texts, places in images, and saved vectors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.builders import mean_of_photos
from f3rm_ext.query.embeddings import Embeddings, Query, load_vectors
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder, split_prompts
from f3rm_ext.query.example_encoder import Examples
from f3rm_ext.query.exemplar import Region
from f3rm_ext.query.options import NO_NEGATIVES, QueryOptions
from f3rm_ext.query.queryable import QueryHead, checked_head
from f3rm_ext.query.run import Run

_NAME = re.compile(r"\w[\w .+-]*")


@dataclass(frozen=True)
class QuerySpec:
    """One query as it was typed."""

    kind: Literal["text", "exemplar", "vector"]
    """How it asks."""
    name: str
    """What to call it."""
    prompts: tuple[str, ...] = ()
    """Texts that mean the same."""
    region: Region | None = None
    """Place in an image."""
    file: Path | None = None
    """Of vectors."""


def parse_queries(options: QueryOptions) -> list[QuerySpec]:
    """The queries in the order texts, examples, vectors.

    Raises:
        ConfigError: one of them is not understood, or two have the same name.
    """
    found = [*map(_text, options.text), *map(_exemplar, options.exemplar), *map(_vector, options.vector)]
    names = [asked.name for asked in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two queries are called {name!r}: give them names of their own, NAME=...")
    return found


def build_queries(options: QueryOptions, run: Run, encoder: TextEncoder | None = None) -> list[Query]:
    """The queries of the command line, ready for the run's model.

    Args:
        options: what was typed.
        run: whose feature is asked.
        encoder: of texts; by default a new one on the model's device.

    Raises:
        UserError: there is no such feature or photo, the feature understands no text, weights are missing ...
    """
    head = checked_head(run.model.query_heads(), options.feature)
    encoder = encoder or TextEncoder(run.model.device)
    examples = Examples(run, head, run.model.device)
    queries = []
    for asked in parse_queries(options):
        background_clusters = Embeddings.empty(head.dim)
        if asked.kind == "text":
            positives = encoder.encode(head, asked.prompts)
        elif asked.region is not None:
            example = examples.example(asked.region)
            positives, background_clusters = example.positives, example.background_clusters
        else:
            assert asked.file is not None
            positives = load_vectors(asked.file, head.dim, head.basis)
        negatives = _negatives(asked, options.negative, head, encoder, background_clusters)
        queries.append(Query(asked.name, head.name, positives, negatives, options.temperature))
    return queries


def _negatives(
    asked: QuerySpec, given: Sequence[str], head: QueryHead, encoder: TextEncoder, background_clusters: Embeddings
) -> Embeddings:
    if tuple(given) == (NO_NEGATIVES,):
        return Embeddings.empty(head.dim)
    if given:
        return encoder.encode(head, given)
    if asked.kind == "text":
        return encoder.encode(head, DEFAULT_NEGATIVES)
    return background_clusters if len(background_clusters) else mean_of_photos(head)


def _text(typed: str) -> QuerySpec:
    name, content = _split_name(typed)
    prompts = tuple(split_prompts(content))
    return QuerySpec("text", name or prompts[0], prompts=prompts)


def _exemplar(typed: str) -> QuerySpec:
    name, content = _split_name(typed)
    region = Region.parse(content)
    place = str(replace(region, image=Path(region.image).name))
    return QuerySpec("exemplar", name or place, region=region)


def _vector(typed: str) -> QuerySpec:
    name, content = _split_name(typed)
    if not content:
        raise ConfigError(f"The vector {typed!r} names no file: give FILE or NAME=FILE.")
    return QuerySpec("vector", name or Path(content).stem, file=Path(content))


def _split_name(typed: str) -> tuple[str, str]:
    """Name and content of ``NAME=CONTENT``; an empty name where there is none."""
    name, equals, content = typed.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()):
        return "", typed
    return name.strip(), content.strip()
