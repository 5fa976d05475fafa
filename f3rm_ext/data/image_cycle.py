"""Which images are in memory when: exact cycling through a data set in windows of k images.

Images are taken from shuffled epochs without replacement. A window that reaches over the end of an epoch takes what
is left of the old epoch and goes on in the new one, whose order is drawn so that its first images are not those left
over. So no image is twice in a window, and at any time the numbers of windows any two images have been in differ by
at most one: within an epoch each image is taken once, and a new epoch starts only when every image of the old one
has been taken.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from f3rm_ext.errors import ConfigError


def parse_count(value: int | float, option: str, *, unit: str) -> int | None:
    """A positive whole number, or None where -1 or inf say "all" or "never".

    Args:
        value: what the user gave.
        option: name of the command line option, for the message.
        unit: what is counted, for the message.

    Raises:
        ConfigError: any other value.
    """
    if value == -1 or value == math.inf:
        return None
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise ConfigError(
            f"--{option} is {value}, which is not a number of {unit}: give a whole number from 1 up, or -1 or inf "
            "for no limit."
        )
    return int(value)


class ImageCycle:
    """Deals images into windows, each used for a fixed number of steps.

    With several processes all of them deal the same sequence and each takes every ``shards``-th window of it, so that
    appearances are balanced over the processes together; no two of them have the same image at a time, if there are
    enough images. Everything follows from ``seed``; the global random state is
    neither used nor changed.
    """

    def __init__(
        self,
        num_images: int,
        window: int | None,
        repeat: int | None,
        *,
        seed: int = 0,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        """Starts a cycle; no window is dealt before the first :meth:`step`.

        Args:
            num_images: images in the data set, N ≥ 1.
            window: images per window k, 1 or more; None, or more than N, takes all.
            repeat: steps R for which a window is used; None never changes it.
            seed: start of all random choices.
            shards: number of processes.
            shard: which of them this is.
        """
        if num_images < 1:
            raise ValueError("A cycle needs at least one image.")
        self.num_images = num_images
        self.window_size = num_images if window is None else min(window, num_images)
        # A window of all images would only be replaced by itself.
        self.repeat = None if self.window_size == num_images else repeat
        self.shards, self.shard = shards, shard
        self.seed = seed
        self._epoch = 0
        self._order = self._shuffled(0, avoid_first=[], first=0)
        self._position = 0
        self._round: list[list[int]] = []
        self._uses = 0

    @property
    def changes(self) -> bool:
        """Whether there will ever be a second window."""
        return self.repeat is not None

    @property
    def epoch(self) -> int:
        """Number of complete passes dealt before the present one."""
        return self._epoch

    @property
    def uses(self) -> int:
        """Steps for which the present window has been used."""
        return self._uses

    @property
    def round(self) -> tuple[tuple[int, ...], ...]:
        """The present windows of all processes; empty before the first step."""
        return tuple(tuple(window) for window in self._round)

    def step(self) -> tuple[int, ...]:
        """The images to use for the coming step; deals a new window when the present one has been used R times."""
        if not self._round or (self.repeat is not None and self._uses >= self.repeat):
            self._round, self._epoch, self._order, self._position = self._dealt()
            self._uses = 0
        self._uses += 1
        return tuple(self._round[self.shard])

    def upcoming(self) -> tuple[int, ...] | None:
        """The window after the present one, without dealing it; None if the present one stays for ever."""
        if self._round and not self.changes:
            return None
        return tuple(self._dealt()[0][self.shard])

    def appearances(self) -> list[int]:
        """For each image, the number of windows (of all processes) it has been in, the present ones included."""
        counts = [self._epoch] * self.num_images
        for image in self._order[: self._position]:
            counts[image] += 1
        return counts

    def state(self) -> dict[str, Any]:
        """Ints and lists from which :meth:`load_state` goes on exactly, on any process."""
        return {
            "num_images": self.num_images,
            "window_size": self.window_size,
            "shards": self.shards,
            "seed": self.seed,
            "epoch": self._epoch,
            "order": list(self._order),
            "position": self._position,
            "round": [list(window) for window in self._round],
            "uses": self._uses,
        }

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on where :meth:`state` was taken.

        With another window size or another number of processes, dealing goes on at the same place of the same epoch,
        beginning with a new window. A state of another number of images cannot be used.

        Returns:
            Whether the state was used; if not, the cycle is as it was.
        """
        order = [int(image) for image in state["order"]]
        if int(state["num_images"]) != self.num_images or sorted(order) != list(range(self.num_images)):
            return False
        self.seed = int(state["seed"])
        self._epoch, self._order, self._position = int(state["epoch"]), order, int(state["position"])
        same = int(state["window_size"]) == self.window_size and int(state["shards"]) == self.shards
        self._round = [[int(image) for image in window] for window in state["round"]] if same else []
        self._uses = int(state["uses"]) if same else 0
        return True

    def _dealt(self) -> tuple[list[list[int]], int, list[int], int]:
        """The next window of every process, and epoch, order and position after them."""
        epoch, order, position = self._epoch, self._order, self._position
        windows: list[list[int]] = []
        per_round = self.shards * self.window_size
        for number in range(self.shards):
            window = order[position : position + self.window_size]
            position += len(window)
            missing = self.window_size - len(window)
            if missing:
                if per_round <= self.num_images:  # no image twice in the windows of all processes
                    avoid = [image for dealt in windows for image in dealt] + window
                    first = per_round - number * self.window_size - len(window)
                else:
                    avoid, first = window, missing
                epoch, order, position = epoch + 1, self._shuffled(epoch + 1, avoid, first), missing
                window = window + order[:missing]
            windows.append(window)
        return windows, epoch, order, position

    def _shuffled(self, epoch: int, avoid_first: list[int], first: int) -> list[int]:
        """All images in the order of one epoch; none of ``avoid_first`` is among the ``first`` ones."""
        dice = random.Random(f"{self.seed}/{epoch}")
        order = list(range(self.num_images))
        dice.shuffle(order)
        avoid = set(avoid_first)
        head = [image for image in order if image not in avoid][:first]
        chosen = set(head)
        return head + [image for image in order if image not in chosen]
