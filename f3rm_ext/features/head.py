"""The base of feature heads: what a checkpoint stores about a feature that was distilled or lifted onto splats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from f3rm_ext.features.spec import DisplayBasis, FeatureSpec

_FACTS = ("name", "dim", "extractor", "identity", "code_energy", "cache_dir")


class BaseFeatureHead(nn.Module):
    """Keeps a feature's spec in a checkpoint, so that opening a run needs neither extractor nor store.

    Tensors are buffers; :func:`describe_heads` gives the rest.
    """

    display_mean: Tensor
    """Mean feature of the training images."""
    display_components: Tensor
    display_low: Tensor
    display_high: Tensor
    code_basis: Tensor
    clusters: Tensor | None
    """Directions that the scene shows; None where they are not known."""

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        self.name, self.dim = spec.name, spec.dim
        self.extractor, self.identity, self.code_energy = spec.extractor, dict(spec.identity), spec.code_energy
        self.cache_dir = spec.cache_dir
        for part, value in vars(spec.display).items():
            self.register_buffer(f"display_{part}", value.float().clone())
        self.register_buffer("code_basis", torch.empty(0) if spec.code_basis is None else spec.code_basis.clone())
        self.register_buffer("clusters", None)

    @property
    def spec(self) -> FeatureSpec:
        display = DisplayBasis(self.display_mean, self.display_components, self.display_low, self.display_high)
        return FeatureSpec(display=display, code_basis=self.basis, **{key: getattr(self, key) for key in _FACTS})

    @property
    def basis(self) -> Float[Tensor, "code full"] | None:
        """Orthonormal rows of the PCA codes; None for full features."""
        return self.code_basis if self.code_basis.numel() else None

    def colors(self, features: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch 3"]:
        """Projects features to RGB in [0, 1] with the display basis."""
        return self.shade(features @ self.display_components.T)

    def shade(self, projected: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
        """Turns features that were projected on the display's components into RGB in [0, 1]."""
        value = projected - self.display_components @ self.display_mean
        return ((value - self.display_low) / (self.display_high - self.display_low)).clamp(0.0, 1.0)


def describe_heads(heads: Iterable[BaseFeatureHead]) -> list[dict[str, Any]]:
    """Returns the facts about each head that are not tensors, ready for JSON."""
    return [{key: getattr(head, key) for key in _FACTS} for head in heads]


def specs_from_checkpoint(
    described: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], prefix: str
) -> Iterator[FeatureSpec]:
    """Yields the specs of the heads in a checkpoint, whose entries begin with ``prefix``, the head's name and a dot."""
    for head in described:
        own = f"{prefix}{head['name']}."
        basis = state_dict[own + "code_basis"]
        display = DisplayBasis(*(state_dict[f"{own}display_{part}"] for part in ("mean", "components", "low", "high")))
        facts = {key: head[key] for key in _FACTS if key in head}
        yield FeatureSpec(display=display, code_basis=basis if basis.numel() else None, **facts)
