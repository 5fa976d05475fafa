"""Evaluation of pre-training on masks: mean IoU of a small decoder on frozen or fine-tuned features."""

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
from f3rm_ext.moco.evaluation import Network, Scores, fine_tune, normalize_images, open_backbone
from f3rm_ext.moco.pictures import WHOLE_PICTURE, central_square, read_tiles
from f3rm_ext.moco.tiles import find_files
from f3rm_ext.moco.views import derive_seed
from f3rm_ext.utils.pictures import UNREADABLE

IGNORED = 255
"""Value of mask pixels that are ignored."""
STEPS = 300
"""Steps of the decoder's training."""
_WIDTH = 64
_BATCH = 8


@dataclass(frozen=True)
class MaskedImages:
    """Pictures with one class per pixel."""

    images: UInt8[np.ndarray, "images side side 3"]
    masks: UInt8[np.ndarray, "images side side"]
    """Class of each pixel; 255 is ignored."""

    @property
    def classes(self) -> list[int]:
        return [value for value in np.unique(self.masks).tolist() if value != IGNORED]


def read_masked(folder: Path, masks: Path, side: int) -> MaskedImages:
    """Reads pictures that have a mask, and the masks: PNG files of the same names, whose values are classes.

    Raises:
        ConfigError: Fewer than four pictures have a mask, a mask has another size or more than one byte per pixel, or
            all masks have one class.
    """
    images, squares = [], []
    for path in find_files(folder):
        mask = masks / path.relative_to(folder).with_suffix(".png")
        if not mask.is_file():
            continue
        try:
            (tile,) = read_tiles(path, side, WHOLE_PICTURE).values()
            with Image.open(path) as picture, Image.open(mask) as image:
                if image.size != picture.size or image.mode not in ("L", "P"):
                    raise ConfigError(
                        f"The mask {mask} is {image.width} x {image.height} px of mode {image.mode}, its picture "
                        f"{picture.width} x {picture.height} px: give one byte per pixel, at the same size."
                    )
                # Resized as pictures are, without mixing classes.
                box = central_square(image.size)
                squares.append(np.asarray(image.resize((side, side), Image.Resampling.NEAREST, box=box)))
        except UNREADABLE:
            continue
        images.append(tile)
    if len(images) < 4:
        raise ConfigError(
            f"Of the pictures in {folder}, {len(images)} have a mask in {masks}: masks are .png files of the same "
            "names, and four are needed."
        )
    data = MaskedImages(np.stack(images), np.stack(squares))
    if len(data.classes) < 2:
        raise ConfigError(f"The masks in {masks} have one class, {data.classes}: two are needed.")
    return data


def evaluate_masks(
    data: MaskedImages,
    weights: Path,
    seeds: int,
    steps: int = STEPS,
    *,
    fine_tune_passes: int = 0,
    done: Callable[[], None] = lambda: None,
) -> Scores:
    """Scores pre-trained and random weights by a decoder that is trained on one half and scored on the other.

    Args:
        fine_tune_passes: Passes over the first half that train network and decoder together; 0 for none.
    """
    classes = data.classes
    table = np.full(IGNORED + 1, -1)
    table[classes] = range(len(classes))
    labels = torch.from_numpy(table[data.masks])
    side, count = data.images.shape[1], len(classes)
    pretrained, architecture = open_backbone(weights)
    scores: Scores = {}
    for name in ("pre-trained", "random weights"):
        score = scores[name] = {"mean_iou": [], "fine_tuned": []}
        for seed in range(seeds):
            backbone = copy.deepcopy(pretrained)  # fine-tuning changes it
            if name == "random weights":
                torch.manual_seed(derive_seed(seed, "random backbone"))
                backbone = make_backbone(architecture, side)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed(seed, "masks")))
            train, test = order.tensor_split(2)
            maps = dense_features(backbone, data.images)
            predicted = classify_pixels(maps[train], labels[train], maps[test], count, steps, seed)
            score["mean_iou"].append(mean_iou(predicted, labels[test], count))
            if fine_tune_passes:
                head = partial(_head, maps.shape[1], count, side)
                predicted = fine_tune(_Maps(backbone), head, data.images, labels, train, test, fine_tune_passes, seed)
                score["fine_tuned"].append(mean_iou(predicted, labels[test], count))
            done()
    return scores


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
    """Returns the decoder for trained features: standardised per batch, and upsampled to the side of the pictures."""
    return nn.Sequential(
        nn.BatchNorm2d(features), _decoder(features, classes), nn.Upsample((side, side), mode="bilinear")
    )


@torch.inference_mode()
def dense_features(
    backbone: Network, images: UInt8[np.ndarray, "images side side 3"]
) -> Float[Tensor, "images feat rows cols"]:
    """Returns the maps of all pictures; see :class:`_Maps`."""
    maps = _Maps(backbone).eval()
    return torch.cat(
        [maps(normalize_images(images[start : start + _BATCH])) for start in range(0, len(images), _BATCH)]
    )


def classify_pixels(
    train: Float[Tensor, "train feat rows cols"],
    labels: Int[Tensor, "train side side"],
    test: Float[Tensor, "test feat rows cols"],
    classes: int,
    steps: int,
    seed: int,
) -> Int[Tensor, "test side side"]:
    """Trains a decoder of two convolutions on `train` by AdamW (rate 1e-3) and returns the classes of `test`.

    Args:
        labels: Classes of their pixels; −1 is ignored.
        steps: Batches of 8 pictures.
    """
    torch.manual_seed(derive_seed(seed, "decoder"))
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
        return torch.cat([logits(part).argmax(dim=1) for part in test.split(_BATCH)])


def mean_iou(predicted: Int[Tensor, "*shape"], labels: Int[Tensor, "*shape"], classes: int) -> float:
    """Returns the mean over classes of intersection over union of all pixels; −1 in `labels` is ignored.

    >>> mean_iou(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, -1]), 3)
    0.5
    """
    valid = labels >= 0
    predicted, labels = predicted[valid], labels[valid]
    counts = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes).double()
    inside, seen = counts.diagonal(), counts.sum(dim=1) > 0
    union = counts.sum(dim=0) + counts.sum(dim=1) - inside
    return float((inside[seen] / union[seen]).mean())
