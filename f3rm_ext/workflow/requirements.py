"""Checks, before the first stage, that later stages will find what they need."""

import shutil
from pathlib import Path
from typing import Literal

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError

LEAST_FREE_GIB, SMALL_GIB, LARGE_GIB = 0.25, 1.0, 8.0
"""Disk space: the minimum of a small training, the maximum of a run on a CPU, and that of two trainings of 3 million
Gaussians, whose checkpoints have 2 GiB; the old one stays until the new one is complete."""


def check_requirements(
    folder: Path, *, training: Literal["fields", "splats"] | None, meshes: bool, scores: bool
) -> list[str]:
    """Checks that later stages will find what they need.

    Returns:
        Sentences on what is missing but dispensable.

    Raises:
        ConfigError: a stage would fail.
    """
    notes: list[str] = []
    if meshes:
        from f3rm_ext.utils.open3d_library import open3d

        open3d()
    on_gpu = training == "splats" and compat.has_cuda()
    if on_gpu:
        works, state, advice = compat.describe_gsplat()
        if not works:
            raise ConfigError(f"Splats cannot be trained on this GPU: gsplat is {state}. {advice}")
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    if training and free_gib < LEAST_FREE_GIB:
        raise ConfigError(
            f"Only {free_gib:.2f} GiB are free where {folder} is, and a training needs {LEAST_FREE_GIB:g}: make room, "
            "or choose a folder elsewhere."
        )
    wanted_gib = LARGE_GIB if on_gpu else SMALL_GIB
    if free_gib < wanted_gib:
        notes.append(f"{free_gib:.2f} GiB are free where {folder} is; up to {wanted_gib:g} may be needed.")
    if scores:
        from f3rm_ext.model_components.image_metrics import find_alexnet

        path = find_alexnet()
        if not path.is_file():
            notes.append(f"LPIPS needs AlexNet's weights, which are not at {path}: off-line it is left out.")
    return notes
