"""Embeddings in the feature space of one head, the named queries made of them, and their files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.pca_codes import project_query
from f3rm_ext.features.space import MIN_NORM

DEFAULT_TEMPERATURE = 0.1
"""LERF's: the relevancy goes from 0.27 to 0.73 while the difference of cosines goes from −0.1 to 0.1."""
_ROUNDING = 1e-3
"""What codes leave out counts as rounding where its norm is below this."""


@dataclass(frozen=True)
class Embeddings:
    """Directions of an extractor's full space, written in the distilled space of a head.

    Their norm is 1 in the full space. With PCA codes it is smaller here, since the codes leave a part out.

    >>> mug = Embeddings.from_full(torch.tensor([[3.0, 4.0]]), ["mug"])
    >>> mug.values
    tensor([[0.6000, 0.8000]])
    >>> len(Embeddings.join([mug, Embeddings.empty(2)]))
    1
    """

    values: Float[Tensor, "vectors feat"]
    """Float32 on the CPU."""
    sources: tuple[str, ...]
    """Where each comes from: a text, or a place in an image such as ``photo.jpg:120,80``."""

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.sources), (self.values.shape, self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    @classmethod
    def empty(cls, dim: int) -> "Embeddings":
        return cls(torch.zeros(0, dim), ())

    @classmethod
    def join(cls, parts: Sequence["Embeddings"]) -> "Embeddings":
        return cls(torch.cat([part.values for part in parts]), tuple(s for part in parts for s in part.sources))

    @classmethod
    def from_full(
        cls,
        vectors: Float[Tensor, "vectors full"],
        sources: Sequence[str],
        code_basis: Float[Tensor, "code full"] | None = None,
    ) -> "Embeddings":
        """From vectors of the extractor's full space, of any norm; ``code_basis`` has the rows of PCA codes, if any.

        Raises:
            ConfigError: a vector is zero or not finite.
        """
        vectors = vectors.float().cpu()
        norms = _norms(vectors, sources)
        unit = vectors / norms[:, None]
        return cls(unit if code_basis is None else project_query(code_basis.float().cpu(), unit), tuple(sources))

    @classmethod
    def from_codes(
        cls,
        values: Float[Tensor, "vectors feat"],
        sources: Sequence[str],
        residual_norm: Float[Tensor, "vectors"] | None = None,
    ) -> "Embeddings":
        """From vectors of the distilled space, of any norm.

        Args:
            values: codes, or full features where no codes are used.
            residual_norm: norm of what the codes leave out; None where they leave nothing out.

        Raises:
            ConfigError: a vector is zero or not finite.
        """
        values = values.float().cpu()
        if residual_norm is None:
            norms = _norms(values, sources)
        else:
            norms = _norms(torch.cat([values, residual_norm.float().cpu()[:, None]], dim=1), sources)
        return cls(values / norms[:, None], tuple(sources))


def _norms(vectors: Float[Tensor, "vectors feat"], sources: Sequence[str]) -> Float[Tensor, "vectors"]:
    norms = vectors.norm(dim=-1)
    for norm, source in zip(norms.tolist(), sources, strict=True):
        if not MIN_NORM < norm < float("inf"):
            what = "is zero" if norm <= MIN_NORM else "is not finite"
            raise ConfigError(
                f"The feature of {source!r} {what}, so nothing can be compared with it: query another way."
            )
    return norms


@dataclass(frozen=True)
class Query:
    """A named query to one head."""

    name: str
    """Name in results and files."""
    head: str
    """Name of the head in whose space the embeddings lie; empty for the model's first."""
    positives: Embeddings
    """What to look for; the most similar one counts."""
    negatives: Embeddings
    """What to tell it from. Without negatives the score is the plain cosine, −1 to 1; else the relevancy, 0 to 1."""
    temperature: float = DEFAULT_TEMPERATURE
    """Temperature of the relevancy, > 0."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"The temperature is {self.temperature}, but it must be above 0: 0.1 is usual.")
        if not len(self.positives):
            raise ConfigError(f"The query {self.name!r} looks for nothing: give a text or an example.")

    @property
    def is_relevancy(self) -> bool:
        """Whether the score is a relevancy (0 to 1) and not a cosine."""
        return len(self.negatives) > 0

    @property
    def lowest(self) -> float:
        """Lowest possible score; the highest is 1."""
        return 0.0 if self.is_relevancy else -1.0

    def describe(self) -> dict[str, object]:
        """The query as JSON, without its embeddings."""
        return {
            "name": self.name,
            "feature": self.head,
            "positives": list(self.positives.sources),
            "negatives": list(self.negatives.sources),
            "score": "relevancy" if self.is_relevancy else "cosine",
            "temperature": self.temperature if self.is_relevancy else None,
        }


def add_mutual_negatives(queries: Sequence[Query]) -> list[Query]:
    """Returns the queries, each with the positives of all others of its head as further negatives."""
    contrasted = []
    for query in queries:
        others = [other.positives for other in queries if other is not query and other.head == query.head]
        contrasted.append(replace(query, negatives=Embeddings.join([query.negatives, *others])))
    return contrasted


def pack_embeddings(embeddings: Embeddings) -> Float[np.ndarray, "vectors _"]:
    """Returns what :func:`load_embeddings` reads without loss: rows of norm 1.

    With PCA codes, the norm of what they leave out is one more value.
    """
    values = embeddings.values
    lost = (1.0 - values.double().square().sum(dim=1, keepdim=True)).clamp_min(0.0).sqrt().float()
    is_complete = bool((lost < _ROUNDING).all())
    return (values if is_complete else torch.cat([values, lost], dim=1)).numpy()


def load_embeddings(path: Path, dim: int, code_basis: Float[Tensor, "code full"] | None) -> Embeddings:
    """Reads vectors that ``f3rm-ext query`` or another program saved.

    Args:
        path: a .npy file with one vector or a matrix of rows, of the full feature space or the distilled one. With
            PCA codes, one more value is the norm of what they leave out.
        code_basis: orthonormal rows of the PCA codes; None where full features are distilled.

    Raises:
        ConfigError: the file cannot be read, or its vectors have another dimension.
    """
    try:
        with open(path, "rb") as stream:
            values = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"The vector file {path} cannot be read ({error}): give a .npy file.") from error
    if values.ndim not in (1, 2) or not values.size or values.dtype.kind not in "fiu":
        raise ConfigError(f"The vector file {path} holds no vector of numbers: save one of shape (D,) or (n, D).")
    with np.errstate(over="ignore"):  # infinite values are refused below, by name
        rows = torch.from_numpy(np.atleast_2d(values).astype(np.float32))
    sources = [path.name if len(rows) == 1 else f"{path.name}[{i}]" for i in range(len(rows))]
    full = dim if code_basis is None else code_basis.shape[1]
    if rows.shape[1] == full:
        return Embeddings.from_full(rows, sources, code_basis)
    if rows.shape[1] == dim:
        return Embeddings.from_codes(rows, sources)
    if code_basis is not None and rows.shape[1] == dim + 1:
        return Embeddings.from_codes(rows[:, :-1], sources, rows[:, -1])
    known = f"{full}" if full == dim else f"{full} (or {dim} PCA codes)"
    raise ConfigError(
        f"The vectors in {path} have {rows.shape[1]} dimensions, but this feature has {known}: "
        "take them from the same extractor."
    )
