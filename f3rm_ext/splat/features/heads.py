"""Features that Gaussians carry: one code per Gaussian and feature, saved in the checkpoint with their metadata."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float, Float16, Int32
from torch import Tensor, nn

from f3rm_ext.features.head import BaseFeatureHead, describe_heads, specs_from_checkpoint
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.query.queryable import QueryHead


class LiftedHead(BaseFeatureHead, QueryHead):
    """One lifted feature. The codes that are composited along rays are the feature itself, or its PCA codes.

    Args:
        codes: one row per Gaussian; 0 for Gaussians that no training view sees.
        groups: number of each Gaussian's group, see :mod:`f3rm_ext.query.groups`; None where they are not known.
        clusters: directions that the scene shows, see :func:`~f3rm_ext.query.run.view_clusters`; None where they are
            not known.
    """

    codes: Tensor
    groups: Tensor | None

    def __init__(
        self,
        spec: FeatureSpec,
        codes: Float16[Tensor, "gaussians feat"],
        groups: Int32[Tensor, " gaussians"] | None = None,
        clusters: Float[Tensor, "clusters _"] | None = None,
    ) -> None:
        super().__init__(spec)
        self.register_buffer("codes", codes)
        self.register_buffer("groups", groups)
        self.clusters = clusters

    def select(self, kept: Bool[Tensor, " gaussians"]) -> "LiftedHead":
        """Returns the feature of some of the Gaussians, of which the scene shows something else."""
        return LiftedHead(self.spec, self.codes[kept], None if self.groups is None else self.groups[kept])

    def space(self) -> FeatureSpace:
        """Returns the coordinates in which composited codes are compared with queries: the codes themselves."""
        return FeatureSpace.of_features(self.code_energy)

    def decode(self, rendered: Float[Tensor, "rays feat"]) -> Float[Tensor, "rays feat"]:
        """Returns features in the distilled space, float32."""
        return rendered.float()


class LiftedHeads(nn.Module):
    """All features that the Gaussians of a model carry; empty until features are lifted or loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()

    def to_dict(self) -> dict[str, LiftedHead]:
        """Returns the features by name, the primary one first."""
        return {name: head for name, head in self.heads.items() if isinstance(head, LiftedHead)}

    def add(self, head: LiftedHead) -> None:
        """Appends a feature, or replaces the one of the same name."""
        self.heads[head.name] = head

    def clear(self) -> None:
        """Removes all features; needed whenever the set of Gaussians changes."""
        self.heads.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Returns the metadata that a checkpoint stores beside the buffers, as JSON values."""
        return describe_heads(self.to_dict().values())

    def grow(self, described: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], prefix: str) -> None:
        """Replaces all features by those of a checkpoint."""
        self.clear()
        prefix += "heads."
        for spec in specs_from_checkpoint(described, state_dict, prefix):
            parts = (state_dict.get(f"{prefix}{spec.name}.{part}") for part in ("codes", "groups", "clusters"))
            codes, *others = (None if part is None else part.clone() for part in parts)
            assert codes is not None
            self.add(LiftedHead(spec, codes, *others))


def save_lifted(heads: LiftedHeads, path: Path) -> None:
    """Rewrites a checkpoint with these features in place of its own; everything else in it stays.

    Raises:
        CheckpointError: the checkpoint cannot be read or written; it is then unchanged.
    """
    from f3rm_ext.engine import checkpoint

    content = checkpoint.load(path)
    prefix = "_model.lifted."
    state = {name: value for name, value in content["pipeline"].items() if not name.startswith(prefix)}
    state.update({prefix + name: value.cpu() for name, value in heads.state_dict().items()})
    extra = dict(state.get("_model._extra_state", {}))
    extra["about"] = json.dumps({**json.loads(extra.get("about", "{}")), "features": heads.describe()})
    state["_model._extra_state"] = extra
    checkpoint.write({**content, "pipeline": state}, path)
