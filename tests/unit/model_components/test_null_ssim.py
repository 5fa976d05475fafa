"""The memory of SSIM without values."""

import pytest
import torch

from f3rm_ext.memory.shapes import shapes_only
from f3rm_ext.memory.trace import AllocationTracker, BlockedConvolutions
from f3rm_ext.model_components import masks


def test_ssim_without_values_takes_what_torchmetrics_takes() -> None:
    peaks = []
    one, two = torch.rand(300, 400, 3), torch.rand(300, 400, 3)
    masks.ssim(one, two)  # imports
    with AllocationTracker() as tracker, BlockedConvolutions():
        masks.ssim(one, two)
    peaks.append(sum(tracker.peak.values()))
    with shapes_only(), AllocationTracker() as tracker, BlockedConvolutions():
        one, two = torch.empty(300, 400, 3), torch.empty(300, 400, 3)
        tracker.reset_peak()
        masks.ssim(one, two)
    peaks.append(sum(tracker.peak.values()))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
