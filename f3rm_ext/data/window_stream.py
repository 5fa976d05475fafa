"""The base of both streams of batches: images come in windows, what was seen is counted, and a resume goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.data.coverage import Coverage
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixels
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.prefetch import Prefetcher
from f3rm_ext.utils.console import console


@runtime_checkable
class Window(Protocol):
    """The data of a window."""

    @property
    def images(self) -> tuple[int, ...]:
        """The images' indices in the data set."""
        ...


WindowT = TypeVar("WindowT", bound=Window)


class WindowStream(ABC, Generic[WindowT]):
    """Endless batches from one data set, of windows as an image cycle says. Loads nothing before the first batch.

    Args:
        split: name of the split; distinguishes the streams of a run.
        masked: "background" trains masked pixels as transparent ones.
        placement: decides whether images are kept on the device; None on the CPU.
    """

    def __init__(
        self,
        cameras: Cameras,
        cycle: ImageCycle,
        *,
        split: str,
        device: torch.device | str,
        masked: MaskedPixels,
        placement: Placement | None,
        whole_images: bool = False,
    ) -> None:
        self.cycle, self.split = cycle, split
        self.device = torch.device(device)
        self.masked: MaskedPixels = masked
        self.placement = placement
        sizes = (cameras.height * cameras.width).reshape(-1).cpu().numpy().astype(np.int64)
        self._coverage = Coverage(sizes, cycle.shards, whole_images=whole_images)
        self._prefetcher: Prefetcher[WindowT] = Prefetcher(self._load)
        self._upcoming_requested = False
        self._window: WindowT | None = None
        self._begins = False
        """Whether the last step was the first of its window, even if the window before had the same images."""
        self._steps = 0
        """Steps with the present window that the coverage does not have yet."""
        self._round: tuple[tuple[int, ...], ...] = ()

    @property
    def coverage(self) -> Coverage:
        """Steps, rays and appearances of each image so far; of whole images, rays are pixels."""
        self._flush()
        return self._coverage

    @property
    def on_device(self) -> bool:
        """Whether images are kept on the device of the batches."""
        return self.placement is not None and bool(self.placement.on_device)

    def state(self) -> dict[str, Any]:
        """Returns what :meth:`load_state` needs to continue with the same batches."""
        return {"cycle": self.cycle.state(), "coverage": self.coverage.state()}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Continues where :meth:`state` was taken; returns False if the number of images has changed."""
        if not self.cycle.load_state(state["cycle"]):
            return False
        self._forget()
        self._window, self._upcoming_requested = None, False
        self._coverage.load_state(state["coverage"])
        self._steps, self._round = 0, self.cycle.round
        return True

    def close(self) -> None:
        """Stops background loading and releases the window. Another batch would start it again."""
        self._flush()
        self._forget()
        self._prefetcher.close()
        self._window = None

    def _step(self) -> WindowT:
        """The window of the next step. The first step of a window starts loading the one after it."""
        images = self.cycle.step()
        self._begins = self.cycle.uses == 1
        if self._begins:
            self._flush()
        if self._window is None or self._window.images != images:
            self._window = None  # before the new one is moved to the device
            self._window = self._place(self._prefetcher.take(images, lambda: self._say_waiting(len(images))))
        # After a resume the first step is in the middle of a window, whose successor nobody has requested.
        if self._begins or not self._upcoming_requested:
            upcoming = self.cycle.upcoming()
            if upcoming is not None and upcoming != images:
                self._prefetcher.request(upcoming)
            self._upcoming_requested = True
        if self._begins:
            self._round = self.cycle.round
            self._coverage.add_windows(self._round)
        return self._window

    def _say_waiting(self, images: int) -> None:
        if self.cycle.shard == 0:
            console().log(f"Waiting for {images} {self.split} images to be read.")

    def _flush(self) -> None:
        """Adds the counts of the window to the coverage."""
        if self._steps:
            self._coverage.add_steps(self._round, self._steps)
        self._steps = 0

    @abstractmethod
    def _forget(self) -> None:
        """Drops what was made ahead."""

    @abstractmethod
    def _load(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> WindowT:
        """Makes a window in the background, see :class:`~f3rm_ext.data.prefetch.Prefetcher`."""

    @abstractmethod
    def _place(self, window: WindowT) -> WindowT:
        """Moves a loaded window to where it is used, on the thread that steps; the old one is released."""
