"""Whether pre-training helped to tell the parts of pictures apart: mean IoU of a small decoder.

Features are frozen; where it is wanted, the network is trained with the decoder, too.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.encoder import Backbone, make_backbone
from f3rm_ext.moco.evaluation import Network, fine_tuned, open_backbone, pixels
from f3rm_ext.moco.pictures import PLAIN, read_tiles
from f3rm_ext.moco.tiles import find_files
from f3rm_ext.moco.views import number_from
from f3rm_ext.utils.pictures import UNREADABLE

IGNORED = 255
"""Value of pixels in masks that do not count."""
STEPS = 300
"""Of the decoder's training."""
_WIDTH = 64
_BATCH = 8


@dataclass(frozen=True)
class Masked:
    """Pictures with a class for each pixel."""

    images: UInt8[np.ndarray, "images side side 3"]
    """All pictures."""
    masks: UInt8[np.ndarray, "images side side"]
    """Class of each pixel, or 255."""

    @property
    def classes(self) -> list[int]:
        """The values of the masks."""
        return [value for value in np.unique(self.masks).tolist() if value != IGNORED]


@dataclass(frozen=True)
class Segmentation:
    """Mean IoU of one kind of feature, one per seed, 0 to 1."""

    name: str
    """Kind of feature."""
    mean_iou: tuple[float, ...]
    """Over the classes that the second half shows; of frozen features."""
    fine_tuned: tuple[float, ...] = ()
    """After training the network, too; only where it was wanted."""


def read_masked(folder: Path, masks: Path, side: int) -> Masked:
    """Reads pictures that have a mask, and the masks: PNG files of their names, whose values are classes.

    Raises:
        ConfigError: Fewer than four pictures have a mask, a mask has another size or no class per pixel, or all
            masks have one class.
    """
    images, found = [], []
    for path in find_files(folder):
        mask = masks / path.relative_to(folder).with_suffix(".png")
        if not mask.is_file():
            continue
        try:
            (tile,) = read_tiles(path, side, PLAIN).values()
            with Image.open(path) as picture, Image.open(mask) as image:
                if image.size != picture.size or image.mode not in ("L", "P"):
                    raise ConfigError(
                        f"The mask {mask} is {image.width} x {image.height} px of mode {image.mode}, its picture "
                        f"{picture.width} x {picture.height} px: give one byte per pixel, at the same size."
                    )
                found.append(_square(image, side))
        except UNREADABLE:
            continue
        images.append(tile)
    if len(images) < 4:
        raise ConfigError(
            f"Of the pictures in {folder}, {len(images)} have a mask in {masks}: masks are .png files of the same "
            "names, and four are needed."
        )
    data = Masked(np.stack(images), np.stack(found))
    if len(data.classes) < 2:
        raise ConfigError(f"The masks in {masks} have one class, {data.classes}: two are needed.")
    return data


def _square(mask: Image.Image, side: int) -> UInt8[np.ndarray, "side side"]:
    """Cuts the square in the middle, as pictures are cut; classes are not mixed."""
    short = min(mask.size)
    left, top = (mask.width - short) // 2, (mask.height - short) // 2
    return np.asarray(mask.resize((side, side), Image.Resampling.NEAREST, box=(left, top, left + short, top + short)))


def evaluate_masks(
    data: Masked,
    weights: Path,
    seeds: int,
    steps: int = STEPS,
    *,
    fine_tune_passes: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Segmentation]:
    """Scores pre-trained weights beside random ones: one half trains a decoder, the other is scored.

    Args:
        data: Pictures with masks.
        weights: Of a training.
        seeds: Number of splits, and of random networks, 1 to 10.
        steps: Of the decoder's training.
        fine_tune_passes: Passes over the first half that train network and decoder together; 0 for none.
        done: Called after each split of each kind of feature.
    """
    classes = data.classes
    table = np.full(IGNORED + 1, -1)
    table[classes] = range(len(classes))
    labels = torch.from_numpy(table[data.masks])
    side, count = data.images.shape[1], len(classes)
    pretrained, architecture = open_backbone(weights)
    found = []
    for name in ("pre-trained", "random weights"):
        frozen, tuned = [], []
        for seed in range(seeds):
            backbone = copy.deepcopy(pretrained)  # fine-tuning changes it
            if name == "random weights":
                torch.manual_seed(number_from(seed, "random backbone"))
                backbone = make_backbone(architecture, side)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number_from(seed, "masks")))
            train, test = order.tensor_split(2)
            maps = dense_features(backbone, data.images)
            predicted = decoded(maps[train], labels[train], maps[test], count, steps, seed)
            frozen.append(mean_iou(predicted, labels[test], count))
            if fine_tune_passes:
                head = partial(_head, maps.shape[1], count, side)
                predicted = fine_tuned(_Maps(backbone), head, data.images, labels, train, test, fine_tune_passes, seed)
                tuned.append(mean_iou(predicted, labels[test], count))
            done()
        found.append(Segmentation(name, tuple(frozen), tuple(tuned)))
    return found


class _Maps(nn.Module):
    """A network that returns maps of features."""

    def __init__(self, backbone: Network) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, batch: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch feat rows cols"]:
        """Returns the maps of stages 2 to 4 of a ResNet at the resolution of stage 2, or the patches of a ViT."""
        if isinstance(self.backbone, Backbone):
            first, *others = self.backbone.maps(batch)[1:]
            size = first.shape[2:]
            return torch.cat([first, *(functional.interpolate(each, size) for each in others)], dim=1)
        return self.backbone.network(batch)[0].permute(0, 3, 1, 2)


def _decoder(features: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(features, _WIDTH, 1), nn.ReLU(), nn.Conv2d(_WIDTH, classes, 3, padding=1))


def _head(features: int, classes: int, side: int) -> nn.Sequential:
    """The decoder on features that change: standardised by batch, and scaled to the side of the pictures."""
    return nn.Sequential(
        nn.BatchNorm2d(features), _decoder(features, classes), nn.Upsample((side, side), mode="bilinear")
    )


@torch.inference_mode()
def dense_features(
    backbone: Network, images: UInt8[np.ndarray, "images side side 3"]
) -> Float[Tensor, "images feat rows cols"]:
    """Returns the maps of all pictures; see :class:`_Maps`."""
    maps = _Maps(backbone).eval()
    return torch.cat([maps(pixels(images[at : at + _BATCH])) for at in range(0, len(images), _BATCH)]).clone()


def decoded(
    train: Float[Tensor, "train feat rows cols"],
    labels: Int[Tensor, "train side side"],
    test: Float[Tensor, "test feat rows cols"],
    classes: int,
    steps: int,
    seed: int,
) -> Int[Tensor, "test side side"]:
    """Returns the classes of pixels by a decoder of two convolutions, trained by AdamW at a rate of 1e-3.

    Args:
        train: Features that it is trained on; they are standardised.
        labels: Their classes; −1 does not count.
        test: Features of the pictures to be told apart.
        classes: How many.
        steps: Batches of 8 pictures.
        seed: Of its weights and of the order.
    """
    torch.manual_seed(number_from(seed, "decoder"))
    mean, std = train.mean(dim=(0, 2, 3), keepdim=True), train.std(dim=(0, 2, 3), keepdim=True).clamp_min(1e-6)
    decoder = _decoder(train.shape[1], classes)
    optimizer = torch.optim.AdamW(decoder.parameters(), 1e-3)
    size = labels.shape[1:]

    def logits(rows: Float[Tensor, "batch feat rows cols"]) -> Float[Tensor, "batch classes side side"]:
        return functional.interpolate(decoder((rows - mean) / std), size, mode="bilinear")

    for _ in range(steps):
        chosen = torch.randint(len(train), (_BATCH,))
        optimizer.zero_grad()
        functional.cross_entropy(logits(train[chosen]), labels[chosen], ignore_index=-1).backward()
        optimizer.step()
    with torch.inference_mode():
        return torch.cat([logits(part).argmax(dim=1) for part in test.split(_BATCH)]).clone()


def mean_iou(predicted: Int[Tensor, "*shape"], labels: Int[Tensor, "*shape"], classes: int) -> float:
    """Returns the mean over classes of intersection over union of all pixels; −1 in `labels` does not count.

    >>> mean_iou(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, -1]), 3)
    0.5
    """
    counted = labels >= 0
    predicted, labels = predicted[counted], labels[counted]
    counts = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes).double()
    inside, seen = counts.diagonal(), counts.sum(dim=1) > 0
    union = counts.sum(dim=0) + counts.sum(dim=1) - inside
    return float((inside[seen] / union[seen]).mean())
