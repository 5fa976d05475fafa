"""What a run of several stages will need later, looked for before the first one."""

import shutil
from pathlib import Path
from typing import Literal

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError

LEAST_FREE_GIB, SMALL_GIB, LARGE_GIB = 0.25, 1.0, 8.0
"""What a small training writes at least, what a run on a CPU takes at most, and what two trainings of 3 million
Gaussians write: checkpoints of 2 GiB, of which the old one stays until the new one is complete."""


def check_requirements(
    folder: Path, *, training: Literal["fields", "splats"] | None, meshes: bool, scores: bool
) -> list[str]:
    """Looks for what later stages need.

    Args:
        folder: that exists, in which they write.
        training: what they train.
        meshes: whether they make meshes.
        scores: whether they measure pictures.

    Returns:
        Sentences on what they will do without.

    Raises:
        ConfigError: they will fail.
    """
    notes: list[str] = []
    if meshes:
        from f3rm_ext.mesh.open3d_library import open3d

        open3d()
    on_gpu = training == "splats" and compat.has_cuda()
    if on_gpu:
        works, found, advice = compat.describe_gsplat()
        if not works:
            raise ConfigError(f"Splats cannot be trained on this GPU: gsplat is {found}. {advice}")
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
        from f3rm_ext.model_components.image_metrics import cached_alexnet

        path = cached_alexnet()
        if not path.is_file():
            notes.append(f"LPIPS needs AlexNet's weights, which are not at {path}: off-line it is left out.")
    return notes
