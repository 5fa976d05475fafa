"""The photometric loss on the CPU: SSIM, mean difference and their gradient by numba kernels.

They must agree with the definition, :func:`f3rm_ext.splat.losses.photometric_loss`. A row holds its colours side by
side, so that a shift by a pixel is one by three numbers.
"""

from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.memory.shapes import run_kernel
from f3rm_ext.splat.losses import SIGMA_PX, WINDOW_PX

FLAGS = {"contract", "reassoc", "nsz"}
"""Fast-math flags that keep NaN, infinity and division."""
C1, C2 = np.float32(0.01**2), np.float32(0.03**2)
"""Constants of SSIM for values from 0 to 1."""
MOMENTS, SLOPES = 5, 3


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _slopes(one, two, window, factor, slopes, parts):
    """Writes the part of 1 − SSIM in the loss by rows of windows, and the slopes of SSIM by mean, square and product,
    spread along rows."""
    rows, width, size = slopes.shape[0], one.shape[1], window.size
    inner = width - 3 * (size - 1)
    two_ = np.float32(2.0)
    for i in numba.prange(rows):
        down = np.zeros((MOMENTS, width), np.float32)
        for k in range(size):
            share = window[k]
            for q in range(width):
                a, b = one[i + k, q], two[i + k, q]
                down[0, q] += share * a
                down[1, q] += share * b
                down[2, q] += share * a * a
                down[3, q] += share * b * b
                down[4, q] += share * a * b
        moments = np.zeros((MOMENTS, inner), np.float32)
        for m in range(MOMENTS):
            for k in range(size):
                share, shift = window[k], 3 * k
                for q in range(inner):
                    moments[m, q] += share * down[m, q + shift]
        by_window = np.empty((SLOPES, inner), np.float32)
        total = 0.0
        for q in range(inner):
            a, b = moments[0, q], moments[1, q]
            squares, spread = a * a + b * b + C1, moments[2, q] - a * a + moments[3, q] - b * b + C2
            light = (two_ * a * b + C1) / squares
            structure = (two_ * (moments[4, q] - a * b) + C2) / spread
            total += np.float32(1.0) - light * structure
            product, square = two_ * light / spread, -light * structure / spread
            # By the mean, the mean square and the mean product of the window; variances depend on the mean as well.
            by_window[0, q] = structure * two_ * (b - a * light) / squares - product * b - two_ * square * a
            by_window[1, q] = two_ * square
            by_window[2, q] = product
        parts[i] = factor * total
        for m in range(SLOPES):
            for q in range(width):
                slopes[i, m, q] = np.float32(0.0)
            for k in range(size):
                share, shift = window[k], 3 * k
                for q in range(inner):
                    slopes[i, m, q + shift] += share * by_window[m, q]


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _gradient(one, two, window, slopes, ssim_factor, l1_factor, gradient, parts):
    """Writes the part of absolute differences in the loss of each row, and the gradient of the loss."""
    height, width, rows, size = one.shape[0], one.shape[1], slopes.shape[0], window.size
    zero = np.float32(0.0)
    for i in numba.prange(height):
        up = np.zeros((SLOPES, width), np.float32)
        for k in range(size):
            row, share = i - k, window[k]
            if 0 <= row < rows:
                for m in range(SLOPES):
                    for q in range(width):
                        up[m, q] += share * slopes[row, m, q]
        total = 0.0
        for q in range(width):
            a, b = one[i, q], two[i, q]
            difference = a - b
            total += abs(difference)
            # Neither greater nor less is 0, and NaN, which has to stay NaN.
            sign = l1_factor if difference > zero else (-l1_factor if difference < zero else difference * zero)
            gradient[i, q] = sign - ssim_factor * (up[0, q] + a * up[1, q] + b * up[2, q])
        parts[i] = l1_factor * total


def compare_pictures(
    predicted: Float[Tensor, "h w 3"],
    truth: Float[Tensor, "h w 3"],
    ssim_weight: float,
    has_ssim: bool,
    gradient: Float[Tensor, "h w 3"],
) -> Float[Tensor, " parts"]:
    """Returns parts of the loss, and writes its gradient by the first picture."""
    h, w, _ = predicted.shape
    places = np.arange(WINDOW_PX if has_ssim else 0) - WINDOW_PX // 2
    window = np.exp(-(places**2) / (2 * SIGMA_PX**2))
    window = (window / window.sum()).astype(np.float32)
    size = len(window)
    rows, windows = (h - size + 1, 3 * (h - size + 1) * (w - size + 1)) if size else (0, 1)
    flat = predicted.reshape(h, 3 * w), truth.reshape(h, 3 * w)
    slopes, parts = predicted.new_empty(rows, SLOPES, 3 * w), torch.zeros(rows + h, dtype=torch.float64)
    factors = np.float32(ssim_weight / windows), np.float32((1 - ssim_weight) / (3 * h * w))
    if size:
        run_kernel(_slopes, *flat, window, factors[0], slopes, parts[:rows])
    run_kernel(_gradient, *flat, window, slopes, *factors, gradient.view(h, 3 * w), parts[rows:])
    return parts
