"""Peers that nerfstudio does not have as they are needed: nerfacto with F3RM's feature field, methods without LPIPS."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.field_components.encodings import HashEncoding, NeRFEncoding
from nerfstudio.field_components.mlp import MLP
from nerfstudio.field_components.spatial_distortions import SceneContraction
from nerfstudio.models.nerfacto import NerfactoModel, NerfactoModelConfig
from torch import Tensor, nn
from torch.nn import functional

ALEXNET = "alexnet-owt-7be5be79.pth"
"""Weights of AlexNet in torchvision's cache, without which nerfstudio's models download them when they are built."""


@dataclass
class F3rmPeerConfig(NerfactoModelConfig):
    """nerfacto with a feature field as F3RM has it (Shen et al. 2023; defaults of its published configuration)."""

    _target: type = field(default_factory=lambda: F3rmPeer)
    feature_loss_mult: float = 1e-3
    """Weight of the mean squared error of features."""
    feature_log2_hashmap_size: int = 19
    """A level of the feature grid has at most 2 to this power rows."""


class F3rmPeer(NerfactoModel):
    """nerfacto whose samples also have D features: hash grid and frequencies, then a network of two hidden layers.

    As in F3RM, and unlike f3rm-ext, all D values are computed at every sample and then accumulated along the ray, and
    the feature loss changes the density.
    """

    config: F3rmPeerConfig

    def populate_modules(self) -> None:
        """Builds nerfacto and the feature field."""
        super().populate_modules()
        (spec, *_) = self.kwargs["metadata"]["feature_specs"]
        self.feature_name: str = spec.name
        implementation = self.config.implementation
        grid = HashEncoding(
            num_levels=12,
            min_res=16,
            max_res=128,
            log2_hashmap_size=self.config.feature_log2_hashmap_size,
            features_per_level=8,
            implementation=implementation,
        )
        frequencies = NeRFEncoding(
            in_dim=3, num_frequencies=6, min_freq_exp=0, max_freq_exp=5, implementation=implementation
        )
        self.feature_encodings = nn.ModuleList([grid, frequencies])
        self.feature_network = MLP(
            in_dim=grid.get_out_dim() + frequencies.get_out_dim(),
            num_layers=3,
            layer_width=64,
            out_dim=spec.dim,
            activation=nn.ReLU(),
            implementation=implementation,
        )
        self.contraction = SceneContraction(order=float("inf"))

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns nerfacto's groups and the group feature_field."""
        groups = super().get_param_groups()
        groups["feature_field"] = [*self.feature_encodings.parameters(), *self.feature_network.parameters()]
        return groups

    def get_outputs(self, ray_bundle: RayBundle) -> dict[str, Any]:  # type: ignore[override]
        """Renders rays; in training also their features, (rays, D)."""
        outputs = super().get_outputs(ray_bundle)
        if self.training:
            samples, weights = outputs["ray_samples_list"][-1], outputs["weights_list"][-1]
            contracted: Tensor = self.contraction(samples.frustums.get_positions())  # type: ignore[assignment]
            points = ((contracted + 2) / 4).detach().view(-1, 3)
            encoded = torch.cat([encoding(points) for encoding in self.feature_encodings], dim=-1)
            features = self.feature_network(encoded).view(*weights.shape[:-1], -1)
            outputs["feature"] = (weights * features.float()).sum(dim=-2)
        return outputs

    def get_loss_dict(self, outputs: Any, batch: Any, metrics_dict: Any = None) -> dict[str, Tensor]:
        """Returns nerfacto's losses and that of the features."""
        losses = super().get_loss_dict(outputs, batch, metrics_dict)
        if self.training:
            wanted = batch["features"][self.feature_name].to(self.device)
            loss = functional.mse_loss(outputs["feature"][: len(wanted)], wanted.float())
            losses["feature_loss"] = self.config.feature_loss_mult * loss
        return losses


def f3rm_peer(nerfacto: TrainerConfig) -> TrainerConfig:
    """Returns the peer's training configuration: nerfacto's, with our batches of rays, all of which have features."""
    from f3rm_ext.data.datamanager import F3rmDataManagerConfig

    config = copy.deepcopy(nerfacto)
    config.method_name = "nerfacto-f3rm"
    theirs: Any = config.pipeline.model
    given = {name: getattr(theirs, name) for name in NerfactoModelConfig.__dataclass_fields__ if name != "_target"}
    config.pipeline.model = F3rmPeerConfig(**given)
    config.pipeline.datamanager = F3rmDataManagerConfig(feature_ray_fraction=1.0)
    config.optimizers["feature_field"] = copy.deepcopy(config.optimizers["fields"])
    return config


def tolerate_missing_lpips() -> str:
    """Has nerfstudio's models built without LPIPS if the weights it needs are not on this machine.

    Returns:
        Why LPIPS cannot be measured; empty if it can.
    """
    if (Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET).is_file():
        return ""
    import torchmetrics.image.lpip as lpip

    class NoLpips(nn.Module):
        """Takes the place of the metric and gives NaN."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, *_: Tensor) -> Tensor:
            """Returns NaN."""
            return torch.tensor(float("nan"))

    lpip.LearnedPerceptualImagePatchSimilarity = NoLpips  # type: ignore[assignment, misc]
    return f"LPIPS is left out, because {ALEXNET} is not in TORCH_HOME and this program downloads nothing."
