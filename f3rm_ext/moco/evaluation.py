"""Whether pre-training helped: k-NN, a linear probe and fine-tuning on labelled pictures, beside other features."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.errors import ConfigError, reason_of
from f3rm_ext.features.extractors.daisy import DaisyConfig, DaisyExtractor
from f3rm_ext.features.extractors.weights import load_state_dict
from f3rm_ext.moco.encoder import Backbone, make_backbone
from f3rm_ext.moco.options import Architecture
from f3rm_ext.moco.pictures import PLAIN, read_tiles
from f3rm_ext.moco.tiles import find_files
from f3rm_ext.moco.views import MEAN, STD, number_from
from f3rm_ext.moco.vit import VitBackbone
from f3rm_ext.utils.pictures import UNREADABLE

Network = Backbone | VitBackbone

NEIGHBOURS = 20
_BINS = 8
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Weights of the probe's squared coefficients that are tried."""
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
            found.setdefault(name, []).extend(read_tiles(path, side, PLAIN).values())
        except UNREADABLE:
            continue
    small = [name for name, images in found.items() if len(images) < 4]
    if len(found) < 2 or small:
        raise ConfigError(
            f"{folder} cannot be evaluated on ({'class ' + small[0] + ' is too small' if small else 'no classes'}): "
            "give a folder with a subfolder of four or more pictures per class."
        )
    labels = [number for number, images in enumerate(found.values()) for _ in images]
    return Labelled(np.stack([image for images in found.values() for image in images]), torch.tensor(labels), (*found,))


def open_backbone(path: Path) -> tuple[Network, Architecture]:
    """Reads the weights of a training.

    Raises:
        ConfigError: The file does not describe itself as one of ours.
        ExtractorError: It is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            architecture = facts.get("architecture")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not the backbone.safetensors of a training ({error}): give --weights.") from error
    if architecture not in get_args(Architecture):
        raise ConfigError(f"{path} does not say which network it is of: give the backbone.safetensors of a training.")
    architecture = cast(Architecture, architecture)
    backbone = make_backbone(architecture, int(facts["image_size"]))
    backbone.load_state_dict(load_state_dict(path))
    return backbone, architecture


@torch.inference_mode()
def network_features(
    backbone: Network, images: UInt8[np.ndarray, "images side side 3"], all_stages: bool = False
) -> Float[Tensor, "images feat"]:
    """Returns the mean of the last feature map of each picture; of a ViT the class token.

    Args:
        backbone: The network; it is left in evaluation mode.
        images: Pictures.
        all_stages: Of a ResNet, the means of the maps of all four stages, the last one last.
    """
    backbone.eval()
    found = []
    for start in range(0, len(images), _BATCH):
        batch = pixels(images[start : start + _BATCH])
        if all_stages and isinstance(backbone, Backbone):
            found.append(torch.cat([each.mean(dim=(2, 3)) for each in backbone.maps(batch)], dim=1))
        else:
            found.append(backbone(batch))
    return torch.cat(found).clone()


def by_stages(
    backbone: Network, images: UInt8[np.ndarray, "images side side 3"]
) -> dict[str, Float[Tensor, "images _"]]:
    """Returns features by what a table adds to their name: those of the last stage and, of a ResNet, of all."""
    found = network_features(backbone, images, all_stages=True)
    last = {"": found[:, -backbone.dim :]}
    return {**last, ", all stages": found} if isinstance(backbone, Backbone) else last


def color_histograms(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images bins"]:
    """Returns the square roots of joint RGB histograms of 8 × 8 × 8 bins, whose dot product compares them."""
    cells = (images.astype(np.int64) * _BINS) >> 8
    index = (cells[..., 0] * _BINS + cells[..., 1]) * _BINS + cells[..., 2]
    counts = np.stack([np.bincount(image.ravel(), minlength=_BINS**3) for image in index])
    return torch.from_numpy(np.sqrt(counts / counts.sum(axis=1, keepdims=True))).float()


def split(
    labels: Int[Tensor, "images"], seed: int, share: float = 0.5
) -> tuple[Int[Tensor, "train"], Int[Tensor, "test"]]:
    """Returns the indices of two parts of every class.

    Args:
        labels: Class of each picture.
        seed: Of the choice.
        share: Of each class that comes first.
    """
    generator = torch.Generator().manual_seed(number_from(seed, "split"))
    train, test = [], []
    for name in labels.unique().tolist():
        members = (labels == name).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        first = int(len(members) * share)
        train.append(members[:first])
        test.append(members[first:])
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
    train: Float[Tensor, "train feat"],
    labels: Int[Tensor, "train"],
    test: Float[Tensor, "test feat"],
    penalty: float | None = None,
) -> Int[Tensor, "test"]:
    """Returns the classes by logistic regression on standardised features, fitted by L-BFGS.

    Args:
        train: Features that it is fitted to.
        labels: Their classes.
        test: Features to be classified.
        penalty: Weight of the squared coefficients; by default that of :data:`PENALTIES` which is best on a quarter of
            `train` when fitted to the rest.
    """
    if penalty is None:
        fitted, held = split(labels, 0, 0.75)
        scores = [
            (linear_probe(train[fitted], labels[fitted], train[held], each) == labels[held]).float().mean().item()
            for each in PENALTIES
        ]
        penalty = PENALTIES[scores.index(max(scores))]
    mean, std = train.mean(dim=0), train.std(dim=0).clamp_min(1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    weight = torch.zeros(train.shape[1], int(labels.max()) + 1, requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(train @ weight + bias, labels) + penalty * weight.square().sum()
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
    fine_tuned: tuple[float, ...] = ()
    """After training the whole network with labels; only for networks, and where it was wanted."""

    def followed_by(self, other: "Score") -> "Score":
        """Returns the accuracies of both."""
        knn, linear = self.knn + other.knn, self.linear + other.linear
        return Score(self.name, knn, linear, self.fine_tuned + other.fine_tuned)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of 1 to 10 values and half of its 95 % confidence interval (Student's t; 0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, _T_95[len(values)] * math.sqrt(variance / len(values))


def daisy_features(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images feat"]:
    """Returns mean and standard deviation of the features of ``dense-daisy`` over each picture."""
    extractor = DaisyExtractor(DaisyConfig(), device=torch.device("cpu"))
    found = (extractor.extract([image])[0].flatten(0, 1) for image in images)
    return torch.stack([torch.cat([rows.mean(dim=0), rows.std(dim=0)]) for rows in found])


@torch.inference_mode()
def imagenet_features(path: Path, images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images feat"]:
    """Returns the mean of the last feature map of EfficientNet-lite0 with ImageNet weights.

    Args:
        path: Its state dict with timm's names, or with others in timm's order.
        images: Pictures.

    Raises:
        ConfigError: The file is of another network.
    """
    import timm

    network = timm.create_model("tf_efficientnet_lite0")
    state, own = {name: value.float() for name, value in load_state_dict(path).items()}, network.state_dict()
    if [value.shape for value in state.values()] == [value.shape for value in own.values()]:
        state = dict(zip(own, state.values(), strict=True))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(
            f"{path} is not EfficientNet-lite0 ({reason_of(error)}): give --imagenet its state dict, as of timm."
        ) from error
    network.eval()
    found = []
    for start in range(0, len(images), _BATCH):
        batch = torch.from_numpy(images[start : start + _BATCH].copy()).permute(0, 3, 1, 2).float()
        found.append(network.forward_features((batch - 127) / 128).mean(dim=(2, 3)))
    return torch.cat(found).clone()


def evaluate(
    data: Labelled,
    weights: Path,
    seeds: int,
    *,
    imagenet: Path | None = None,
    fine_tune_passes: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Scores pre-trained weights beside random ones, colour histograms and DAISY, on the same halves.

    Of ResNets, features of the last stage and of all stages are scored.

    Args:
        data: Labelled pictures.
        weights: Of a training.
        seeds: Number of splits, and of random networks, 1 to 10.
        imagenet: Weights of EfficientNet-lite0, which are then scored, too.
        fine_tune_passes: Passes over the first half with labels, from pre-trained and from random weights; 0 for none.
        done: Called after each split of each kind of feature.
    """
    backbone, architecture = open_backbone(weights)

    def random_backbone(seed: int) -> Network:
        torch.manual_seed(number_from(seed, "random backbone"))
        return make_backbone(architecture, data.images.shape[1])

    fixed = {
        "pre-trained": by_stages(backbone, data.images),
        "colour histograms": {"": color_histograms(data.images)},
        "DAISY": {"": daisy_features(data.images)},
    }
    if imagenet is not None:
        fixed["ImageNet (EfficientNet-lite0)"] = {"": imagenet_features(imagenet, data.images)}
    found: dict[str, Score] = {}
    for name in ("pre-trained", "random weights", *list(fixed)[1:]):
        for seed in range(seeds):
            train, test = split(data.labels, seed)
            features = fixed[name] if name in fixed else by_stages(random_backbone(seed), data.images)
            for stages, rows in features.items():
                now = scored(name + stages, rows, data.labels, train, test)
                if fine_tune_passes and not stages and name in ("pre-trained", "random weights"):
                    network = open_backbone(weights)[0] if name in fixed else random_backbone(seed)
                    head = partial(nn.Linear, network.dim, len(data.classes))
                    predicted = fine_tuned(network, head, data.images, data.labels, train, test, fine_tune_passes, seed)
                    now = replace(now, fine_tuned=(accuracy(predicted, data.labels[test]),))
                found[now.name] = found[now.name].followed_by(now) if now.name in found else now
            done()
    return list(found.values())


def scored(
    name: str,
    features: Float[Tensor, "images feat"],
    labels: Int[Tensor, "images"],
    train: Int[Tensor, "train"],
    test: Int[Tensor, "test"],
) -> Score:
    """Returns the accuracies of features on one split."""
    knn, linear = (
        accuracy(method(features[train], labels[train], features[test]), labels[test])
        for method in (nearest_neighbours, linear_probe)
    )
    return Score(name, (knn,), (linear,))


def fine_tuned(
    network: nn.Module,
    head: Callable[[], nn.Module],
    images: UInt8[np.ndarray, "images side side 3"],
    labels: Int[Tensor, "images *size"],
    train: Int[Tensor, "train"],
    test: Int[Tensor, "test"],
    passes: int,
    seed: int,
) -> Int[Tensor, "test *size"]:
    """Returns the classes of `test`, or of its pixels, by a network that is trained as a whole on `train`.

    AdamW, rate 1e-3 falling to 0 along half a cosine, flips both ways, batches of 32, for pixels of 8.

    Args:
        network: What the training starts from; it is changed.
        head: Makes what tells classes by what the network returns.
        images: All pictures.
        labels: Class of each, or of each of its pixels; −1 does not count.
        train: Pictures to train on.
        test: Pictures to classify.
        passes: Over `train`.
        seed: Of head, order and flips.
    """
    torch.manual_seed(number_from(seed, "fine-tuning"))
    of_pixels = labels.ndim > 1
    model = nn.Sequential(network, head())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    batches = [torch.randperm(len(train)).split(8 if of_pixels else 32) for _ in range(passes)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(map(len, batches)))
    model.train()
    for chosen in (part for order in batches for part in order if len(part) > 1):
        batch, wanted = pixels(images[train[chosen].numpy()]), labels[train[chosen]]
        flips = [axis for axis in (2, 3) if torch.rand(()) < 0.5]
        if of_pixels:
            wanted = wanted.flip([axis - 1 for axis in flips])
        optimizer.zero_grad()
        functional.cross_entropy(model(batch.flip(flips)), wanted, ignore_index=-1).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.inference_mode():
        parts = [model(pixels(images[part.numpy()])).argmax(dim=1) for part in test.split(8 if of_pixels else _BATCH)]
    return torch.cat(parts).clone()


def pixels(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images 3 side side"]:
    """Returns what a backbone takes: normalised by ImageNet's mean and standard deviation."""
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return (torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255 - mean) / std


def accuracy(predicted: Int[Tensor, "images"], labels: Int[Tensor, "images"]) -> float:
    """Returns the share of labels that are right."""
    return float((predicted == labels).float().mean())
