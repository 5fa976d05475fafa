"""A memory estimate in closed form, so that what is built on it is tested in no time."""

from collections.abc import Callable
from typing import Any

import pytest

from f3rm_ext.memory.estimate import Category, MemoryEstimate
from f3rm_ext.planning.gaussians import final_gaussians
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.splat.model import SplatModelConfig

MIB = 1 << 20


def plain_estimate(request: PlanRequest) -> MemoryEstimate:
    """Memory in proportion to what it depends on, as if nothing else were there."""
    config, capture = request.config, request.capture
    manager: Any = config.pipeline.datamanager
    model: Any = config.pipeline.model
    window = manager.train_num_images_to_sample_from
    images = capture.train_images if window == -1 else min(int(window), capture.train_images)
    pixels = 3 * images * capture.width_px * capture.height_px
    train: dict[Category, int]
    if isinstance(model, SplatModelConfig):
        gaussians = final_gaussians(request)
        harmonics = 3 * ((model.sh_degree + 1) ** 2 - 1)
        stored = (2 + 4) if model.memory.storage == "float16" else (4 + 8)
        if model.memory.moments == "int8":
            stored = (2 if model.memory.storage == "float16" else 4) + 2
        kept = gaussians * 4 * 14
        train = {
            "parameters": kept,
            "gradients": kept,
            "optimizer": 2 * kept + gaussians * harmonics * stored,
            "activations": gaussians * 160 + 224 * model.surface.samples,
            "fragmentation": 0 if model.memory.grow_segments else 100 * MIB,
        }
        on_device = manager.cache_images == "gpu"
    else:
        samples = model.num_samples + sum(proposal.num_samples for proposal in model.proposals)
        table = 2 ** (model.grid.log2_hashmap_size + 2) * 4
        train = {
            "parameters": table,
            "gradients": table,
            "optimizer": 2 * table,
            "activations": manager.train_num_rays_per_batch // request.processes * samples * 256,
        }
        on_device = manager.images_on_gpu
    with_images: dict[Category, int] = {**train, "images": pixels}
    if request.device.type == "cpu":
        return MemoryEstimate({"train": with_images})
    train["context"] = 500 * MIB
    pictures: dict[Category, int] = {**train, "activations": (model.eval_num_rays_per_chunk or 32768) * 64 * 1024}
    if on_device:
        return MemoryEstimate({"train": {**with_images, "context": train["context"]}, "evaluation": pictures})
    return MemoryEstimate({"train": train, "evaluation": pictures}, {"images": pixels})


@pytest.fixture
def estimate() -> Callable[[PlanRequest], MemoryEstimate]:
    """The estimate."""
    return plain_estimate
