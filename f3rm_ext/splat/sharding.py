"""Gaussians divided over the processes (ranks) of a run: what such a run can do, and its checkpoints.

A checkpoint of such a run is like any other: rank 0 collects the rows of all ranks for it, and a run that resumes deals
them out again. So one device opens it, and so does another number of ranks.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import launch
from f3rm_ext.engine.ranks import Ranks, rank, sum_over_ranks, world_size
from f3rm_ext.errors import ConfigError, RankError

OPTION = "--pipeline.model.shard-gaussians"
_PARAMETERS, _FILTER, _EXTRA = "_model.gauss_params.", "_model.filter_3d", "_model._extra_state"


def check_sharding(trainer: TrainerConfig) -> None:
    """Checks that a run can divide its Gaussians over its processes, and closes the viewer, which cannot show them.

    Raises:
        ConfigError: an option does not go with it, or there is only one process or no CUDA.
    """
    machine = trainer.machine
    config: Any = trainer.pipeline.model
    manager: Any = trainer.pipeline.datamanager
    if machine.device_type != "cuda":
        raise ConfigError(
            f"{OPTION} divides the Gaussians over several GPUs by gsplat's CUDA kernels, and this run is on "
            f"{machine.device_type}: leave it out."
        )
    if launch.processes(machine) < 2:
        raise ConfigError(
            f"{OPTION} divides the Gaussians over several GPUs, and this run has one: add --machine.num-devices with "
            "their number, or leave it out."
        )
    needs = {
        "--pipeline.model.regularization none": config.regularization == "none",
        "--pipeline.model.densify.absgrad False": not config.densify.absgrad,
        "--pipeline.model.sh-storage float32": config.memory.storage == "float32",
        "--pipeline.model.exposure off": config.exposure != "on",
        "--pipeline.model.backend auto": config.backend in ("auto", "gsplat"),
        "--pipeline.datamanager.features.extractors (without names)": not manager.features.extractors,
    }
    missing = [option for option, given in needs.items() if not given]
    if missing:
        raise ConfigError(
            f"With {OPTION} no GPU holds all Gaussians, so neighbours, normals, absolute gradients, exposures, "
            f"half-precision colours and lifted features cannot be had: add {', '.join(missing)}."
        )
    if "viewer" in trainer.vis:
        others = trainer.vis.removeprefix("viewer").removeprefix("_legacy").removeprefix("+")
        trainer.vis = others or "tensorboard"  # type: ignore[assignment]
        CONSOLE.print(
            f"The viewer is closed: with {OPTION} a picture needs all GPUs. Open the run with ns-viewer later."
        )


def require_one_size(*views: PinholeCameras) -> None:
    """Checks that all images have one size: gsplat takes that of a rank's own image for the images of all ranks.

    Raises:
        ConfigError: they differ.
    """
    sizes = {size for some in views for size in zip(some.widths.tolist(), some.heights.tolist(), strict=True)}
    if len(sizes) > 1:
        named = ", ".join(f"{int(width)} × {int(height)}" for width, height in sorted(sizes)[:3])
        raise ConfigError(
            f"{OPTION} needs images of one size, and the capture has {len(sizes)} sizes ({named}"
            f"{' …' if len(sizes) > 3 else ''}): crop the images to one size, or leave the option out."
        )


def own_slice() -> slice:
    """Returns which rows of all Gaussians belong to this rank: each n-th, so that all ranks see as much of a scene.

    >>> own_slice()  # the only process
    slice(0, None, 1)
    """
    return slice(rank(), None, world_size())


def deal_out(state: dict[str, Any]) -> None:
    """Replaces the rows of all Gaussians in the state of a checkpoint by those of this rank.

    Args:
        state: ``pipeline`` and ``optimizers``, as the trainer saves them; changed in place.
    """
    for holder, key in list(_gaussian_rows(state, len(state["pipeline"][_PARAMETERS + "means"]))):
        # A view would keep the rows of all ranks in memory.
        holder[key] = holder[key][own_slice()].clone()


def collect(state: dict[str, Any], ranks: Ranks) -> None:
    """Replaces the rows of this rank in the state of a checkpoint by those of all ranks, on rank 0.

    Every rank must call it. One tensor at a time travels through the memory of the CPUs.

    Args:
        state: ``pipeline`` and ``optimizers`` of this rank; changed in place on rank 0.

    Raises:
        RankError: the ranks do not hold the same kinds of tensors.
    """
    for item in state["optimizers"].values():  # these dicts are the optimisers' own
        item["state"] = {number: dict(of_one) for number, of_one in item["state"].items()}
    count = len(state["pipeline"][_PARAMETERS + "means"])
    places = list(_gaussian_rows(state, count))
    everyone = ranks.share([len(places), count])
    if len({kinds for kinds, _ in everyone}) != 1:
        raise RankError(
            "The processes of this run cannot save their Gaussians together, since some have statistics that others "
            "lack: resume from the last checkpoint, and report this."
        )
    counts = [theirs for _, theirs in everyone]
    for holder, key in places:
        whole = ranks.collect_rows(holder[key], counts)
        if whole is not None:
            holder[key] = whole


def _gaussian_rows(state: dict[str, Any], count: int) -> Iterator[tuple[MutableMapping[Any, Any], Any]]:
    """Yields where the state has a tensor with one row for each Gaussian, in the same order on every rank."""
    pipeline = state["pipeline"]
    yield from ((pipeline, key) for key in sorted(pipeline) if key.startswith(_PARAMETERS) or key == _FILTER)
    # Optimisers and statistics have nothing else of this length but a parameter's number of steps.
    statistics = pipeline.get(_EXTRA, {}).get("densifier", {})
    optimizers = [
        of_one for _, item in sorted(state["optimizers"].items()) for _, of_one in sorted(item["state"].items())
    ]
    for holder in (statistics, *optimizers):
        for key, value in sorted(holder.items()):
            if key not in ("step", "generator") and isinstance(value, Tensor) and value.dim() and len(value) == count:
                yield holder, key


def count_of_all(count: int, device: torch.device) -> int:
    """Returns the number of Gaussians of all ranks, each of which must call it."""
    total = torch.tensor(count, device=device)
    sum_over_ranks(total)
    return int(total)
