"""A still picture of the viewer in passes: small first, so that there is something to see long before it is whole.

The pixels of a pass are pixels of the next one, so a field renders every ray once.
"""

from collections.abc import Callable
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

_METADATA_KEY = "passes"
_FIRST_DIVISOR = 8
_PATIENCE_S = 0.5
"""A page gets the whole picture at once if that takes no longer."""


def next_divisor(divisor: int | None, seconds: float) -> int:
    """Returns by what the sides of the next pass of a picture are divided; 1 is the whole picture.

    Args:
        divisor: of the last pass; None before the first.
        seconds: that it took.

    >>> next_divisor(None, 0.0), next_divisor(8, 0.005), next_divisor(8, 0.03), next_divisor(8, 0.2)
    (8, 1, 2, 4)
    """
    if divisor is None:
        return _FIRST_DIVISOR
    sizes = (2**power for power in range(_FIRST_DIVISOR.bit_length()))
    # A picture takes time in proportion to its pixels, at most.
    quick = (size for size in sizes if seconds * (divisor / size) ** 2 <= _PATIENCE_S)
    return min(next(quick, divisor), divisor // 2)


class PicturePasses:
    """The passes of one picture, of which each keeps what the last one rendered."""

    def __init__(self) -> None:
        self._divisor, self._last_divisor = 1, 1
        self._outputs: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "PicturePasses":
        """Returns itself: nerfstudio copies what the metadata of cameras and rays hold, and passes share a picture."""
        return self

    def camera(self, whole: Cameras, divisor: int) -> Cameras:
        """Returns the camera of the next pass.

        Args:
            whole: camera of the whole picture, without distortion.
            divisor: a power of two: the pass has every such row and column, close to the middle of what it stands for.
        """
        self._divisor, first = divisor, _first_pixel(divisor)
        return Cameras(
            camera_to_worlds=whole.camera_to_worlds,
            fx=whole.fx / divisor,
            fy=whole.fy / divisor,
            cx=(whole.cx - 0.5 - first) / divisor + 0.5,
            cy=(whole.cy - 0.5 - first) / divisor + 0.5,
            width=-((first - whole.width) // divisor),
            height=-((first - whole.height) // divisor),
            camera_type=whole.camera_type,
            times=whole.times,
            metadata={**(whole.metadata or {}), _METADATA_KEY: self},
        )

    def render(self, rays: RayBundle, render: Callable[[RayBundle], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the outputs of a pass, (h, w, channels) each.

        Args:
            rays: of the pass, (h, w).
            render: returns the outputs of an (n, 1) or (h, w) bundle of rays, each ray for itself. It gets those that
                the last pass does not hold.
        """
        outputs = render(rays) if not self._outputs else self._extend(rays, render)
        self._outputs, self._last_divisor = outputs, self._divisor
        return outputs

    def _extend(self, rays: RayBundle, render: Callable[[RayBundle], dict[str, Tensor]]) -> dict[str, Tensor]:
        first = (_first_pixel(self._last_divisor) - _first_pixel(self._divisor)) // self._divisor
        grid = (slice(first, None, self._last_divisor // self._divisor),) * 2
        is_new = torch.ones(rays.shape, dtype=torch.bool, device=rays.origins.device)
        is_new[grid] = False
        outputs = {}
        for name, value in render(rays[is_new].reshape((-1, 1))).items():
            if (last := self._outputs.get(name)) is not None:
                outputs[name] = value.new_empty(*rays.shape, value.shape[-1])
                outputs[name][is_new], outputs[name][grid] = value[:, 0], last
        return outputs


def picture_passes(camera: Cameras) -> PicturePasses | None:
    """Returns the picture of which a camera renders a pass; None for a whole picture."""
    return (camera.metadata or {}).get(_METADATA_KEY)


def _first_pixel(divisor: int) -> int:
    """Returns the first row and column of a pass: among those that nest in all finer passes, the most central.

    >>> [_first_pixel(divisor) for divisor in (1, 2, 4, 8)]
    [0, 1, 1, 5]
    """
    return (divisor - 1) & 0b0101
