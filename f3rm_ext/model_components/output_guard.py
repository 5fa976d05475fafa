"""Keeps a failing optional output from failing the whole image.

Any exception but its own interrupt ends nerfstudio's render thread and freezes the viewer's page, so everything that
is not essential is computed behind this guard.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.memory.shortage import is_out_of_memory

Output = TypeVar("Output", bound=Tensor | None)


class OutputGuard:
    """Runs functions that may fail, reports each failing output once, and calls ``on_failure`` at every failure."""

    def __init__(self, on_failure: Callable[[str, Exception], None] | None = None) -> None:
        self._reported: set[str] = set()
        self._on_failure = on_failure

    def add(self, outputs: dict[str, Output], name: str, compute: Callable[[], Output]) -> None:
        """Sets ``outputs[name]``, or leaves it out and reports why.

        The viewer's interrupts are raised again. So are memory shortages, which the chunked renderer handles.
        """
        try:
            outputs[name] = compute()
        except compat.viewer_interrupts():
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.report(name, error)

    def picture(
        self, camera: Cameras, device: torch.device, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Renders an image. A failure gives a black image on the viewer's render thread; elsewhere it is raised."""
        try:
            return compute()
        except compat.viewer_interrupts():
            raise
        except Exception as error:
            if not compat.is_viewer_thread():
                raise
            self.report("rgb", error)
            black = torch.zeros(int(camera.height.item()), int(camera.width.item()), 1, device=device)
            return {"rgb": black.expand(-1, -1, 3), "accumulation": black, "depth": black}

    def report(self, name: str, error: Exception) -> None:
        """Reports why an output is missing, on the console once per output."""
        if self._on_failure is not None:
            self._on_failure(name, error)
        if name not in self._reported:
            self._reported.add(name)
            CONSOLE.log(f"Output '{name}' is left out: {type(error).__name__}: {error}", style="yellow", markup=False)
