"""Features rendered along rays: how they are compared with queries without ever being formed.

A head's features are W h with hidden values h rendered per ray (see
:class:`~f3rm_ext.nerf.feature_field.FeatureHead`). With W = Q R (Q has orthonormal columns) the inner product with a
query q is (Qᵀ q)·(R h) and the norm is |R h|: exact in as many dimensions as there are hidden values, whatever the
dimension of the features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

RenderedOf = Callable[[str], Tensor]
"""Gives the rendered values of a head, (rays, hidden)."""
ExtraOutput = Callable[[Mapping[str, Tensor], RenderedOf], Tensor | None]
"""One more output of a rendered chunk of rays, (rays, channels), from the outputs so far and the rendered values; None
leaves it out of the image."""

MIN_NORM = 1e-8
"""Vectors shorter than this have no direction."""


@dataclass(frozen=True)
class FeatureSpace:
    """Coordinates in which features of one head are compared with queries."""

    basis: Float[Tensor, "feat coord"] | None
    """Orthonormal columns Q; None where coordinates are the features themselves."""
    transform: Float[Tensor, "coord hidden"] | None
    """R, from rendered values to coordinates; None where rendered values are the features themselves."""
    energy: float = 1.0
    """Share of the features' mean squared norm that lies in the distilled space: below 1 with PCA codes."""

    @classmethod
    def of_linear_map(cls, weight: Float[Tensor, "feat hidden"], energy: float = 1.0) -> "FeatureSpace":
        """The space of features W h."""
        basis, transform = torch.linalg.qr(weight.detach().double())
        return cls(basis=basis.float(), transform=transform.float(), energy=energy)

    @classmethod
    def of_features(cls, energy: float = 1.0) -> "FeatureSpace":
        """The space of features that are rendered as they are."""
        return cls(basis=None, transform=None, energy=energy)

    @classmethod
    def of_codes_with_residual(cls, codes: int) -> "FeatureSpace":
        """The space of PCA codes with the norm of what they leave out as one more value, as stored maps have it."""
        return cls(basis=torch.eye(codes, codes + 1), transform=None)

    def to(self, device: torch.device | str) -> "FeatureSpace":
        """The same on another device."""
        basis, transform = (None if part is None else part.to(device) for part in (self.basis, self.transform))
        return FeatureSpace(basis, transform, self.energy)

    def coordinates(self, rendered: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch coord"]:
        """Coordinates of rendered values, float32."""
        return rendered.float() if self.transform is None else rendered.float() @ self.transform.T

    def features(self, rendered: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch feat"]:
        """Features in the distilled space, float32; where they need not be formed, :meth:`cosine` is cheaper."""
        at = self.coordinates(rendered)
        return at if self.basis is None else at @ self.basis.T

    def project(self, vectors: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch coord"]:
        """Coordinates of vectors of the distilled space; what lies outside of the field's reach is dropped."""
        return vectors if self.basis is None else vectors.to(self.basis) @ self.basis

    def lift(self, coordinates: Float[Tensor, "*batch coord"]) -> Float[Tensor, "*batch feat"]:
        """Vectors of the distilled space at coordinates: what :meth:`project` takes back to them."""
        return coordinates if self.basis is None else coordinates @ self.basis.T.to(coordinates)

    def cosine(
        self, rendered: Float[Tensor, "*batch hidden"], vectors: Float[Tensor, "queries feat"]
    ) -> Float[Tensor, "*batch queries"]:
        """Cosine similarity in the extractor's full space, −1 to 1; 0 where the rendered feature is zero.

        With PCA codes the norm of what they leave out is not known per ray; its mean over the training images
        stands for it, which scales all cosines alike: orders and arg-maxima are exact.

        Args:
            rendered: rendered values.
            vectors: directions in the distilled space, as :class:`~f3rm_ext.query.embeddings.Embeddings` has them.
        """
        at = self.coordinates(rendered)
        at = at / at.norm(dim=-1, keepdim=True).clamp_min(MIN_NORM)
        return (at @ self.project(vectors).T * self.energy**0.5).clamp(-1.0, 1.0)
