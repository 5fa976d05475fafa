"""Plans a training: its steps, its parameters, and the memory of a step on each GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.memory.estimate import Category, with_overhead
from f3rm_ext.memory.trace import AllocationTracker, Bytes, tracing
from f3rm_ext.sfm.diffusion.dense_head import Fusion
from f3rm_ext.sfm.diffusion.model import SIZES, RayDiffuser, Stage, masked_loss
from f3rm_ext.sfm.diffusion.settings import Settings
from f3rm_ext.sfm.rays import CHANNELS

ENCODER_WIDTH, ENCODER_DEPTH, ENCODER_SIDE = 384, 12, 37
"""DINOv2 ViT-S/14: width, blocks, and patches along each side of its own images."""
_MIB = 2**20


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
                f"{self.trained_later / 1e6:.1f} M trained."
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


def memory_lines(settings: Settings, processes: int) -> list[str]:
    """Returns the memory of a step on each GPU as text: at the start, and after everything is unfrozen."""
    lines = []
    for unfrozen in (False, True) if settings.training.reinit else (False,):
        held = step_memory(settings, processes, unfrozen)
        parts = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in held.items() if size >= _MIB)
        when = f"after {settings.training.reinit_after:,} steps" if unfrozen else "at the peak of a step"
        lines.append(f"GPU memory {when}: {sum(held.values()) / _MIB:,.0f} MiB ({parts}; calculated, not measured).")
    return lines


def step_memory(
    settings: Settings, processes: int, unfrozen: bool = False, device_type: str = "cuda"
) -> dict[Category, int]:
    """Returns the bytes on a device at the peak of a training step with the most images.

    Two steps of the real network run on tensors without values.

    Args:
        processes: number of processes; several keep their gradients in buckets, too.
        device_type: type of the device. On CPUs convolutions take more, and Adam's step less, as it goes parameter by
            parameter.
    """
    with tracing(device_type) as tracker:
        held = _trace(settings, processes, unfrozen, tracker, foreach=device_type != "cpu")
    return with_overhead(held, device_type)


def _trace(settings: Settings, processes: int, unfrozen: bool, tracker: AllocationTracker, foreach: bool) -> Bytes:
    training, model, data = settings.training, settings.model, settings.dataset
    vit = VisionTransformer(encoder_state(ENCODER_WIDTH, ENCODER_DEPTH, ENCODER_SIDE))
    network = RayDiffuser(vit, SIZES[model.size], "dense" if training.dpt_head else "sparse", settings.has_residual)
    set_trained(network, training.freeze_encoder and not unfrozen, model.freeze_transformer and not unfrozen)
    tracker.label(network.parameters(), "parameters")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, foreach=foreach)
    buckets = [torch.empty_like(parameter) for parameter in trained] if processes > 1 else []
    tracker.label(buckets, "gradients")
    scenes = (training.batch_size, model.num_images)
    with tracker.allocating("images"):
        images = torch.empty(*scenes, 3, data.image_size, data.image_size)
        clean = torch.empty(*scenes, CHANNELS, settings.cells, settings.cells)
        known = torch.empty(*scenes, settings.cells, settings.cells)
        ndc = torch.empty(*scenes, 2, settings.patches, settings.patches)
    steps = torch.zeros(training.batch_size, dtype=torch.int64)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(
            lambda value: tracker.label([] if value.grad is None else [value.grad], "gradients")
        )
    for _ in range(2):  # in the first one the optimiser makes its moments
        tracker.reset_peak()
        optimizer.zero_grad(set_to_none=True)
        dtype = torch.bfloat16 if training.bfloat else torch.float16
        with tracker.saving(), torch.autocast("cpu", dtype=dtype, enabled=training.mixed_precision):
            predicted = network(torch.empty_like(clean), steps, network.encoder(images), ndc, known)
            loss = masked_loss(predicted.float(), clean, known, training.l1_loss)
        loss.backward()
        if training.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        moments = (value for state in optimizer.state.values() for value in state.values())
        tracker.label((value for value in moments if isinstance(value, Tensor)), "optimizer")
    return tracker.peak
