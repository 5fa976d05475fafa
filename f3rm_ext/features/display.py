"""A fixed projection of features to RGB: the first three principal components of the training images' patches."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.features.store.feature_store import FeatureStore
from f3rm_ext.utils.atomic_files import write_atomic

PATCHES = 20_000
_QUANTILES = (0.01, 0.99)
_MAX_FIT = 1_000_000


def fixed_signs(rows: Float[Tensor, "k feat"]) -> Float[Tensor, "k feat"]:
    """Flips directions so that the largest entry of each is positive. Eigenvectors have arbitrary signs.

    >>> fixed_signs(torch.tensor([[0.6, -0.8], [0.0, 1.0]])).tolist()
    [[-0.6000000238418579, 0.800000011920929], [0.0, 1.0]]
    """
    largest = rows.abs().argmax(dim=1, keepdim=True)
    return rows * torch.where(rows.gather(1, largest) < 0, -1.0, 1.0).to(rows)


def sample_patches(store: FeatureStore, keys: Sequence[str], count: int = PATCHES) -> Float[Tensor, "patches feat"]:
    """Draws about ``count`` patches at random, the same number from each image and the same ones every time."""
    unique = sorted(set(keys))
    # Open at most about 1000 images.
    unique = unique[:: max(1, len(unique) // 1000)]
    share = max(1, -(-count // len(unique)))
    parts = []
    for number, key in enumerate(unique):
        flat = store.load(key).values.reshape(-1, store.dim)
        take = np.random.default_rng(number).permutation(len(flat))[:share]
        parts.append(torch.from_numpy(flat[np.sort(take)].astype(np.float32)))
    return torch.cat(parts)


def fit_display(patches: Float[Tensor, "patches feat"]) -> DisplayBasis:
    """Fits a centred PCA with three components, each shown from its 1 % to its 99 % quantile.

    Features that do not vary are shown as mid-grey, because no range has zero width.
    """
    patches = patches.float()
    mean = patches.mean(0)
    centred = (patches - mean)[:_MAX_FIT]
    covariance = (centred.T @ centred).double() / max(1, len(centred))
    _, vectors = torch.linalg.eigh(covariance)
    components = torch.zeros(3, patches.shape[1])
    top = min(3, patches.shape[1])
    components[:top] = fixed_signs(vectors.flip(1).T[:top].float())
    projected = centred @ components.T
    low, high = torch.quantile(projected, torch.tensor(_QUANTILES), dim=0).unbind(0)
    # A range below the rounding error of fp16 features is noise.
    scale = patches.abs().amax().clamp_min(1e-6) * 2**-10
    flat = high - low < scale
    low, high = torch.where(flat, low - scale, low), torch.where(flat, high + scale, high)
    return DisplayBasis(mean=mean, components=components, low=low, high=high)


def save_display(path: Path, basis: DisplayBasis) -> None:
    """Writes a basis as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({name: value.tolist() for name, value in vars(basis).items()}).encode())


def load_display(path: Path, dim: int) -> DisplayBasis | None:
    """Reads a basis; returns None if there is none or it is unusable, so that it is made again."""
    try:
        raw = json.loads(path.read_bytes())
        tensors = {name: torch.tensor(raw[name], dtype=torch.float32) for name in ("mean", "components", "low", "high")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"mean": (dim,), "components": (3, dim), "low": (3,), "high": (3,)}:
        return None
    if not all(tensor.isfinite().all() for tensor in tensors.values()) or (tensors["high"] <= tensors["low"]).any():
        return None
    return DisplayBasis(**tensors)
