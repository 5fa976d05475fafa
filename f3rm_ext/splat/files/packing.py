"""Packing of numbers into few bits, as the compact formats store them, and orders of Gaussians in files."""

import math

import numpy as np
import torch
from jaxtyping import Float, Int, UInt32
from torch import Tensor

from f3rm_ext.splat.files.checks import ALPHA_MARGIN
from f3rm_ext.splat.gaussians import Gaussians

_MORTON_BITS = 16


def pack_unorm(values: Float[np.ndarray, "*shape"], bits: int) -> UInt32[np.ndarray, "*shape"]:
    """Quantises numbers from 0 to 1 to integers of some bits, rounding to nearest; clamps other numbers.

    >>> pack_unorm(np.array([0.0, 0.5, 2.0]), 8).tolist()
    [0, 128, 255]
    """
    top = (1 << bits) - 1
    return np.clip(np.floor(values * top + 0.5), 0, top).astype(np.uint32)


def unpack_unorm(packed: UInt32[np.ndarray, "*shape"], shift: int, bits: int) -> Float[np.ndarray, "*shape"]:
    """Extracts numbers from 0 to 1 from some bits of integers, float64."""
    top = (1 << bits) - 1
    return ((packed >> np.uint32(shift)) & np.uint32(top)) / float(top)


def unit_quats(quats: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
    """Normalises quaternions; float64."""
    wide = quats.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def drop_largest(
    quats: Float[np.ndarray, "n 4"],
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, "n 3"]]:
    """Returns the three smallest components of unit quaternions, from which the largest follows.

    Args:
        quats: of length 1, with components in any order.

    Returns:
        Index of the (first) largest component, and the other components in order, each at most √½. The sign of the
        quaternion is chosen so that the largest component is positive.
    """
    largest = np.abs(quats).argmax(axis=1)
    rows = np.arange(len(quats))
    signed = np.where((quats[rows, largest] < 0)[:, None], -quats, quats)
    others = np.arange(4)[None, :] != largest[:, None]
    return largest, signed[others].reshape(-1, 3)


def insert_largest(largest: Int[np.ndarray, " n"], others: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 4"]:
    """Reverses :func:`drop_largest`."""
    quats = np.empty((len(others), 4))
    where = np.arange(4)[None, :] != largest[:, None]
    quats[where] = others.reshape(-1)
    quats[~where] = np.sqrt(np.maximum(0.0, 1.0 - (others**2).sum(axis=1)))
    return quats


def logits_to_alphas(opacities: Float[np.ndarray, "n 1"]) -> Float[np.ndarray, " n"]:
    """Returns opacities from 0 to 1 for logits, float64."""
    return torch.from_numpy(opacities[:, 0].astype(np.float64)).sigmoid().numpy()


def alphas_to_logits(alphas: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 1"]:
    """Returns finite logits for opacities that were stored in a byte; see :data:`ALPHA_MARGIN`."""
    limited = np.clip(alphas, ALPHA_MARGIN, 1 - ALPHA_MARGIN)
    return np.log(limited / (1 - limited)).astype(np.float32)[:, None]


def morton_order(gaussians: Gaussians) -> Int[Tensor, " gaussians"]:
    """Returns indices that sort Gaussians along a Z-order curve, which places near ones together."""
    means = gaussians.means.detach().double()
    low, high = means.amin(dim=0), means.amax(dim=0)
    top = (1 << _MORTON_BITS) - 1
    cells = ((means - low) / (high - low).clamp_min(1e-300) * top).long().clamp(0, top)
    code = torch.zeros(len(means), dtype=torch.long, device=means.device)
    for bit in range(_MORTON_BITS):
        for axis in range(3):
            code |= ((cells[:, axis] >> bit) & 1) << (3 * bit + axis)
    return torch.argsort(code, stable=True)


def importance(gaussians: Gaussians) -> Float[Tensor, " gaussians"]:
    """Returns the logarithm of the volume times the opacity, float64: large for large and opaque Gaussians."""
    log_volume = gaussians.scales.detach().double().sum(dim=1)
    return log_volume + torch.nn.functional.logsigmoid(gaussians.opacities.detach().double().squeeze(1))


def importance_order(gaussians: Gaussians) -> Int[Tensor, " gaussians"]:
    """Returns indices that sort large and opaque Gaussians first, for viewers that render while they load."""
    return torch.argsort(importance(gaussians), descending=True, stable=True)


HALF_DIAGONAL = math.sqrt(0.5)
"""Upper limit of the components of a unit quaternion except the largest."""
