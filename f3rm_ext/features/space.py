"""The space in which rendered features are compared with queries, without forming the features themselves.

A head's features are W h, where the hidden values h are rendered along rays (see
:class:`~f3rm_ext.nerf.feature_field.FeatureHead`). With the QR decomposition W = Q R, the inner product with a query q
is (Qᵀ q)·(R h) and the norm is |R h|. Both are exact and take only as many dimensions as there are hidden values.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

RenderedOf = Callable[[str], Tensor]
"""Returns the rendered values of a head, (rays, hidden), given its name."""
ExtraOutput = Callable[[Mapping[str, Tensor], RenderedOf], Tensor | None]
"""Computes one more output of a chunk of rays, (rays, channels), from the outputs so far and the rendered values.
None leaves the output out of the image."""

MIN_NORM = 1e-8
"""Vectors shorter than this have no direction."""
RAYS_AT_ONCE = 1 << 11
"""Rays that are compared at a time on the CPU, whose caches hold their similarities."""


@dataclass(frozen=True)
class FeatureSpace:
    """Coordinates in which the features of one head are compared with queries.

    >>> space = FeatureSpace.from_linear_map(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))  # feat 3, hidden 2
    >>> space.best_cosines(rendered=torch.tensor([[1.0, 0.0]]), vectors=torch.eye(3), ends=[0, 1, 3]).tolist()
    [[1.0, 0.0]]
    """

    basis: Float[Tensor, "feat coord"] | None
    """Orthonormal columns Q; None if coordinates are the features themselves."""
    transform: Float[Tensor, "coord hidden"] | None
    """R, which maps rendered values to coordinates; None if rendered values are the coordinates themselves."""
    energy: float = 1.0
    """Share of the features' mean squared norm that lies in the distilled space; below 1 for PCA codes."""

    @classmethod
    def from_linear_map(cls, weight: Float[Tensor, "feat hidden"], energy: float = 1.0) -> "FeatureSpace":
        """Returns the space of features W h."""
        basis, transform = torch.linalg.qr(weight.detach().double())
        return cls(basis=basis.float(), transform=transform.float(), energy=energy)

    @classmethod
    def of_features(cls, energy: float = 1.0) -> "FeatureSpace":
        """Returns the space of features that are rendered as they are."""
        return cls(basis=None, transform=None, energy=energy)

    @classmethod
    def from_residual_codes(cls, codes: int) -> "FeatureSpace":
        """Returns the space of stored PCA codes, which have the norm of what they leave out as last value."""
        return cls(basis=torch.eye(codes, codes + 1), transform=None)

    def to(self, device: torch.device | str) -> "FeatureSpace":
        basis, transform = (None if part is None else part.to(device) for part in (self.basis, self.transform))
        return FeatureSpace(basis, transform, self.energy)

    def coordinates(self, rendered: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch coord"]:
        """Returns the coordinates of rendered values, float32."""
        return rendered.float() if self.transform is None else rendered.float() @ self.transform.T

    def features(self, rendered: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch feat"]:
        """Returns features in the distilled space, float32. For comparisons alone, :meth:`best_cosines` is cheaper."""
        return self.lift(self.coordinates(rendered))

    def project(self, vectors: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch coord"]:
        """Returns the coordinates of vectors of the distilled space; drops what the field cannot represent."""
        return vectors if self.basis is None else vectors.to(self.basis) @ self.basis

    def lift(self, coordinates: Float[Tensor, "*batch coord"]) -> Float[Tensor, "*batch feat"]:
        """Returns the vectors of the distilled space at these coordinates; :meth:`project` is its inverse."""
        return coordinates if self.basis is None else coordinates @ self.basis.T.to(coordinates)

    def left_out(self, features: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch"] | None:
        """Returns the norms of what PCA codes leave out of full features, known on average; None for full features."""
        return features.norm(dim=-1) * (1.0 / self.energy - 1.0) ** 0.5 if self.energy < 1.0 else None

    def best_cosines(
        self, rendered: Float[Tensor, "rays hidden"], vectors: Float[Tensor, "vectors feat"], ends: Sequence[int]
    ) -> Float[Tensor, "rays groups"]:
        """Returns the largest cosine similarity with each group of vectors in the extractor's full space, −1 to 1; 0
        where the rendered feature is zero.

        The vectors are unit vectors in the distilled space, see :class:`~f3rm_ext.query.embeddings.Embeddings`. With
        PCA codes, the norm of what they leave out is not known for each ray. Its mean over the training images is used
        instead, which scales all cosines alike and leaves their order unchanged.

        Args:
            ends: first vector of each group, and the number of vectors; no group is empty.
        """
        projected, best = self.project(vectors).T, rendered.new_empty(len(rendered), len(ends) - 1, dtype=torch.float32)
        size = RAYS_AT_ONCE if rendered.device.type == "cpu" else max(1, len(rendered))
        for some, result in zip(rendered.split(size), best.split(size), strict=True):
            coordinates = self.coordinates(some)
            products = coordinates @ projected
            for group, (first, end) in enumerate(itertools.pairwise(ends)):
                result[:, group] = products[:, first:end].amax(dim=1)
            # Products of the same ray are in the order of their cosines.
            result.mul_(self.energy**0.5 / coordinates.norm(dim=1, keepdim=True).clamp_min(MIN_NORM))
        return best.clamp_(-1.0, 1.0)
