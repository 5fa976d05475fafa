"""Batches of a training's scenes, read by processes of their own."""

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from f3rm_ext.errors import UserError
from f3rm_ext.sfm.diffusion.co3d import Co3dScenes, SceneSample
from f3rm_ext.sfm.diffusion.settings import Settings


@runtime_checkable
class Scenes(Protocol):
    """The data of a training; see :class:`Co3dScenes`."""

    augment: bool
    """Whether an image is cut in another way each time."""

    @property
    def num_frames(self) -> int:
        """Images of all sequences."""
        ...

    def __getitem__(self, number: int) -> SceneSample:
        """Returns the sample of this number."""
        ...


def make_dataset(settings: Settings, split: Any) -> Co3dScenes:
    """Returns the data of these settings; the test split without augmentation."""
    data = settings.dataset
    return Co3dScenes(
        Path(data.path),
        [category.strip() for category in data.shape.strip("[]").split(",")],
        split,
        num_images=settings.model.num_images,
        cells=settings.cells,
        patches=settings.patches,
        image_size_px=data.image_size,
        augment=data.apply_augmentation and split == "train",
        seed=settings.training.seed,
    )


def load_batches(
    scenes: Scenes, places: Iterable[Iterable[int]], workers: int, device: torch.device
) -> Iterator[SceneSample]:
    """Yields batches on the CPU, in pinned memory for other devices.

    Args:
        places: numbers of the samples of each batch.
        workers: number of processes that read; 0 reads in this one.

    Raises:
        UserError: a sample cannot be read.
    """
    loader: DataLoader[Any] = DataLoader(
        _ScenesOrErrors(scenes),
        batch_sampler=map(list, places),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=device.type != "cpu",
        worker_init_fn=_ignore_interrupt,
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch


class _ScenesOrErrors(Dataset[SceneSample | UserError]):
    """Scenes of a training; of those that cannot be read the errors, which workers would raise with their trace."""

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes

    def __getitem__(self, number: int) -> SceneSample | UserError:
        try:
            return self.scenes[number]
        except UserError as error:
            return error


def _collate(samples: list[SceneSample | UserError]) -> SceneSample | UserError:
    """Returns the batch of some scenes, or the first error among them."""
    error = next((sample for sample in samples if isinstance(sample, UserError)), None)
    return default_collate(samples) if error is None else error


def _ignore_interrupt(_worker: int) -> None:
    """Leaves it to the training to stop, for which Ctrl-C in a terminal reaches the workers, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
