"""What queries need of a model and its features, and the scores of several queries at rays or points."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from f3rm_ext.data.uploads import upload
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.space import MIN_NORM, ExtraOutput, FeatureSpace, RenderedOf
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.relevancy import relevancy

VECTORS_AT_ONCE = 512
"""Vectors that features are compared with at a time, and those of one query more."""


@runtime_checkable
class QueryHead(Protocol):
    """One distilled feature, as queries and exports use it."""

    name: str
    """Unique in its model."""
    dim: int
    """Dimension of the distilled space."""
    extractor: str
    """Name and options of the extractor, as in ``--pipeline.datamanager.features.extractors``."""
    identity: dict[str, str]
    """Model and weights of the extractor."""
    display_mean: Tensor
    """Mean feature of the training images, in the distilled space."""
    clusters: Tensor | None
    """Directions that the scene shows, for queries by example; None where they are not known beforehand."""

    @property
    def basis(self) -> Float[Tensor, "code full"] | None:
        """Orthonormal rows of the PCA codes; None where full features are distilled."""
        ...

    def space(self) -> FeatureSpace:
        """Coordinates in which rendered values are compared with queries."""
        ...

    def colors(self, features: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch 3"]:
        """RGB of features, 0 to 1: their projection on the principal components of the training images."""
        ...


@runtime_checkable
class Queryable(Protocol):
    """A model that can be queried: a feature field, or splats with features."""

    training: bool

    def train(self, mode: bool = True) -> object: ...

    @property
    def device(self) -> torch.device:
        """The device of its renderings."""
        ...

    def query_heads(self) -> Mapping[str, QueryHead]:
        """Returns its features by name, the primary one first."""
        ...

    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Renders one camera, all outputs and further ones chunk by chunk, (h, w, channels) each.

        ``rgb``, ``accumulation``, and ``depth`` and ``expected_depth`` along the rays are always among them. What lies
        outside the box is not rendered.
        """
        ...

    def render_points(self, points: Float[Tensor, "points 3"]) -> dict[str, Float[Tensor, "points hidden"]]:
        """Returns the values of each head at points of the scene frame."""
        ...


@dataclass(frozen=True)
class GroupedPoints:
    """Points of a model with a feature, in groups (:mod:`f3rm_ext.query.groups`)."""

    positions: Float[Tensor, "points 3"]
    """Scene frame."""
    codes: Float[Tensor, "points feat"]
    """Their features, in the distilled space."""
    groups: Int[Tensor, " points"]
    """Number of each point's group; -1 for none."""


@runtime_checkable
class HasGroups(Protocol):
    """A model whose parts may be grouped."""

    def grouped_points(self, name: str) -> GroupedPoints | None:
        """Returns the groups by the feature of this name; None where they are not known."""
        ...

    def group_map(self, camera: Cameras, name: str, obb_box: OrientedBox | None = None) -> Int64[np.ndarray, "h w"]:
        """Returns the group that most of each pixel shows; -1 for none."""
        ...


@runtime_checkable
class Editable(Protocol):
    """A model of points that can be hidden one by one."""

    def opened_checkpoint(self) -> Path | None:
        """Returns the file that the model was loaded from, unless it is being trained."""
        ...

    def points(self) -> Float[Tensor, "points 3"]:
        """Returns the positions of all points, scene frame."""
        ...

    def choose_points(
        self,
        cameras: Cameras,
        query: Query,
        threshold: float,
        inside: Bool[Tensor, " points"],
        on_view: Callable[[], None],
        lock: AbstractContextManager[object],
    ) -> tuple[Bool[Tensor, " points"], Float[Tensor, " points"], Bool[Tensor, " points"]]:
        """Finds the points that show what a query finds in views, the share of each that does, 0 to 1, and those of
        the points that remain when it is shown alone.

        Args:
            inside: points that may belong to it.
            on_view: called after each view, at most thrice per camera.
            lock: held while a view is drawn.
        """
        ...


class Scorer:
    """Scores several queries at once, from rendered values. Holds no model."""

    def __init__(
        self, queries: Sequence[Query], spaces: Mapping[str, FeatureSpace], device: torch.device | str = "cpu"
    ) -> None:
        assert queries, "no queries"
        self.queries = tuple(queries)
        self._parts: list[tuple[str, FeatureSpace, Tensor, list[int], list[int]]] = []
        for name in self.heads:
            space, own = spaces[name].to(device), [i for i, query in enumerate(queries) if query.head == name]
            while own:
                # A group of positives of each query, and one of its negatives if it has any.
                rows: list[Tensor] = []
                count = 0
                while count < len(own) and (not rows or sum(map(len, rows)) < VECTORS_AT_ONCE):
                    query = queries[own[count]]
                    rows += [part.values for part in (query.positives, query.negatives) if len(part)]
                    count += 1
                ends = [0, *itertools.accumulate(map(len, rows))]
                self._parts.append((name, space, upload(torch.cat(rows), device), ends, own[:count]))
                own = own[count:]

    @classmethod
    def from_model(cls, model: Queryable, queries: Sequence[Query]) -> "Scorer":
        """Returns the scorer for the values that a model renders.

        Raises:
            ConfigError: the model lacks a head, or a query has other dimensions than its head.
        """
        heads = model.query_heads()
        for query in queries:
            head = get_head(heads, query.head)
            for vectors in (query.positives, query.negatives):
                if vectors.values.shape[1] != head.dim:
                    raise ConfigError(
                        f"The query {query.name!r} has {vectors.values.shape[1]} dimensions, but the feature "
                        f"{head.name!r} has {head.dim}: take it from features of the same extractor and number of "
                        "codes."
                    )
        resolved = [replace(query, head=get_head(heads, query.head).name) for query in queries]
        return cls(resolved, {name: heads[name].space() for name in {query.head for query in resolved}}, model.device)

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads whose rendered values it needs."""
        return tuple(dict.fromkeys(query.head for query in self.queries))

    def __call__(self, rendered_of: RenderedOf) -> Float[Tensor, "rays queries"]:
        """Returns the scores at rays or points: the relevancy or cosine of each query.

        Where there is no feature, as beside all Gaussians, it is :attr:`Query.lowest`, not the ½ of a feature that
        is as similar to the negatives.
        """
        rendered_by = {name: rendered_of(name) for name in self.heads}
        empty_by = {name: rendered.norm(dim=-1) <= MIN_NORM for name, rendered in rendered_by.items()}
        scores: list[Tensor] = [torch.empty(0)] * len(self.queries)
        for name, space, vectors, ends, own in self._parts:
            best = iter(space.best_cosines(rendered_by[name], vectors, ends).unbind(dim=1))
            for index in own:
                query, score = self.queries[index], next(best)
                if query.is_relevancy:
                    score = relevancy(score[:, None], next(best)[:, None], query.temperature)
                scores[index] = score.masked_fill(empty_by[name], query.lowest)
        return torch.stack(scores, dim=-1)


def get_head(heads: Mapping[str, QueryHead], name: str) -> QueryHead:
    """Returns the head of this name; the primary one for an empty name.

    Raises:
        ConfigError: the model has no such head, or none at all.
    """
    if not heads:
        raise ConfigError(
            "This checkpoint has no distilled features, so it cannot be queried: train with "
            "--pipeline.datamanager.features.extractors, or lift some onto splats with `f3rm-ext features lift`."
        )
    if not name:
        return next(iter(heads.values()))
    if name not in heads:
        raise ConfigError(f"The model has no feature {name!r}: choose from those it has ({', '.join(heads)}).")
    return heads[name]


def score_image(
    model: Queryable, camera: Cameras, queries: Sequence[Query]
) -> tuple[Float[Tensor, "h w queries"], dict[str, Tensor]]:
    """Renders the scores of every pixel and all outputs of the model, by name, in one pass over the rays.

    Features are compared in chunks of rays, in no more dimensions than there are hidden values: memory does not depend
    on the dimension of the features. Errors are those of :meth:`Scorer.from_model`.
    """
    scorer = Scorer.from_model(model, queries)
    outputs = model.render_camera(camera, {"scores": lambda _, rendered_of: scorer(rendered_of)})
    return outputs.pop("scores"), outputs


@torch.inference_mode()
def render_map(model: Queryable, head: QueryHead, camera: Cameras, obb_box: OrientedBox | None = None) -> FeatureMap:
    """Renders a feature from one camera, a patch for each pixel; it is 0 where there is nothing."""
    space = head.space()
    extra: dict[str, ExtraOutput] = {"map": lambda _, rendered_of: space.features(rendered_of(head.name))}
    features = model.render_camera(camera, extra, obb_box)["map"].float().cpu()
    left_out = space.left_out(features)
    rows, cols = features.shape[:2]
    return FeatureMap(
        values=features.numpy().astype(np.float16),
        grid=PatchGrid.covering(rows, cols, rows, cols),
        residual_norm=None if left_out is None else left_out.numpy().astype(np.float16),
    )


@torch.inference_mode()
def score_points(
    model: Queryable, points: Float[Tensor, "points 3"], queries: Sequence[Query], chunk: int = 1 << 16
) -> Float[Tensor, "points queries"]:
    """Returns the scores at points of the scene frame, on the CPU."""
    chunks = (model.render_points(part.to(model.device)).__getitem__ for part in points.split(chunk))
    return score_chunks(Scorer.from_model(model, queries), chunks)


@torch.inference_mode()
def score_chunks(scorer: Scorer, chunks: Iterable[RenderedOf]) -> Float[Tensor, "points queries"]:
    """Returns the scores of features that come in chunks, on the CPU."""
    return torch.cat([scorer(rendered_of).cpu() for rendered_of in chunks])
