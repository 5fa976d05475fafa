"""Decides which image of a window is trained on at a step, where a step takes one whole image."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from f3rm_ext.data.image_cycle import ImageCycle


class ImageTurns:
    """Draws images of windows in turns: each is used once before any is used again, in a new random order every turn.

    The images used least go first, in case the window ends within a turn. Everything follows from the seed of the cycle
    and the number of images drawn.
    """

    def __init__(self, cycle: ImageCycle, split: str) -> None:
        """Draws nothing yet.

        Args:
            split: name of the split; distinguishes the streams of a run.
        """
        self.cycle = cycle
        self.split = split
        self.drawn = 0
        """Number of images drawn by this process."""
        self.uses = np.zeros(cycle.num_images, dtype=np.int64)
        """Number of times that each image was used: by all processes if each holds all images, else by this one."""
        self._turn: list[int] = []

    def begin_window(self) -> None:
        """Begins a new turn; call it when the window changes."""
        self._turn = []

    def draw(self, images: tuple[int, ...]) -> int:
        """Returns the next image of this process, one of the window's images.

        Where all processes hold all images, they go through the same turns, and each takes another image at a step.
        """
        together = self.cycle.shards > 1 and self.cycle.window_size == self.cycle.num_images
        drawn: list[int] = []
        for _ in range(self.cycle.shards if together else 1):
            if not self._turn:
                turn = self._shuffled(images, 0 if together else self.cycle.shard)
                # Where a step crosses the end of a turn, its images come last in the next one.
                self._turn = [image for image in turn if image not in drawn] + [i for i in turn if i in drawn]
            drawn.append(self._turn.pop(0))
            self.uses[drawn[-1]] += 1
        self.drawn += 1
        return drawn[self.cycle.shard if together else 0]

    def next(self, images: tuple[int, ...]) -> int:
        """Returns what :meth:`draw` would, without drawing it."""
        turn, uses, drawn = list(self._turn), self.uses.copy(), self.drawn
        image_idx = self.draw(images)
        self._turn, self.uses, self.drawn = turn, uses, drawn
        return image_idx

    def state(self) -> dict[str, Any]:
        """Returns what :meth:`load_state` needs to continue with the same images."""
        return {"batches": self.drawn, "turn": list(self._turn), "uses": torch.from_numpy(self.uses.copy())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`state` was taken."""
        self.drawn = int(state["batches"])
        self._turn = [int(image) for image in state["turn"]]
        self.uses = torch.as_tensor(state["uses"]).numpy().astype(np.int64)

    def _shuffled(self, images: tuple[int, ...], shard: int) -> list[int]:
        """The images in random order, least used first."""
        dice = random.Random(f"{self.cycle.seed}/{self.split}/turn/{shard}/{self.drawn}")
        order = sorted(images)
        dice.shuffle(order)
        return sorted(order, key=lambda image: int(self.uses[image]))
