"""A nerfstudio model whose parameters are Gaussians: access to them, replacing them, and loading checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.models.base_model import Model
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.errors import CheckpointError
from f3rm_ext.splat.features.heads import LiftedHeads
from f3rm_ext.splat.gaussians import Gaussians, degree_from_count
from f3rm_ext.splat.memory.conversion import ConversionLoss, convert_harmonics
from f3rm_ext.splat.sharding import collect, count_of_all, deal_out

PREFIX = "gauss_params."
"""Prefix of the parameters in checkpoints, as in splatfacto."""


class GaussianModel(Model):
    """Holds any number of Gaussians; subclasses create them and render them."""

    config: Any
    """Has ``sh_degree`` and ``memory`` (:class:`~f3rm_ext.splat.memory.options.MemoryOptions`)."""
    gauss_params: nn.ParameterDict
    """Tensors of :class:`~f3rm_ext.splat.gaussians.Gaussians` by name, or what a subclass computes them from."""
    filter_3d: Tensor
    """Standard deviations of the 3D filter, (gaussians,), scene units; 0 where not computed yet."""
    lifted: LiftedHeads
    """Features of the Gaussians."""
    loaded = False
    """Whether the Gaussians come from a checkpoint."""
    sharded = False
    """Whether this process holds a part of the Gaussians; see :mod:`f3rm_ext.splat.sharding`."""
    _total = 0

    @property
    def gaussians(self) -> Gaussians:
        """The Gaussians as optimised, without the 3D filter."""
        return Gaussians.from_tensors(dict(self.gauss_params.items()))

    @property
    def num_gaussians(self) -> int:
        """Number of Gaussians."""
        return len(self.gauss_params["opacities"])

    @property
    def total_gaussians(self) -> int:
        """Number of Gaussians of all processes, as of the last round of densification where they are divided."""
        return self._total if self.sharded else self.num_gaussians

    def count_gaussians(self) -> int:
        """Returns the number of Gaussians of all processes, each of which must call it where they are divided."""
        return count_of_all(self.num_gaussians, self.device) if self.sharded else self.num_gaussians

    def deal_out(self, state: dict[str, Any]) -> None:
        """Keeps of a checkpoint what this process is to hold; see :func:`f3rm_ext.splat.sharding.deal_out`."""
        if self.sharded:
            deal_out(state)

    def collect(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Completes a checkpoint on rank 0; see :func:`f3rm_ext.splat.sharding.collect`."""
        if self.sharded:
            collect(state, ranks)

    def set_gaussians(
        self, gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"] | None = None
    ) -> ConversionLoss:
        """Replaces all Gaussians. The parameters stay the same objects, so optimisers keep working.

        Args:
            gaussians: any number of them; colours are converted to the SH degree of the model.
            filter_3d: standard deviations of their 3D filter; 0 (not filtered yet) by default.

        Returns:
            What the SH degree and the storage of the model lose of the colours.
        """
        self.lifted.clear()
        rest, loss = convert_harmonics(gaussians.features_rest, self.config.sh_degree, self.config.memory.sh_dtype)
        for name, value in replace(gaussians, features_rest=rest).tensors().items():
            dtype = rest.dtype if name == "features_rest" else torch.float32
            self.gauss_params[name].data = value.detach().to(self.device, dtype, copy=True)
        self.filter_3d = torch.zeros(len(gaussians)) if filter_3d is None else filter_3d
        self.filter_3d = self.filter_3d.to(self.device)
        return loss

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns one group for each tensor of the Gaussians."""
        return {name: [parameter] for name, parameter in self.gauss_params.items()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Loads any number of Gaussians of any SH degree, and logs what a lower degree loses.

        Raises:
            CheckpointError: the checkpoint holds no Gaussians.
        """
        loss = self._take(state_dict)
        ours, theirs = self.config.sh_degree, degree_from_count(state_dict[f"{PREFIX}features_rest"].shape[1])
        if ours != theirs or loss.rounding:
            CONSOLE.log(f"The checkpoint's colours of SH degree {theirs} are opened as degree {ours}: {loss}.")
        self.loaded = True
        about = json.loads(state_dict.get("_extra_state", {}).get("about", "{}"))
        self.lifted.grow(about.get("features", ()), state_dict, "lifted.")
        self.lifted.to(self.device)
        own = {f"{PREFIX}{name}": value.data for name, value in self.gauss_params.items()}
        own["filter_3d"] = self.filter_3d
        return super().load_state_dict({**state_dict, **own}, *args, **kwargs)

    def _take(self, state_dict: Mapping[str, Any]) -> ConversionLoss:
        """Replaces all Gaussians by those of a checkpoint; see :meth:`set_gaussians`."""
        if PREFIX + "means" not in state_dict:
            raise CheckpointError(
                "The checkpoint holds no Gaussians, so it is of another method: load a run of sugar-ext."
            )
        gaussians = Gaussians.from_tensors({name.removeprefix(PREFIX): value for name, value in state_dict.items()})
        return self.set_gaussians(gaussians, state_dict.get("filter_3d", torch.zeros(len(gaussians))))
