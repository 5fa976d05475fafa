"""Options of the datamanagers that can be lowered when memory runs out in training."""

import math
from collections.abc import Iterator
from typing import Any

from f3rm_ext.data.config_checks import flag, parse_count
from f3rm_ext.memory.options import MemoryOption, QualityImpact

_REPEAT = 100
"""Steps per window that :func:`window_options` suggests."""

_SMALLEST_SCALE = 0.125
"""Scale of the images below which no memory option goes."""


def window_options(config: Any, num_images: int, impact: QualityImpact) -> Iterator[MemoryOption]:
    """Suggests keeping fewer training images in memory."""
    window, repeat = (f"train_num_{name}" for name in ("images_to_sample_from", "times_to_repeat_images"))
    count = parse_count(getattr(config, window), flag(window), unit="images") or num_images
    if min(count, num_images) > 1:
        steps = getattr(config, repeat)
        lower = f"{min(count, num_images) // 2} --{flag(repeat)} {_REPEAT if steps in (-1, math.inf) else steps}"
        now = f"{min(count, num_images)} of {num_images}, for {'ever' if steps in (-1, math.inf) else steps}"
        yield MemoryOption(impact, flag(window), now, lower)


def scale_options(config: Any) -> Iterator[MemoryOption]:
    """Suggests smaller images."""
    scale = config.camera_res_scale_factor
    if scale / 2 >= _SMALLEST_SCALE:
        yield MemoryOption(QualityImpact.DETAIL, flag("camera_res_scale_factor"), scale, scale / 2)
