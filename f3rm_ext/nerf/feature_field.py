"""The feature field: distilled 2D features (CLIP, DINO and others) as a function of position."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from f3rm_ext.features.head import BaseFeatureHead, describe_heads, specs_from_checkpoint
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf.fields import GridOptions, UnitCube
from f3rm_ext.nerf.hash_backends import Backend
from f3rm_ext.nerf.losses import heaviest_samples
from f3rm_ext.nerf.mlp import Mlp, frequency_encoding
from f3rm_ext.query.queryable import QueryHead


class FeatureHead(BaseFeatureHead, QueryHead):
    """One distilled feature: an MLP (trunk) evaluated per sample and a linear map evaluated per ray.

    The last layer is linear and without bias, so rendering commutes with it: Σ wᵢ W hᵢ = W Σ wᵢ hᵢ. Hidden values
    are rendered instead of D-dimensional features, which makes memory and time per sample independent of D.
    """

    def __init__(self, spec: FeatureSpec, in_dim: int, hidden_dim: int, num_hidden: int) -> None:
        super().__init__(spec)
        self.trunk = Mlp(in_dim, hidden_dim, num_hidden, out_dim=None)
        self.decoder = nn.Linear(hidden_dim, spec.dim, bias=False)

    def space(self) -> FeatureSpace:
        """Returns the coordinates in which rendered hidden values are compared with queries."""
        return FeatureSpace.from_linear_map(self.decoder.weight, self.code_energy)

    def decode(self, hidden: Float[Tensor, "rays hidden"]) -> Float[Tensor, "rays feat"]:
        """Returns rendered features from rendered hidden values, float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.decoder(hidden.float())

    def display(self, hidden: Float[Tensor, "rays hidden"]) -> Float[Tensor, "rays 3"]:
        """Returns RGB in [0, 1] from rendered hidden values, in the stored PCA basis, without forming D dimensions."""
        to_rgb = self.display_components @ self.decoder.weight.float()
        return self.shade(hidden.float() @ to_rgb.T)


class FeatureField(nn.Module):
    """A hash grid with one head per distilled feature.

    A checkpoint describes its own heads. A field built without specs, as for ``ns-viewer``, where neither extractors
    nor a feature store need exist, grows its heads when a state dict is loaded.

    Args:
        specs: features to distil, the primary one first.
        pe_frequencies: number of frequencies of an additional positional encoding; 0 for none.
        samples_per_ray: number of samples at which features are rendered, those with the largest weights; 0 for all.
        detach_weights: whether to stop gradients at the volume-rendering weights, so that features leave density alone.
    """

    def __init__(
        self,
        specs: Sequence[FeatureSpec],
        cube: UnitCube,
        grid: GridOptions,
        *,
        hidden_dim: int,
        num_hidden: int,
        pe_frequencies: int,
        samples_per_ray: int = 0,
        detach_weights: bool = True,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.cube = cube
        self.grid = grid.build(backend)
        self.hidden_dim, self.num_hidden, self.pe_frequencies = hidden_dim, num_hidden, pe_frequencies
        self.samples_per_ray, self.detach_weights = samples_per_ray, detach_weights
        self.heads = nn.ModuleDict()
        for spec in specs:
            self._add_head(spec)

    def _add_head(self, spec: FeatureSpec) -> None:
        in_dim = self.grid.out_dim + 6 * self.pe_frequencies
        self.heads[spec.name] = FeatureHead(spec, in_dim, self.hidden_dim, self.num_hidden)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.heads)

    def head(self, name: str) -> FeatureHead:
        head = self.heads[name]
        assert isinstance(head, FeatureHead)
        return head

    def render_hidden(
        self, positions: Float[Tensor, "rays samples 3"], weights: Float[Tensor, "rays samples 1"]
    ) -> dict[str, Float[Tensor, "rays hidden"]]:
        """Renders the hidden values of every head along rays, float32; nothing if there are no heads.

        Args:
            positions: sample positions, scene frame; no gradient flows to them.
        """
        if not self.heads:
            return {}
        if self.detach_weights:
            weights = weights.detach()
        weights, positions = heaviest_samples(weights, positions, self.samples_per_ray or weights.shape[1])
        rays, samples = positions.shape[:2]
        unit, _ = self.cube(positions.detach())
        unit = unit.reshape(-1, 3)
        encoded = self.grid(unit)
        if self.pe_frequencies:
            encoded = torch.cat([encoded, frequency_encoding(unit, self.pe_frequencies).to(encoded.dtype)], dim=-1)
        rendered = {}
        for name in self.names:
            hidden = self.head(name).trunk(encoded).view(rays, samples, -1)
            with torch.autocast(hidden.device.type, enabled=False):
                rendered[name] = torch.einsum("rsh,rs->rh", hidden.float(), weights[..., 0].float())
        return rendered

    def get_extra_state(self) -> str:
        """Returns names, extractors and identities of the heads as JSON, for the checkpoint."""
        return json.dumps({"heads": describe_heads(self.head(name) for name in self.names)})

    def set_extra_state(self, state: str) -> None:
        """Does nothing: :meth:`grow_heads` has read the state before the parameters are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.grow_heads(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def grow_heads(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Adds the heads that a checkpoint has and this field lacks, with the checkpoint's display bases."""
        described = state_dict.get(prefix + "_extra_state")
        device = self.grid.table.device
        heads = json.loads(described)["heads"] if described else []
        for spec in specs_from_checkpoint(heads, state_dict, f"{prefix}heads."):
            if spec.name not in self.heads:
                self._add_head(spec)
                self.heads[spec.name].to(device)
