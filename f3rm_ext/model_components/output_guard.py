"""Optional outputs must not take the picture down with them.

Nerfstudio's render thread dies of any exception but its own interrupt, and the page stays frozen; so whatever is
not essential is computed behind this guard.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.engine.shortage import is_out_of_memory

Output = TypeVar("Output", bound=Tensor | None)


class OutputGuard:
    """Runs functions that may fail; reports each failing output once.

    Args:
        on_failure: told of every failure, by the output's name.
    """

    def __init__(self, on_failure: Callable[[str, Exception], None] | None = None) -> None:
        self._reported: set[str] = set()
        self._on_failure = on_failure

    def add(self, outputs: dict[str, Output], name: str, compute: Callable[[], Output]) -> None:
        """Sets ``outputs[name]``, or leaves it out and says why.

        The viewer's own interrupts pass through, and so does running out of memory, which is mended elsewhere.
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
        """A whole picture; on the viewer's render thread a failure gives a black one, elsewhere it is raised.

        Args:
            camera: of which the picture is.
            device: of the black picture.
            compute: gives the outputs, (h, w, channels) each.
        """
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
        """Says once per output why it is missing."""
        if self._on_failure is not None:
            self._on_failure(name, error)
        if name not in self._reported:
            self._reported.add(name)
            CONSOLE.log(f"[yellow]Output '{name}' is left out: {type(error).__name__}: {error}")
