"""Counts what training has seen of each image, for the logs and the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from f3rm_ext.utils.atomic_files import write_atomic


class Coverage:
    """Per image: the windows it was in, the steps it was in memory, and the rays drawn from it.

    With several processes, windows and steps count all of them (every process knows them); rays count this process.

    Args:
        whole_images: whether training uses whole images, so that an image counts as seen once it was used, not once it
            is in memory.
    """

    def __init__(
        self, pixels: Int64[np.ndarray, "cams"], num_processes: int = 1, *, whole_images: bool = False
    ) -> None:
        self.whole_images = whole_images
        self.pixels = pixels
        self.num_processes = num_processes
        self.appearances, self.steps, self.rays = (np.zeros_like(pixels) for _ in range(3))

    def add_windows(self, windows: Sequence[Sequence[int]]) -> None:
        """Counts new windows, one per process."""
        for window in windows:
            self.appearances[list(window)] += 1

    def add_steps(self, windows: Sequence[Sequence[int]], steps: int) -> None:
        """Counts the steps that used these windows."""
        for window in windows:
            self.steps[list(window)] += steps

    def add_rays(self, images: Sequence[int], rays: Int64[np.ndarray, "slots"]) -> None:
        """Counts the rays drawn from the images of a window."""
        np.add.at(self.rays, list(images), rays)

    def summary(self) -> dict[str, float]:
        """Figures for the log. ``effective_epochs`` is rays of all processes divided by pixels of the data set."""
        rays = float(self.rays.sum()) * self.num_processes
        return {
            "images": float(len(self.pixels)),
            "images_seen": float(((self.rays if self.whole_images else self.appearances) > 0).sum()),
            "appearances_min": float(self.appearances.min()),
            "appearances_max": float(self.appearances.max()),
            "rays": rays,
            "effective_epochs": rays / max(1.0, float(self.pixels.sum())),
        }

    def describe(self) -> str:
        """Describes the coverage in one line."""
        s = self.summary()
        least, most = s["appearances_min"], s["appearances_max"]
        windows = f"{least:.0f} to {most:.0f}" if least < most else f"{most:.0f}"
        return (
            f"{s['images_seen']:.0f} of {s['images']:.0f} images seen, each in {windows} window{'s' * (most != 1)}; "
            f"{s['rays']:.3g} rays, {s['effective_epochs']:.3g} effective epochs"
        )

    def state(self) -> dict[str, Any]:
        """Returns small tensors from which :meth:`load_state` continues."""
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in ("appearances", "steps", "rays")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues counting where :meth:`state` was taken. A state of another number of images is ignored."""
        loaded = {name: np.asarray(state[name], dtype=np.int64) for name in ("appearances", "steps", "rays")}
        if all(values.shape == self.pixels.shape for values in loaded.values()):
            for name, values in loaded.items():
                setattr(self, name, values.copy())

    def write(self, path: Path, *, step: int, names: Sequence[str]) -> None:
        """Writes all counts as JSON, atomically."""
        record = {
            "step": step,
            **self.summary(),
            "num_processes": self.num_processes,
            "per_image": [
                {"image": name, "pixels": int(p), "appearances": int(a), "steps": int(s), "rays": int(r)}
                for name, p, a, s, r in zip(names, self.pixels, self.appearances, self.steps, self.rays, strict=True)
            ],
        }
        write_atomic(path, json.dumps(record, indent=1).encode())
