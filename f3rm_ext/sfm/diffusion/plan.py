"""What a training will do and what its weights take, before it begins."""

from dataclasses import dataclass

import torch

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.diffusion.dense_head import Fusion
from f3rm_ext.sfm.diffusion.model import SIZES, RayDiffuser, Stage
from f3rm_ext.sfm.diffusion.settings import Settings

ENCODER_WIDTH, ENCODER_DEPTH, ENCODER_SIDE = 384, 12, 37
"""DINOv2 ViT-S/14: width, blocks, and patches along each side of its own images."""
_BYTES = 4
_STATES_PER_TRAINED = 3
"""Gradient and two moments of Adam."""


def encoder_state(width: int, depth: int, side: int, patch_px: int = 14) -> dict[str, torch.Tensor]:
    """Returns random weights of a ViT like DINOv2's, on torch's default device."""
    state = {
        "cls_token": torch.zeros(1, 1, width),
        "pos_embed": 0.02 * torch.randn(1, side * side + 1, width),
        "patch_embed.proj.weight": 0.02 * torch.randn(width, 3, patch_px, patch_px),
        "patch_embed.proj.bias": torch.zeros(width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    for index in range(depth):
        block = f"blocks.{index}."
        for name, rows, cols in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            state[f"{block}{name}.weight"] = torch.randn(rows, cols) / cols**0.5
            state[f"{block}{name}.bias"] = torch.zeros(rows)
        for name in ("norm1", "norm2"):
            state[f"{block}{name}.weight"], state[f"{block}{name}.bias"] = torch.ones(width), torch.zeros(width)
        state[f"{block}ls1.gamma"] = state[f"{block}ls2.gamma"] = torch.ones(width)
    return state


@dataclass(frozen=True)
class TrainingPlan:
    """What a training will do."""

    stage: Stage
    """Which model."""
    processes: int
    """Processes, one for each GPU."""
    batch: int
    """Scenes per process and step."""
    iterations: int
    """Steps."""
    parameters: int
    """All parameters."""
    trained: int
    """Parameters that are trained from the beginning."""
    trained_later: int
    """Parameters that are trained after encoder and transformer are unfrozen."""

    @property
    def total_batch(self) -> int:
        """Scenes per step."""
        return self.batch * self.processes

    def state_mib(self, later: bool = False) -> float:
        """Memory of weights, gradients and Adam's moments on each GPU, calculated; activations come on top."""
        trained = self.trained_later if later else self.trained
        return _BYTES * (self.parameters + _STATES_PER_TRAINED * trained) / 2**20

    def lines(self, settings: Settings) -> list[str]:
        """Returns the plan as text."""
        model = settings.model
        images = f"2 to {model.num_images}" if model.random_num_images else str(model.num_images)
        said = [
            f"{self.stage.capitalize()} model ({model.size}): {self.parameters / 1e6:.1f} M parameters, "
            f"{self.trained / 1e6:.1f} M of them trained.",
            f"Batch: {self.batch} scenes on each of {self.processes} processes, {self.total_batch} in total; "
            f"{images} images a scene.",
            f"Steps: {self.iterations:,}; {self.iterations * self.total_batch:,} scenes in all.",
            f"Memory of weights, gradients and Adam: {self.state_mib():,.0f} MiB per process (calculated; activations "
            "come on top and grow with the batch).",
        ]
        if settings.freezes_random_weights:
            said.append("The weights of the frozen transformer are missing: train with training.pretrain_path=….")
        if settings.has_residual:
            said.append(
                "The dense head adds to the upsampled sparse prediction, and begins with 0 (model.residual); the "
                "published models have no such sum."
            )
        if self.trained_later != self.trained:
            said.append(
                f"After {settings.training.reinit_after:,} steps encoder and transformer are unfrozen: "
                f"{self.trained_later / 1e6:.1f} M trained, {self.state_mib(later=True):,.0f} MiB."
            )
        said.append(f"Folder: {settings.folder}. Data: {settings.dataset.path} ({settings.dataset.shape}).")
        return said


def make_plan(settings: Settings, processes: int) -> TrainingPlan:
    """Counts the parameters of the model without allocating it."""
    with torch.device("meta"):
        vit = VisionTransformer(encoder_state(ENCODER_WIDTH, ENCODER_DEPTH, ENCODER_SIDE))
        stage: Stage = "dense" if settings.training.dpt_head else "sparse"
        model = RayDiffuser(vit, SIZES[settings.model.size], stage, settings.has_residual)
    everything = sum(parameter.numel() for parameter in model.parameters())
    later = settings.training.reinit
    now = set_trained(model, settings.training.freeze_encoder, settings.model.freeze_transformer)
    then = set_trained(model, False, False) if later else now
    return TrainingPlan(
        stage=stage,
        processes=processes,
        batch=settings.training.batch_size,
        iterations=settings.training.max_iterations,
        parameters=everything,
        trained=now,
        trained_later=then,
    )


def set_trained(model: RayDiffuser, freeze_encoder: bool, freeze_transformer: bool) -> int:
    """Chooses which parameters are trained: neither frozen ones nor those that the prediction does not depend on.

    Returns:
        Number of trained parameters.
    """
    model.requires_grad_(True)
    model.encoder.requires_grad_(not freeze_encoder)
    model.transformer.requires_grad_(not freeze_transformer)
    if model.head is not None:
        if model.residual is None:
            model.transformer.output.requires_grad_(False)  # the head replaces it
        first = model.head.fusions[3]
        assert isinstance(first, Fusion)
        first.lateral.requires_grad_(False)  # it has nothing to add to
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
