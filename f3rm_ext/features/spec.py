"""What field, queries and checkpoints need to know about a distilled feature."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class DisplayBasis:
    """A projection of features to RGB that is fixed, so that colours do not flicker between frames."""

    mean: Float[Tensor, "feat"]
    """Mean feature, which is subtracted first."""
    components: Float[Tensor, "3 feat"]
    """First three principal directions, unit rows."""
    low: Float[Tensor, "3"]
    """Projection value shown as 0 (1 % quantile)."""
    high: Float[Tensor, "3"]
    """Projection value shown as 1 (99 % quantile)."""


@dataclass(frozen=True)
class FeatureSpec:
    """One distilled feature: the contract between store, datamanager, field and queries."""

    name: str
    """Name of the head, e.g. ``clip``; unique within a run."""
    dim: int
    """Dimension that is distilled: K for PCA codes, otherwise the extractor's D."""
    extractor: str
    """The extractor as the user wrote it, e.g. ``clip:model=ViT-B-16``."""
    identity: dict[str, str]
    """Fields of the :class:`~f3rm_ext.features.base.ExtractorIdentity`."""
    display: DisplayBasis
    """Projection to RGB in the distilled space."""
    code_basis: Float[Tensor, "code feat"] | None = None
    """Orthonormal rows of PCA codes; full feature ≈ code @ code_basis."""
    code_energy: float = 1.0
    """Share of the features' mean squared norm that PCA codes keep, above 0 to 1."""
    cache_dir: str = ""
    """Folder of the feature store; empty for that of the run."""
