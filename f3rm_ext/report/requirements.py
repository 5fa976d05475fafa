"""What a run of several stages will need later, looked for before the first one."""

import shutil
from pathlib import Path

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError

LEAST_FREE_GIB, SPLATS_FREE_GIB = 1.0, 8.0
"""Without the first nothing can be finished. The second is what two trainings of 3 million Gaussians write: checkpoints
of 2 GiB, of which the old one stays until the new one is complete."""


def check_requirements(folder: Path, *, meshes: bool, splats: bool, scores: bool) -> list[str]:
    """Looks for what later stages need.

    Args:
        folder: that exists, in which they write.
        meshes: whether they make meshes.
        splats: whether they train splats.
        scores: whether they measure pictures.

    Returns:
        Sentences on what they will do without.

    Raises:
        ConfigError: they will fail.
    """
    notes: list[str] = []
    if meshes:
        from f3rm_ext.surface.open3d_library import open3d

        open3d()
    on_gpu = splats and compat.has_cuda()
    if on_gpu:
        works, found, advice = compat.describe_gsplat()
        if not works:
            raise ConfigError(f"Splats cannot be trained on this GPU: gsplat is {found}. {advice}")
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    if free_gib < LEAST_FREE_GIB:
        raise ConfigError(
            f"Only {free_gib:.1f} GiB are free where {folder} is, and {LEAST_FREE_GIB:g} are needed: make room, or "
            "choose a folder elsewhere."
        )
    if on_gpu and free_gib < SPLATS_FREE_GIB:
        notes.append(f"{free_gib:.1f} GiB are free on the disk; splats of a large scene may take {SPLATS_FREE_GIB:g}.")
    if scores:
        from f3rm_ext.model_components.image_metrics import cached_alexnet

        path = cached_alexnet()
        if not path.is_file():
            notes.append(f"LPIPS needs AlexNet's weights, which are not at {path}: off-line it is left out.")
    return notes
