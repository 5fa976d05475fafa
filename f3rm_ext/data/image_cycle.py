"""Order of the training images: exact cycling through a data set in windows of k images, and turns within a window.

Images are dealt from shuffled epochs without replacement. A window that crosses the end of an epoch takes the images
left over from the old epoch and continues with the new one, which is shuffled so that it does not begin with those
images. Hence no window holds an image twice. Every epoch deals each image once before the next epoch begins, so the
numbers of windows that any two images have been in never differ by more than one.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class ImageCycle:
    """Deals images into windows, each used for a fixed number of steps.

    Several processes deal the same sequence, and each takes every ``shards``-th window of it. Appearances are balanced
    over all processes together, and no two processes hold the same image at a time if there are enough images.
    Everything follows from ``seed``; the global random state is neither used nor changed. The first :meth:`step` deals
    the first window.

    Args:
        num_images: images in the data set, N ≥ 1.
        window: images per window k ≥ 1; None or more than N takes all images.
        repeat: number of steps R that a window is used for; None keeps it for ever.
        start: images of the first window, and steps for which it is used, where they are fewer.
    """

    def __init__(
        self,
        num_images: int,
        window: int | None,
        repeat: int | None,
        *,
        start: tuple[int, int] | None = None,
        seed: int = 0,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        if num_images < 1:
            raise ValueError("A cycle needs at least one image.")
        self.num_images = num_images
        self.window_size = num_images if window is None else min(window, num_images)
        # A window of all images would only be replaced by itself.
        self.repeat = None if self.window_size == num_images else repeat
        self.start = start if start is not None and start[0] < self.window_size else None
        self.shards, self.shard = shards, shard
        self.seed = seed
        self._epoch = 0
        self._order = self._shuffle(0, avoid_first=[], first=0)
        self._position = 0
        self._round: list[list[int]] = []
        self.uses = 0
        """Number of steps that have used the present window."""

    @property
    def changes(self) -> bool:
        """Whether windows follow one another for ever."""
        return self.repeat is not None

    @property
    def ends(self) -> bool:
        """Whether the next :meth:`step` deals a new window."""
        return not self._round or (self._limit is not None and self.uses >= self._limit)

    @property
    def round(self) -> tuple[tuple[int, ...], ...]:
        """The present windows of all processes; empty before the first step."""
        return tuple(tuple(window) for window in self._round)

    def step(self) -> tuple[int, ...]:
        """Returns the images of the next step. Deals a new window when the present one has been used for R steps."""
        if self.ends:
            self._round, self._epoch, self._order, self._position = self._dealt()
            self.uses = 0
        self.uses += 1
        return tuple(self._round[self.shard])

    def upcoming(self) -> tuple[int, ...] | None:
        """Returns the window after the present one without dealing it; None if the present one stays for ever."""
        if self._round and self._limit is None:
            return None
        return tuple(self._dealt()[0][self.shard])

    @property
    def _limit(self) -> int | None:
        """Steps for which the present windows are used."""
        if self.start is not None and len(self._round[0]) == self.start[0]:
            return self.start[1]
        return self.repeat

    def appearances(self) -> list[int]:
        """For each image, the number of windows (of all processes) that have held it, including the present ones."""
        counts = [self._epoch] * self.num_images
        for image in self._order[: self._position]:
            counts[image] += 1
        return counts

    def state(self) -> dict[str, Any]:
        """Returns ints and lists from which :meth:`load_state` continues exactly, on any process."""
        return {
            "num_images": self.num_images,
            "window_size": self.window_size,
            "shards": self.shards,
            "seed": self.seed,
            "epoch": self._epoch,
            "order": list(self._order),
            "position": self._position,
            "round": [list(window) for window in self._round],
            "uses": self.uses,
        }

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Continues where :meth:`state` was taken; returns whether it could.

        With another window size or number of processes, dealing continues at the same place of the same epoch with a
        new window. A state of another number of images leaves the cycle as it is.
        """
        order = [int(image) for image in state["order"]]
        if int(state["num_images"]) != self.num_images or sorted(order) != list(range(self.num_images)):
            return False
        self.seed = int(state["seed"])
        self._epoch, self._order, self._position = int(state["epoch"]), order, int(state["position"])
        sizes = {self.window_size} | ({self.start[0]} if self.start is not None else set())
        same = int(state["window_size"]) == self.window_size and int(state["shards"]) == self.shards
        # With more memory than before there may be no start window any more.
        same = same and all(len(window) in sizes for window in state["round"])
        self._round = [[int(image) for image in window] for window in state["round"]] if same else []
        self.uses = int(state["uses"]) if same else 0
        return True

    def _dealt(self) -> tuple[list[list[int]], int, list[int], int]:
        """The next window of every process, and the epoch, order and position after them."""
        epoch, order, position = self._epoch, self._order, self._position
        windows: list[list[int]] = []
        size = self.start[0] if self.start is not None and epoch == 0 == position else self.window_size
        per_round = self.shards * size
        for number in range(self.shards):
            window = order[position : position + size]
            position += len(window)
            missing = size - len(window)
            if missing:
                if per_round <= self.num_images:  # no image twice in the windows of all processes
                    avoid = [image for dealt in windows for image in dealt] + window
                    first = per_round - number * size - len(window)
                else:
                    avoid, first = window, missing
                epoch, order, position = epoch + 1, self._shuffle(epoch + 1, avoid, first), missing
                window = window + order[:missing]
            windows.append(window)
        if self.window_size == self.num_images:  # each process has all images: in one order
            windows = [list(windows[0]) for _ in windows]
        return windows, epoch, order, position

    def _shuffle(self, epoch: int, avoid_first: list[int], first: int) -> list[int]:
        """All images in the order of an epoch; none of ``avoid_first`` is among the first ``first``."""
        dice = random.Random(f"{self.seed}/{epoch}")
        order = list(range(self.num_images))
        dice.shuffle(order)
        # The rest follows in the shuffled order, so an epoch still has each image once: that is what keeps the numbers
        # of windows of any two images within one.
        avoid = set(avoid_first)
        head = [image for image in order if image not in avoid][:first]
        chosen = set(head)
        return head + [image for image in order if image not in chosen]


class ImageTurns:
    """Draws images of windows in turns: each is used once before any is used again, in a new random order every turn.

    The images used least go first, in case the window ends within a turn. Everything follows from the seed of the
    cycle, the split, which distinguishes the streams of a run, and the number of images drawn.
    """

    def __init__(self, cycle: ImageCycle, split: str) -> None:
        self.cycle, self.split = cycle, split
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
            # A checkpoint that one process saved by itself has its turn only; others have other images.
            if not self._turn or self._turn[0] not in images:
                turn = self._shuffle(images, 0 if together else self.cycle.shard)
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

    def _shuffle(self, images: tuple[int, ...], shard: int) -> list[int]:
        """The images in random order, least used first."""
        dice = random.Random(f"{self.cycle.seed}/{self.split}/turn/{shard}/{self.drawn}")
        order = sorted(images)
        dice.shuffle(order)
        return sorted(order, key=lambda image: int(self.uses[image]))
