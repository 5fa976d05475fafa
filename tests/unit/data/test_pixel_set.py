"""Sets of pixels as bits, beside lists of their members."""

import numpy as np
import pytest
import torch

from f3rm_ext.data.pixel_sampler import PixelSetBuilder


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
@pytest.mark.parametrize("pixels", [1, 7, 512, 513, 5000])
def test_members_are_those_of_a_list_in_a_fraction_of_its_memory(pixels, share):
    members = np.random.default_rng(pixels).random(pixels) < share
    members[pixels // 2 : pixels // 2 + 600 : 2] |= share > 0  # also a block with many of them
    expected = torch.from_numpy(np.flatnonzero(members))
    builder = PixelSetBuilder()
    for part in np.array_split(members, [pixels // 3, pixels // 3, pixels // 2 + 1]):
        builder.add(part)
    found = builder.finish()
    assert len(found) == len(expected)
    assert torch.equal(found.select(torch.arange(len(expected))), expected)
    assert found.bits.nbytes + found.before.nbytes <= pixels / 7 + 72
