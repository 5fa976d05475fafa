"""The memory that a training of DiffusionSfM takes on each GPU."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.planning.convolutions import BlockedConvolutions
from f3rm_ext.planning.estimate import Category
from f3rm_ext.planning.memory import with_allowances
from f3rm_ext.planning.shapes import shapes_only
from f3rm_ext.planning.tracker import AllocationTracker, Bytes
from f3rm_ext.sfm.diffusion.model import SIZES, RayDiffuser, masked_loss
from f3rm_ext.sfm.diffusion.plan import ENCODER_DEPTH, ENCODER_SIDE, ENCODER_WIDTH, encoder_state, set_trained
from f3rm_ext.sfm.diffusion.settings import Settings
from f3rm_ext.sfm.rays import CHANNELS

_MIB = 2**20


def plan_lines(settings: Settings, processes: int) -> list[str]:
    """Returns what a step takes on each GPU, as text: at first, and after everything is unfrozen."""
    said = []
    for unfrozen in (False, True) if settings.training.reinit else (False,):
        held = step_memory(settings, processes, unfrozen)
        parts = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in held.items() if size >= _MIB)
        when = f"after {settings.training.reinit_after:,} steps" if unfrozen else "at the peak of a step"
        said.append(f"GPU memory {when}: {sum(held.values()) / _MIB:,.0f} MiB ({parts}; calculated, not measured).")
    return said


def step_memory(
    settings: Settings, processes: int, unfrozen: bool = False, device_type: str = "cuda"
) -> dict[Category, int]:
    """Returns what is held on a device at the peak of a training step with the most images, bytes.

    Two steps of the real network run on tensors without values.

    Args:
        settings: checked settings.
        processes: with several, the gradients lie in buckets, too.
        unfrozen: after encoder and transformer were unfrozen.
        device_type: on CPUs convolutions take more, and Adam's step less: it goes parameter by parameter.
    """
    on_cpu = device_type == "cpu"
    with shapes_only(), AllocationTracker() as tracker, BlockedConvolutions() if on_cpu else nullcontext():
        held = _trace(settings, processes, unfrozen, tracker, foreach=not on_cpu)
    return with_allowances(held, device_type)


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
        parameter.register_post_accumulate_grad_hook(lambda value: tracker.label(_there(value.grad), "gradients"))
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


def _there(gradient: Tensor | None) -> Iterable[Tensor]:
    return () if gradient is None else (gradient,)
