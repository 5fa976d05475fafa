"""Two random views of each picture, and the order of pictures. Both depend only on seed, pass and picture.

A resumed run therefore sees the same data as an uninterrupted one, whatever the number of loader processes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from f3rm_ext.engine.ranks import rank, world_size
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN, IMAGENET_STD, normalise
from f3rm_ext.moco.tiles import Tiles

CROP = 0.2
"""Smallest share of a tile's area that a view shows."""
_ASPECT = 4 / 3
_JITTERED, _BRIGHTNESS, _CONTRAST, _SATURATION, _GREY = 0.8, 0.4, 0.4, 0.2, 0.1
_NOISY, _NOISE = 0.5, 0.05
_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
_DRAWS = 18


def derive_seed(*parts: object) -> int:
    """Returns a random seed, 63 bits, that depends on every part."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


Batch = tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 3 size size"], Int[Tensor, "batch"]]


class Views:
    """MoCo v2's augmentations, and those for views from above: both flips, quarter turns and noise.

    A whole batch is processed at once: one resampling for crop, flips and turns, one matrix for colours. Each tile has
    its own generator, so its view does not depend on the rest of the batch.

    Args:
        blurred: Share of views to blur, 0 to 1.
        solarized: Share of views whose bright values are inverted, 0 to 1.
    """

    def __init__(
        self, image_size: int, color_jitter: bool = True, *, blurred: float = 0.5, solarized: float = 0.0
    ) -> None:
        self._size, self._color_jitter = image_size, color_jitter
        self._blurred, self._solarized = blurred, solarized

    def __call__(
        self, tiles: UInt8[Tensor, "batch 3 side side"], generators: Sequence[torch.Generator]
    ) -> Float[Tensor, "batch 3 size size"]:
        """Returns one view of each tile, normalised."""
        draws = torch.stack([torch.rand(_DRAWS, generator=generator) for generator in generators])
        place, color, rest = draws.split([7, 6, 5], dim=1)
        views = self._crop(tiles.float() / 255, place)
        if self._color_jitter:
            views = _jitter_colors(views, color)
        views = self._blur(views, rest[:, 0], rest[:, 1])
        if self._solarized:
            bright = (rest[:, 2] < self._solarized)[:, None, None, None] & (views > 0.5)
            views = torch.where(bright, 1 - views, views)
        for index in (rest[:, 3] < _NOISY).nonzero().flatten().tolist():
            noise = torch.randn(views.shape[1:], generator=generators[index])
            views[index] = (views[index] + noise * (_NOISE * rest[index, 4])).clamp(0, 1)
        return normalise(views, IMAGENET_MEAN, IMAGENET_STD)

    def _crop(
        self, tiles: Float[Tensor, "batch 3 side side"], draws: Float[Tensor, "batch 7"]
    ) -> Float[Tensor, "batch 3 size size"]:
        """Crops, flips and turns each tile by one affine resampling."""
        area, shape = CROP + (1 - CROP) * draws[:, 0], (_ASPECT ** (2 * draws[:, 1] - 1)).sqrt()
        width, height = (area.sqrt() * shape).clamp(max=1), (area.sqrt() / shape).clamp(max=1)
        flip_x, flip_y = 1 - 2 * (draws[:, 2] < 0.5).float(), 1 - 2 * (draws[:, 3] < 0.5).float()
        zero = torch.zeros_like(area)
        upright = torch.stack([width * flip_x, zero, zero, height * flip_y], dim=1).view(-1, 2, 2)
        aside = torch.stack([zero, width * flip_x, height * flip_y, zero], dim=1).view(-1, 2, 2)
        matrix = torch.where(draws[:, 6, None, None] < 0.5, aside, upright)  # all symmetries of a square
        centre = (1 - torch.stack([width, height], dim=1)) * (2 * draws[:, 4:6] - 1)
        grid = functional.affine_grid(
            torch.cat([matrix, centre[:, :, None]], dim=2),
            [len(tiles), tiles.shape[1], self._size, self._size],
            align_corners=False,
        )
        return functional.grid_sample(tiles, grid, padding_mode="reflection", align_corners=False)

    def _blur(
        self, views: Float[Tensor, "batch 3 size size"], chosen: Float[Tensor, "batch"], width: Float[Tensor, "batch"]
    ) -> Float[Tensor, "batch 3 size size"]:
        """Blurs some of the views by Gaussians of 0.1 to 2 px."""
        index = (chosen < self._blurred).nonzero().flatten()
        if not len(index):
            return views
        radius = max(1, self._size // 20)
        sigma, steps = 0.1 + 1.9 * width[index, None], torch.arange(-radius, radius + 1)
        kernel = (-0.5 * (steps / sigma).square()).exp()
        kernel = kernel / kernel.sum(dim=1, keepdim=True)
        blurred = functional.pad(views[index].transpose(0, 1), (radius,) * 4, mode="reflect")
        blurred = functional.conv2d(blurred, kernel[:, None, None, :], groups=len(index))
        blurred = functional.conv2d(blurred, kernel[:, None, :, None], groups=len(index))
        views[index] = blurred.transpose(0, 1)
        return views


def _jitter_colors(
    views: Float[Tensor, "batch 3 h w"], draws: Float[Tensor, "batch 6"]
) -> Float[Tensor, "batch 3 h w"]:
    """Changes brightness, contrast and saturation by one matrix in YIQ, and an offset for contrast."""
    chosen = draws[:, 0] < _JITTERED
    brightness, contrast, saturation = (
        torch.where(chosen, 1 + strength * (2 * draws[:, 1 + number] - 1), 1.0)
        for number, strength in enumerate((_BRIGHTNESS, _CONTRAST, _SATURATION))
    )
    # Column 4 is unused: without it, a seed would give other views than in earlier versions.
    saturation = torch.where(draws[:, 5] < _GREY, 0.0, saturation)
    matrix = torch.zeros(len(views), 3, 3)
    matrix[:, 0, 0] = 1
    matrix[:, 1, 1] = matrix[:, 2, 2] = saturation
    yiq = torch.tensor(_YIQ)
    matrix = torch.linalg.inv(yiq) @ matrix @ yiq * (brightness * contrast)[:, None, None]
    mean = (views.mean(dim=(2, 3)) * yiq[0]).sum(dim=1)
    offset = (1 - contrast) * brightness * mean
    return torch.baddbmm(offset[:, None, None], matrix, views.flatten(2)).view_as(views).clamp_(0, 1)


class ViewPairs(Dataset):
    """Two views of each tile; the index is (pass, tile)."""

    def __init__(self, tiles: Tiles, views: tuple[Views, Views], seed: int) -> None:
        self._tiles, self._views, self._seed = tiles, views, seed
        self._bytes = None

    def __getitems__(self, indices: list[tuple[int, int]]) -> Batch:
        if self._bytes is None:  # in the process that reads
            self._bytes = self._tiles.open()
        numbers = [number for _, number in indices]
        tiles = torch.from_numpy(np.stack([self._bytes[number] for number in numbers])).permute(0, 3, 1, 2)
        one, two = (
            views(tiles, [self._seeded_generator(which, epoch, number) for epoch, number in indices])
            for which, views in enumerate(self._views)
        )
        return one, two, torch.tensor(numbers)

    def _seeded_generator(self, *parts: object) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self._seed, "views", *parts))


class BatchSampler(Sampler):
    """Endless batches of (pass, tile) from a given batch on; incomplete batches are dropped.

    Each process yields its own part of every gathered batch.
    """

    def __init__(self, images: int, batch_size: int, seed: int, first: int) -> None:
        self._images, self._own, self._seed, self._first = images, batch_size, seed, first
        self._batch = batch_size * world_size()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_pass = self._images // self._batch
        batch = self._first
        while True:
            epoch = batch // per_pass
            order = self.order(epoch)
            for position in range(batch % per_pass, per_pass):
                start = position * self._batch + rank() * self._own
                yield [(epoch, number) for number in order[start : start + self._own]]
            batch = (epoch + 1) * per_pass

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
        return torch.randperm(self._images, generator=generator).tolist()


def load_batches(
    tiles: Tiles,
    views: tuple[Views, Views],
    device: torch.device,
    *,
    batch_size: int,
    seed: int,
    first: int,
    workers: int,
) -> Iterator[Batch]:
    """Yields endless batches of both views and the indices of their tiles.

    Args:
        device: That of the training; batches for a GPU are in pinned memory.
    """
    return iter(
        DataLoader(
            ViewPairs(tiles, views, seed),
            batch_sampler=BatchSampler(len(tiles), batch_size, seed, first),
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=device.type == "cuda",
        )
    )


def _identity(batch: Any) -> Any:
    return batch


def make_views(image_size: int, color_jitter: bool, symmetric: bool) -> tuple[Views, Views]:
    """Returns the augmentations of the two views of a tile.

    Args:
        symmetric: Augment both alike, as in v2. In v3 the first is always blurred, the second seldom, and a fifth of
            the second is solarised (arXiv 2104.02057, appendix).
    """
    if symmetric:
        return (views := Views(image_size, color_jitter)), views
    return (
        Views(image_size, color_jitter, blurred=1.0),
        Views(image_size, color_jitter, blurred=0.1, solarized=0.2 if color_jitter else 0.0),
    )
