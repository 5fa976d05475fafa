"""Bilinear sampling at patch centres: the fast sampler agrees with the readable one, and both with known values."""

import numpy as np
import torch

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.sampling import PackedMaps, interpolate, sample_map

SIZES = ((1, 1, 20, 30), (3, 5, 48, 80), (7, 2, 99, 31), (1, 6, 16, 100), (4, 4, 56, 56))


def make_maps() -> list[FeatureMap]:
    rng = np.random.default_rng(0)
    return [
        FeatureMap(rng.normal(size=(rows, cols, 5)).astype(np.float16), PatchGrid.covering(rows, cols, height, width))
        for rows, cols, height, width in SIZES
    ]


def random_positions(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, and positions inside and (a little) outside of their images."""
    generator = torch.Generator().manual_seed(1)
    slot = torch.randint(0, len(SIZES), (count,), generator=generator)
    extent = torch.tensor([size[2:] for size in SIZES], dtype=torch.float32)[slot]
    yx = (torch.rand(count, 2, generator=generator) * 1.2 - 0.1) * extent
    return slot, yx


def test_fast_sampler_agrees_with_the_reference() -> None:
    maps = make_maps()
    slot, yx = random_positions(600)
    fast = PackedMaps.pack(maps).sample(slot, yx)
    assert fast.dtype == torch.float32
    for number, feature_map in enumerate(maps):
        mine = slot == number
        assert mine.any()
        expected = sample_map(feature_map, yx[mine].numpy())
        np.testing.assert_allclose(fast[mine].numpy(), expected, atol=2e-5)


def test_linear_functions_are_reproduced_between_centres() -> None:
    grid = PatchGrid(rows=6, cols=9, origin_px=(7.0, 3.5), stride_px=(14.0, 11.5))
    values = grid.centres_px() / 64
    packed = PackedMaps.pack([FeatureMap(values.astype(np.float16), grid)])
    yx = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([70.0, 92.0])
    yx = yx + torch.tensor(grid.origin_px)
    sampled = packed.sample(torch.zeros(200, dtype=torch.int64), yx)
    assert torch.allclose(sampled * 64, yx, atol=0.1)  # fp16 of values up to 1.6


def test_pixel_centres_are_at_one_half() -> None:
    """One patch per pixel: the centre of pixel (1, 2) gives exactly its patch."""
    values = np.arange(12, dtype=np.float16).reshape(3, 4, 1)
    packed = PackedMaps.pack([FeatureMap(values, PatchGrid.covering(3, 4, 3, 4))])
    sampled = packed.sample(torch.zeros(2, dtype=torch.int64), torch.tensor([[1.5, 2.5], [1.5, 3.0]]))
    assert sampled.squeeze(1).tolist() == [6.0, 6.5]


def test_packs_strided_views_without_changing_them() -> None:
    whole = np.random.default_rng(3).normal(size=(4, 3, 6)).astype(np.float16)
    view = FeatureMap(whole[..., :5], PatchGrid.covering(4, 3, 40, 30))
    packed = PackedMaps.pack([view, view])
    np.testing.assert_array_equal(packed.values[12:].numpy(), whole[..., :5].reshape(-1, 5))


def test_inputs_are_not_changed() -> None:
    packed = PackedMaps.pack(make_maps())
    slot, yx = random_positions(50)
    before = packed.values.clone(), slot.clone(), yx.clone()
    packed.sample(slot, yx)
    assert torch.equal(before[0], packed.values) and torch.equal(before[1], slot) and torch.equal(before[2], yx)


def test_patches_may_be_gathered_elsewhere():
    """Corners, gathering and interpolation one after another give the bits of the whole."""
    packed = PackedMaps.pack(make_maps())
    generator = torch.Generator().manual_seed(4)
    slot = torch.randint(len(SIZES), (60,), generator=generator)
    yx_px = torch.rand(60, 2, generator=generator) * 100
    patches, weights = packed.corners(slot, yx_px)
    assert patches.shape == weights.shape == (4, 60)
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(60))
    assert torch.equal(interpolate(zip(packed.values[patches], weights, strict=True)), packed.sample(slot, yx_px))
