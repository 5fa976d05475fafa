"""Two random views of each picture, and the order of pictures. Both depend on seed, pass and picture alone.

So a run that goes on sees what an uninterrupted one would have seen, whatever the number of loader processes.
"""

import hashlib
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from f3rm_ext.moco.tiles import Tiles

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, with which the backbone has to be used."""


def number_from(*parts: object) -> int:
    """Returns a seed that differs for any difference in its parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Views:
    """MoCo v2's augmentations, with those for views from above: both flips, quarter turns and noise.

    Args:
        image_size: Side of the views, px.
        color_jitter: Whether colours change; leave it out where colours are measurements.
    """

    def __init__(self, image_size: int, color_jitter: bool = True) -> None:
        from torchvision.transforms import v2

        steps: list = [
            v2.RandomResizedCrop(image_size, scale=(0.2, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            _quarter_turn,
            v2.ToDtype(torch.float32, scale=True),
        ]
        if color_jitter:
            steps += [v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), v2.RandomGrayscale(0.2)]
        blur = max(3, image_size // 20 * 2 + 1)
        steps += [
            v2.RandomApply([v2.GaussianBlur(blur, sigma=(0.1, 2.0))], p=0.5),
            _noise,
            v2.Normalize(MEAN, STD),
        ]
        self._steps = v2.Compose(steps)

    def __call__(self, tile: Tensor) -> Float[Tensor, "3 size size"]:
        """Returns one view of a tile of bytes (3, side, side)."""
        return self._steps(tile)


def _quarter_turn(image: Tensor) -> Tensor:
    return torch.rot90(image, int(torch.randint(4, ())), dims=(-2, -1))


def _noise(image: Tensor) -> Tensor:
    """Adds noise of a random strength to half of the views."""
    if torch.rand(()) < 0.5:
        return image
    return (image + torch.randn_like(image) * (0.05 * torch.rand(()))).clamp(0, 1)


class PairsOfViews(Dataset):
    """Two views of each tile; the index is (pass, tile)."""

    def __init__(self, tiles: Tiles, views: Views, seed: int) -> None:
        self._tiles, self._views, self._seed = tiles, views, seed
        self._bytes = None

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        """Returns both views and the number of the tile."""
        epoch, number = index
        if self._bytes is None:  # in the process that reads
            self._bytes = self._tiles.open()
        tile = torch.from_numpy(self._bytes[number].copy()).permute(2, 0, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number_from(self._seed, "views", epoch, number))
            return self._views(tile), self._views(tile), number


class Batches(Sampler):
    """Batches of (pass, tile) from a given batch on, without end; batches that are not full are left out."""

    def __init__(self, images: int, batch_size: int, seed: int, first: int) -> None:
        self._images, self._batch, self._seed, self._first = images, batch_size, seed, first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_pass = self._images // self._batch
        batch = self._first
        while True:
            epoch = batch // per_pass
            order = self.order(epoch)
            for position in range(batch % per_pass, per_pass):
                yield [(epoch, number) for number in order[position * self._batch : (position + 1) * self._batch]]
            batch = (epoch + 1) * per_pass

    def order(self, epoch: int) -> list[int]:
        """Returns the order of the tiles in one pass."""
        generator = torch.Generator().manual_seed(number_from(self._seed, "order", epoch))
        return torch.randperm(self._images, generator=generator).tolist()


Batch = tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 3 size size"], Int[Tensor, "batch"]]


def batches_of_views(
    tiles: Tiles, views: Views, *, batch_size: int, seed: int, first: int, workers: int
) -> Iterator[Batch]:
    """Yields batches of both views and the numbers of their tiles, without end.

    Args:
        tiles: The pictures.
        views: Makes a view.
        batch_size: Images per batch, at most the number of tiles.
        seed: Of order and views.
        first: Number of the first batch.
        workers: Processes that make views; 0 for this one.
    """
    return iter(
        DataLoader(
            PairsOfViews(tiles, views, seed),
            batch_sampler=Batches(len(tiles), batch_size, seed, first),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )
    )
