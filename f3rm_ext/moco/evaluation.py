"""Whether pre-training helped: k-NN and a linear probe on labelled pictures, beside features that cost nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.weights import load_state_dict
from f3rm_ext.moco.encoder import Backbone
from f3rm_ext.moco.options import Architecture
from f3rm_ext.moco.tiles import find_files, read_tile
from f3rm_ext.moco.views import MEAN, STD, number_from

NEIGHBOURS = 20
_BINS = 8
_PENALTY = 1e-3
_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Quantiles of Student's t for 95 % intervals, by the number of values."""
_BATCH = 128


@dataclass(frozen=True)
class Labelled:
    """Pictures whose class is the name of their folder."""

    images: UInt8[np.ndarray, "images side side 3"]
    """All pictures."""
    labels: Int[Tensor, "images"]
    """Class of each."""
    classes: tuple[str, ...]
    """Names of the classes."""


def read_labelled(folder: Path, side: int) -> Labelled:
    """Reads pictures in subfolders, one per class. Files that cannot be read are left out.

    Raises:
        ConfigError: There are fewer than two classes, or a class of fewer than four pictures.
    """
    found: dict[str, list[np.ndarray]] = {}
    for path in find_files(folder):
        name = path.relative_to(folder).parts[0]
        if path.parent == folder:
            continue
        try:
            found.setdefault(name, []).append(read_tile(path, side))
        except (OSError, ValueError, SyntaxError):
            continue
    small = [name for name, images in found.items() if len(images) < 4]
    if len(found) < 2 or small:
        raise ConfigError(
            f"{folder} cannot be evaluated on ({'class ' + small[0] + ' is too small' if small else 'no classes'}): "
            "give a folder with a subfolder of four or more pictures per class."
        )
    labels = [number for number, images in enumerate(found.values()) for _ in images]
    return Labelled(np.stack([image for images in found.values() for image in images]), torch.tensor(labels), (*found,))


def open_backbone(path: Path) -> tuple[Backbone, Architecture]:
    """Reads the weights of a training.

    Raises:
        ConfigError: The file does not describe itself as one of ours.
        ExtractorError: It is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            architecture = (file.metadata() or {}).get("architecture")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not the backbone.safetensors of a training ({error}): give --weights.") from error
    if architecture != "resnet18" and architecture != "resnet50":
        raise ConfigError(f"{path} does not say which network it is of: give the backbone.safetensors of a training.")
    backbone = Backbone(architecture)
    backbone.load_state_dict(load_state_dict(path))
    return backbone, architecture


@torch.inference_mode()
def network_features(
    backbone: Backbone, images: UInt8[np.ndarray, "images side side 3"]
) -> Float[Tensor, "images feat"]:
    """Returns the mean of the last feature map of each picture."""
    backbone.eval()
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    found = []
    for start in range(0, len(images), _BATCH):
        pixels = torch.from_numpy(images[start : start + _BATCH].copy()).permute(0, 3, 1, 2).float() / 255
        found.append(backbone((pixels - mean) / std))
    return torch.cat(found).clone()


def color_histograms(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images bins"]:
    """Returns the square roots of joint RGB histograms of 8 × 8 × 8 bins, whose dot product compares them."""
    cells = (images.astype(np.int64) * _BINS) >> 8
    index = (cells[..., 0] * _BINS + cells[..., 1]) * _BINS + cells[..., 2]
    counts = np.stack([np.bincount(image.ravel(), minlength=_BINS**3) for image in index])
    return torch.from_numpy(np.sqrt(counts / counts.sum(axis=1, keepdims=True))).float()


def split(labels: Int[Tensor, "images"], seed: int) -> tuple[Int[Tensor, "train"], Int[Tensor, "test"]]:
    """Returns the indices of two halves of every class."""
    generator = torch.Generator().manual_seed(number_from(seed, "split"))
    train, test = [], []
    for name in labels.unique().tolist():
        members = (labels == name).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        train.append(members[: len(members) // 2])
        test.append(members[len(members) // 2 :])
    return torch.cat(train), torch.cat(test)


def nearest_neighbours(
    train: Float[Tensor, "train feat"],
    labels: Int[Tensor, "train"],
    test: Float[Tensor, "test feat"],
    count: int = NEIGHBOURS,
) -> Int[Tensor, "test"]:
    """Returns the class of most cosine similarity among the nearest neighbours of each row."""
    similarity = functional.normalize(test, dim=1) @ functional.normalize(train, dim=1).T
    best, index = similarity.topk(min(count, len(train)), dim=1)
    votes = torch.zeros(len(test), int(labels.max()) + 1)
    return votes.scatter_add_(1, labels[index], (best / 0.1).exp()).argmax(dim=1)


def linear_probe(
    train: Float[Tensor, "train feat"], labels: Int[Tensor, "train"], test: Float[Tensor, "test feat"]
) -> Int[Tensor, "test"]:
    """Returns the classes by logistic regression on standardised features, fitted by L-BFGS."""
    mean, std = train.mean(dim=0), train.std(dim=0).clamp_min(1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    weight = torch.zeros(train.shape[1], int(labels.max()) + 1, requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(train @ weight + bias, labels) + _PENALTY * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (test @ weight + bias).detach().argmax(dim=1)


@dataclass(frozen=True)
class Score:
    """Accuracies of one kind of feature, one per seed, 0 to 1."""

    name: str
    """Kind of feature."""
    knn: tuple[float, ...]
    """By nearest neighbours."""
    linear: tuple[float, ...]
    """By the linear probe."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of 1 to 10 values and half of its 95 % confidence interval (Student's t; 0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, _T_95[len(values)] * math.sqrt(variance / len(values))


def evaluate(data: Labelled, weights: Path, seeds: int, done: Callable[[], None] = lambda: None) -> list[Score]:
    """Scores pre-trained weights beside random ones and colour histograms, on the same halves.

    Args:
        data: Labelled pictures.
        weights: Of a training.
        seeds: Number of splits, and of random networks, 1 to 10.
        done: Called after each split of each kind of feature.
    """
    backbone, architecture = open_backbone(weights)
    trained, histograms = network_features(backbone, data.images), color_histograms(data.images)

    def random_features(seed: int) -> Tensor:
        torch.manual_seed(number_from(seed, "random backbone"))
        return network_features(Backbone(architecture), data.images)

    kinds: dict[str, Callable[[int], Tensor]] = {
        "pre-trained": lambda _: trained,
        "random weights": random_features,
        "colour histograms": lambda _: histograms,
    }
    scores = []
    for name, features_of in kinds.items():
        knn, linear = [], []
        for seed in range(seeds):
            features, (train, test) = features_of(seed), split(data.labels, seed)
            for method, found in ((nearest_neighbours, knn), (linear_probe, linear)):
                predicted = method(features[train], data.labels[train], features[test])
                found.append(float((predicted == data.labels[test]).float().mean()))
            done()
        scores.append(Score(name, tuple(knn), tuple(linear)))
    return scores
