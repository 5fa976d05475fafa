"""Features that Gaussians carry: one code per Gaussian and feature, kept in the checkpoint with what it means."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float, Float16
from torch import Tensor, nn

from f3rm_ext.features.head import BaseFeatureHead, describe_heads, specs_from_checkpoint
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.features.spec import FeatureSpec


class LiftedHead(BaseFeatureHead):
    """One lifted feature. What is composited along rays is the feature itself (or its PCA codes).

    Args:
        spec: what was lifted.
        codes: one row per Gaussian; 0 for those that no training view sees.
    """

    codes: Tensor

    def __init__(self, spec: FeatureSpec, codes: Float16[Tensor, "gaussians feat"]) -> None:
        super().__init__(spec)
        self.register_buffer("codes", codes)

    def space(self) -> FeatureSpace:
        """Coordinates in which composited codes are compared with queries: they are those coordinates."""
        return FeatureSpace.of_features(self.code_energy)

    def decode(self, rendered: Float[Tensor, "rays feat"]) -> Float[Tensor, "rays feat"]:
        """Features in the distilled space, float32."""
        return rendered.float()


class LiftedHeads(nn.Module):
    """All features that the Gaussians of a model carry; none until they are lifted or a checkpoint has some."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()

    @property
    def by_name(self) -> dict[str, LiftedHead]:
        """The features, the primary one first."""
        return {name: head for name, head in self.heads.items() if isinstance(head, LiftedHead)}

    def put(self, head: LiftedHead) -> None:
        """Adds a feature after the others, or in the place of that of the same name."""
        self.heads[head.name] = head

    def clear(self) -> None:
        """Forgets all: the Gaussians are others now."""
        self.heads.clear()

    def describe(self) -> list[dict[str, Any]]:
        """What a checkpoint says of them beside their buffers, fit for JSON."""
        return describe_heads(self.by_name.values())

    def grow(self, described: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], prefix: str) -> None:
        """Becomes those of a checkpoint.

        Args:
            described: see :meth:`describe`.
            state_dict: has the buffers.
            prefix: of this module's entries.
        """
        self.clear()
        at = f"{prefix}heads."
        for spec in specs_from_checkpoint(described, state_dict, at):
            self.put(LiftedHead(spec, state_dict[f"{at}{spec.name}.codes"].clone()))


def save_lifted(heads: LiftedHeads, path: Path) -> None:
    """Writes a checkpoint again with these features in place of those it had; all else in it stays.

    Args:
        heads: of the Gaussians in the checkpoint.
        path: the checkpoint.

    Raises:
        CheckpointError: it cannot be read or written; then it is as it was.
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
