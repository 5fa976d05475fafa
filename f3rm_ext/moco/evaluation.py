"""Evaluation of pre-training on labelled pictures: k-NN, linear probe and fine-tuning, compared with other features."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from scipy.stats import t as student_t
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.errors import ConfigError, reason_of
from f3rm_ext.features.extractors.daisy import DaisyConfig, DaisyExtractor
from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN, IMAGENET_STD, normalise
from f3rm_ext.features.extractors.weights import load_state_dict
from f3rm_ext.html.tables import Table
from f3rm_ext.moco.encoder import Backbone, make_backbone
from f3rm_ext.moco.options import Architecture
from f3rm_ext.moco.pictures import WHOLE_PICTURE, read_tiles
from f3rm_ext.moco.tiles import find_files
from f3rm_ext.moco.views import derive_seed
from f3rm_ext.moco.vit import VitBackbone
from f3rm_ext.utils.pictures import UNREADABLE

Network = Backbone | VitBackbone

NEIGHBOURS = 20
_BINS = 8
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Candidate weights of the probe's squared coefficients."""
_BATCH = 128


@dataclass(frozen=True)
class LabelledImages:
    """Pictures with the class that their folder names."""

    images: UInt8[np.ndarray, "images side side 3"]
    labels: Int[Tensor, "images"]
    """Class index of each picture."""
    classes: tuple[str, ...]


def read_labelled(folder: Path, side: int) -> LabelledImages:
    """Reads pictures in subfolders, one per class. Unreadable files are skipped.

    Raises:
        ConfigError: There are fewer than two classes, or a class has fewer than four pictures.
    """
    by_class: dict[str, list[np.ndarray]] = {}
    for path in find_files(folder):
        name = path.relative_to(folder).parts[0]
        if path.parent == folder:
            continue
        try:
            by_class.setdefault(name, []).extend(read_tiles(path, side, WHOLE_PICTURE).values())
        except UNREADABLE:
            continue
    small = [name for name, images in by_class.items() if len(images) < 4]
    if len(by_class) < 2 or small:
        raise ConfigError(
            f"{folder} has {'too few pictures of class ' + small[0] if small else 'no classes'}: give a folder with "
            "two or more subfolders, one per class, of four or more pictures each."
        )
    labels = [number for number, images in enumerate(by_class.values()) for _ in images]
    images = np.stack([image for images in by_class.values() for image in images])
    return LabelledImages(images, torch.tensor(labels), (*by_class,))


def open_backbone(path: Path) -> tuple[Network, Architecture]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            architecture = facts.get("architecture")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): give --weights the backbone.safetensors of a training."
        ) from error
    if architecture not in get_args(Architecture):
        raise ConfigError(f"{path} does not name its network: give --weights the backbone.safetensors of a training.")
    architecture = cast(Architecture, architecture)
    backbone = make_backbone(architecture, int(facts["image_size"]))
    backbone.load_state_dict(load_state_dict(path))
    return backbone, architecture


@torch.inference_mode()
def network_features(
    backbone: Network, images: UInt8[np.ndarray, "images side side 3"]
) -> dict[str, Float[Tensor, "images _"]]:
    """Returns features by the suffix of their name in a table: the mean of each picture's last feature map (a ViT's
    class token), and the means of all four stages of a ResNet.
    """
    backbone.eval()
    batches = [normalize_images(images[start : start + _BATCH]) for start in range(0, len(images), _BATCH)]
    if not isinstance(backbone, Backbone):
        return {"": torch.cat([backbone(batch) for batch in batches])}
    means = [torch.cat([each.mean(dim=(2, 3)) for each in backbone.maps(batch)], dim=1) for batch in batches]
    features = torch.cat(means)
    return {"": features[:, -backbone.dim :], ", all stages": features}


def color_histograms(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images bins"]:
    """Returns square roots of joint RGB histograms, 8 × 8 × 8 bins, which are compared by dot products."""
    cells = (images.astype(np.int64) * _BINS) >> 8
    index = (cells[..., 0] * _BINS + cells[..., 1]) * _BINS + cells[..., 2]
    counts = np.stack([np.bincount(image.ravel(), minlength=_BINS**3) for image in index])
    return torch.from_numpy(np.sqrt(counts / counts.sum(axis=1, keepdims=True))).float()


def split_classes(
    labels: Int[Tensor, "images"], seed: int, share: float = 0.5
) -> tuple[Int[Tensor, "train"], Int[Tensor, "test"]]:
    """Returns the indices of two random parts of every class; `share` (0 to 1) of each class is in the first."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "split"))
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
    """Returns the class of each row by a vote of its nearest neighbours, weighted by exp(cosine similarity / 0.1)."""
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
    """Returns the classes of `test` by logistic regression on standardised features, fitted by L-BFGS.

    Args:
        penalty: Weight of the squared coefficients; by default that of :data:`PENALTIES` which is best on a quarter of
            `train` when fitted to the rest.
    """
    if penalty is None:
        fitted, held = split_classes(labels, 0, 0.75)
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


Scores = dict[str, dict[str, list[float]]]
"""For each kind of feature and each way of scoring, a score per seed, 0 to 1; an empty list if it was not requested."""


def percent(values: Sequence[float]) -> str:
    """Returns the mean in % with half of its 95 % interval (Student's t; 0 for one value).

    >>> percent([0.5, 0.6, 0.7]), percent([0.5]), percent([])
    ('60.0 ± 24.8', '50.0 ± 0.0', '–')
    """
    if not values:
        return "–"
    count = len(values)
    half = student_t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count) if count > 1 else 0.0
    return f"{100 * np.mean(values):.1f} ± {100 * half:.1f}"


def scores_table(scores: Scores, titles: Mapping[str, str]) -> Table:
    """Returns a table in %, each mean with half of its 95 % interval.

    Args:
        titles: headers by way of scoring; columns without scores are left out.
    """
    keys = [key for key in titles if any(score[key] for score in scores.values())]
    rows = [[name, *(percent(score[key]) for key in keys)] for name, score in scores.items()]
    return Table(["features", *(titles[key] for key in keys)], rows)


def daisy_features(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images feat"]:
    """Returns the mean and the standard deviation over each picture of its ``dense-daisy`` features."""
    extractor = DaisyExtractor(DaisyConfig(), device=torch.device("cpu"))
    features = (extractor.extract([image])[0].flatten(0, 1) for image in images)
    return torch.stack([torch.cat([rows.mean(dim=0), rows.std(dim=0)]) for rows in features])


@torch.inference_mode()
def imagenet_features(path: Path, images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images feat"]:
    """Returns the mean of the last feature map of EfficientNet-lite0 with ImageNet weights.

    Args:
        path: State dict with timm's names, or with other names in timm's order.

    Raises:
        ConfigError: The file holds another network.
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
            f"{path} is not EfficientNet-lite0 ({reason_of(error)}): give --imagenet its state dict, such as timm's."
        ) from error
    network.eval()
    features = []
    for start in range(0, len(images), _BATCH):
        batch = torch.from_numpy(images[start : start + _BATCH].copy()).permute(0, 3, 1, 2).float()
        features.append(network.forward_features((batch - 127) / 128).mean(dim=(2, 3)))
    return torch.cat(features)


def evaluate(
    data: LabelledImages,
    weights: Path,
    seeds: int,
    *,
    imagenet: Path | None = None,
    fine_tune_passes: int = 0,
    done: Callable[[], None] = lambda: None,
) -> Scores:
    """Scores pre-trained weights, random weights, colour histograms and DAISY on the same halves of the data.

    ResNets are scored by the features of the last stage and of all stages.

    Args:
        seeds: Number of splits, and of random networks, 1 to 10.
        imagenet: Weights of EfficientNet-lite0 to score, too.
        fine_tune_passes: Passes over the first half with labels, from pre-trained and from random weights; 0 for none.
        done: Called after each split of each kind of feature.
    """
    backbone, architecture = open_backbone(weights)

    def random_backbone(seed: int) -> Network:
        torch.manual_seed(derive_seed(seed, "random backbone"))
        return make_backbone(architecture, data.images.shape[1])

    fixed = {
        "pre-trained": network_features(backbone, data.images),
        "colour histograms": {"": color_histograms(data.images)},
        "DAISY": {"": daisy_features(data.images)},
    }
    if imagenet is not None:
        fixed["ImageNet (EfficientNet-lite0)"] = {"": imagenet_features(imagenet, data.images)}
    scores: Scores = {}
    for name in ("pre-trained", "random weights", *list(fixed)[1:]):
        for seed in range(seeds):
            train, test = split_classes(data.labels, seed)
            truth = data.labels[test]
            features = fixed[name] if name in fixed else network_features(random_backbone(seed), data.images)
            for stages, rows in features.items():
                score = scores.setdefault(name + stages, {"knn": [], "linear": [], "fine_tuned": []})
                for key, classify in (("knn", nearest_neighbours), ("linear", linear_probe)):
                    score[key].append(accuracy(classify(rows[train], data.labels[train], rows[test]), truth))
            if fine_tune_passes and name in ("pre-trained", "random weights"):
                network = open_backbone(weights)[0] if name in fixed else random_backbone(seed)
                head = partial(nn.Linear, network.dim, len(data.classes))
                predicted = fine_tune(network, head, data.images, data.labels, train, test, fine_tune_passes, seed)
                scores[name]["fine_tuned"].append(accuracy(predicted, truth))
            done()
    return scores


def fine_tune(
    network: nn.Module,
    head: Callable[[], nn.Module],
    images: UInt8[np.ndarray, "images side side 3"],
    labels: Int[Tensor, "images *size"],
    train: Int[Tensor, "train"],
    test: Int[Tensor, "test"],
    passes: int,
    seed: int,
) -> Int[Tensor, "test *size"]:
    """Trains a whole network on `train` and returns the classes of `test`, or of its pixels.

    AdamW, learning rate 1e-3 falling to 0 along half a cosine, random flips of both axes, batches of 32 (pixels: 8).

    Args:
        labels: Class of each picture or of each pixel; −1 is ignored.
    """
    torch.manual_seed(derive_seed(seed, "fine-tuning"))
    dense = labels.ndim > 1
    batch_size = 8 if dense else 32
    model = nn.Sequential(network, head())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    batches = [torch.randperm(len(train)).split(batch_size) for _ in range(passes)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(map(len, batches)))
    model.train()
    # Batch norm has no statistics of a single picture whose last feature map is a single pixel.
    for chosen in (part for order in batches for part in order if len(part) > 1):
        batch, target = normalize_images(images[train[chosen].numpy()]), labels[train[chosen]]
        flips = [axis for axis in (2, 3) if torch.rand(()) < 0.5]
        if dense:
            target = target.flip([axis - 1 for axis in flips])
        optimizer.zero_grad()
        functional.cross_entropy(model(batch.flip(flips)), target, ignore_index=-1).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.inference_mode():
        parts = test.split(8 if dense else _BATCH)
        return torch.cat([model(normalize_images(images[part.numpy()])).argmax(dim=1) for part in parts])


def normalize_images(images: UInt8[np.ndarray, "images side side 3"]) -> Float[Tensor, "images 3 side side"]:
    """Returns the input of a backbone: pictures normalised by ImageNet's mean and standard deviation."""
    return normalise(torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255, IMAGENET_MEAN, IMAGENET_STD)


def accuracy(predicted: Int[Tensor, "images"], labels: Int[Tensor, "images"]) -> float:
    """Returns the share of correct predictions, 0 to 1."""
    return float((predicted == labels).float().mean())
