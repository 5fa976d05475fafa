"""Runs training steps, pictures and queries of a real model without data, and says what memory they take."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.models.base_model import Model
from torch import Tensor
from torch.nn import functional

from f3rm_ext.engine.optimizers import RunDecaySchedulerConfig, schedule_length
from f3rm_ext.mesh.bound import layout
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.image_metrics import Lpips
from f3rm_ext.planning.convolutions import BlockedConvolutions
from f3rm_ext.planning.shapes import shapes_only
from f3rm_ext.planning.tracker import AllocationTracker, Bytes
from f3rm_ext.splat import losses
from f3rm_ext.splat.densify import relocation
from f3rm_ext.utils import colormaps

ALEXNET = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
"""Channels out and in, and side of the kernel, of the layers that LPIPS uses."""


class TracedRun:
    """A model and its optimisers without values, as they are in training.

    Args:
        config: of the trainer; it is copied.
        mixed: whether steps are in mixed precision.
        foreach: whether Adam updates all parameters at once, as it does on CUDA by default.
        tracker: which is entered.
    """

    def __init__(
        self, config: TrainerConfig, model: Model, tracker: AllocationTracker, *, mixed: bool, foreach: bool
    ) -> None:
        self.model, self.tracker, self.mixed = model, tracker, mixed
        tracker.label(model.buffers(), "buffers")
        tracker.label(model.parameters(), "parameters")
        self.optimizers = make_optimizers(config, model, foreach=foreach)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)

    def train(
        self, batch: Callable[[], tuple[Any, dict[str, Any]]], after: Callable[[], None] = lambda: None
    ) -> tuple[Bytes, Bytes]:
        """Takes two steps; in the first one the optimisers make their moments.

        Args:
            batch: returns what the model is called with, and the batch of its losses.
            after: what the model does after a step.

        Returns:
            What the second step holds at its peak, and before its backward pass.
        """
        self.model.train()
        self._step(batch)
        after()
        self.tracker.label(self._moments(), "optimizer")
        self.tracker.reset_peak()
        before_backward = self._step(batch)
        after()
        return self.tracker.peak, before_backward

    def draw(self, draw: Callable[[], object]) -> Bytes:
        """Returns what is held at the peak of drawing a picture between two steps."""
        self.model.eval()
        self.tracker.reset_peak()
        with torch.no_grad():
            draw()
        return self.tracker.peak

    def _step(self, batch: Callable[[], tuple[Any, dict[str, Any]]]) -> Bytes:
        self.optimizers.zero_grad_all()
        with self.tracker.saving(), torch.autocast("cpu", torch.float16, enabled=self.mixed):
            inputs, targets = batch()
            # Nerfstudio's trainer holds them all until the end of the step.
            outputs: Any = self.model(inputs)
            metrics = self.model.get_metrics_dict(outputs, targets)
            losses: Mapping[str, Tensor] = self.model.get_loss_dict(outputs, targets, metrics)  # type: ignore[assignment]
            loss = functools.reduce(torch.add, losses.values())
        held = dict(self.tracker.now)
        loss.backward()
        self.optimizers.optimizer_step_all()
        return held

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.label([parameter.grad], "gradients")

    def _moments(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers.optimizers.values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


@contextmanager
def tracing(device_type: str) -> Iterator[AllocationTracker]:
    """While this is entered, new tensors have no values, and are counted.

    Args:
        device_type: of the run.
    """
    try:
        with shapes_only(), AllocationTracker() as tracker, mock.patch.object(masks, "_whole_ssim", ssim_stand_in):
            with BlockedConvolutions() if device_type == "cpu" else nullcontext():
                yield tracker
    finally:
        caches = (losses._window, colormaps._color_table, relocation.relocation_table, layout.barycentric_weights)
        for cache in caches:
            cache.cache_clear()  # they would go on with tensors without values


def make_optimizers(config: TrainerConfig, model: Model, *, foreach: bool) -> Optimizers:
    """Returns the optimisers of a run, without schedules, which take no memory."""
    groups: dict[str, Any] = copy.deepcopy(config.optimizers)
    for group in groups.values():
        if isinstance(group["scheduler"], RunDecaySchedulerConfig):
            group["scheduler"].fit(schedule_length(config))
    fit: Callable[..., None] | None = getattr(config.pipeline.model, "fit_optimizers", None)
    if fit is not None:
        fit(groups)
    optimizers = Optimizers(groups, model.get_param_groups())
    for optimizer in optimizers.optimizers.values():
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
    return optimizers


def cameras(width_px: int, height_px: int, count: int = 1) -> Cameras:
    """Returns cameras with values, all alike; call it outside :func:`tracing`."""
    pose = torch.eye(4)[:3].repeat(max(1, count), 1, 1)
    focal_px = float(width_px)
    return Cameras(pose, focal_px, focal_px, width_px / 2, height_px / 2, width_px, height_px)


def lpips_stand_in(_: int) -> Lpips:
    """Returns LPIPS without values."""
    state: dict[str, Tensor] = {}
    layers = (0, 3, 6, 8, 10)
    for stage, (layer, (out, channels, side)) in enumerate(zip(layers, ALEXNET, strict=True)):
        state[f"net.slice{stage + 1}.{layer}.weight"] = torch.empty(out, channels, side, side)
        state[f"net.slice{stage + 1}.{layer}.bias"] = torch.empty(out)
        state[f"lin{stage}.model.1.weight"] = torch.empty(1, out, 1, 1)
    return Lpips(state)


def ssim_stand_in(pred: Tensor, target: Tensor) -> Tensor:
    """Allocates what SSIM by torchmetrics does, whose import takes a quarter of a plan's time."""
    margin = masks.WINDOW_PX // 2
    one, two = (functional.pad(image.permute(2, 0, 1)[None], (margin,) * 4, mode="reflect") for image in (pred, target))
    maps = torch.cat([one, two, one * one, two * two, one * two])
    window = maps.new_empty(3, 1, masks.WINDOW_PX, masks.WINDOW_PX)
    found = functional.conv2d(maps, window, groups=3)
    moments = [found[0] * found[part] for part in range(5)]
    return (found[0] * moments[4]).mean()
