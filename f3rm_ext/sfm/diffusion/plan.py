"""Plans a training: its steps, its parameters, and the memory of a step on each GPU."""

import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.memory.estimate import Category, add_overhead
from f3rm_ext.memory.trace import AllocationTracker, Bytes, tracing
from f3rm_ext.sfm.diffusion.dense_head import Fusion
from f3rm_ext.sfm.diffusion.model import SIZES, RayDiffuser, Stage, masked_loss
from f3rm_ext.sfm.diffusion.settings import Settings
from f3rm_ext.sfm.rays import CHANNELS

_MIB = 2**20


def build_encoder() -> VisionTransformer:
    """Returns a model like DINOv2 ViT-S/14 with initial weights, on torch's default device."""
    return VisionTransformer.from_size(width=384, depth=12, side=37, patch_px=14, layer_scale=True)


def _build_model(settings: Settings) -> RayDiffuser:
    stage: Stage = "dense" if settings.training.dpt_head else "sparse"
    return RayDiffuser(build_encoder(), SIZES[settings.model.size], stage, settings.has_residual)


def count_parameters(settings: Settings) -> tuple[int, int, int]:
    """Returns the numbers of all parameters, of those trained at first, and of those trained in the end."""
    with torch.device("meta"):
        model = _build_model(settings)
    total = sum(parameter.numel() for parameter in model.parameters())
    first = set_trained(model, settings.training.freeze_encoder, settings.model.freeze_transformer)
    return total, first, set_trained(model, False, False) if settings.training.reinit else first


def plan_lines(settings: Settings, processes: int) -> list[str]:
    """Returns what a training will do as text."""
    training, model = settings.training, settings.model
    total, first, later = count_parameters(settings)
    images = f"2 to {model.num_images}" if model.random_num_images else str(model.num_images)
    batch = training.batch_size * processes
    lines = [
        f"{'Dense' if training.dpt_head else 'Sparse'} model ({model.size}): {total / 1e6:.1f} M parameters, "
        f"{first / 1e6:.1f} M of them trained.",
        f"Batch: {training.batch_size} scenes on each of {processes} processes, {batch} in total; {images} images a "
        "scene.",
        f"Steps: {training.max_iterations:,}; {training.max_iterations * batch:,} scenes in all.",
    ]
    if settings.freezes_random_weights:
        lines.append("The weights of the frozen transformer are missing: train with training.pretrain_path=….")
    if settings.has_residual:
        lines.append(
            "The dense head adds to the upsampled sparse prediction, and begins with 0 (model.residual); the "
            "published models have no such sum."
        )
    if later != first:
        lines.append(
            f"After {training.reinit_after:,} steps encoder and transformer are unfrozen: {later / 1e6:.1f} M trained."
        )
    lines.append(f"Folder: {settings.folder}. Data: {settings.dataset.path} ({settings.dataset.shape}).")
    return lines


def set_trained(model: RayDiffuser, freeze_encoder: bool, freeze_transformer: bool) -> int:
    """Chooses which parameters are trained: neither frozen ones nor those that the prediction does not depend on.
    Returns their number."""
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
        sizes = step_memory(settings, processes, unfrozen)
        parts = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in sizes.items() if size >= _MIB)
        moment = f"after {settings.training.reinit_after:,} steps" if unfrozen else "at the peak of a step"
        lines.append(f"GPU memory {moment}: {sum(sizes.values()) / _MIB:,.0f} MiB ({parts}; calculated, not measured).")
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
        sizes = _trace(settings, processes, unfrozen, tracker, foreach=device_type != "cpu")
    return add_overhead(sizes, device_type)


def _trace(settings: Settings, processes: int, unfrozen: bool, tracker: AllocationTracker, foreach: bool) -> Bytes:
    training, model, data = settings.training, settings.model, settings.dataset
    network = _build_model(settings)
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
