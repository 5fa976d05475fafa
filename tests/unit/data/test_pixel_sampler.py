"""Packing and sampling pixels."""

import numpy as np
import pytest
import torch

from f3rm_ext.data.pixel_sampler import ImagePixels, PackedPixels, PixelDraw, PixelSetBuilder, batch_seed, to_colors
from f3rm_ext.errors import CaptureError


def image(number: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    pixels = torch.full((height, width, channels), 100, dtype=torch.uint8)
    pixels[..., 0] = number
    pixels[..., 1] = torch.arange(height)[:, None]
    pixels[..., 2] = torch.arange(width)[None, :]
    return pixels


def draw(packed: PackedPixels, rays: int, seed: int = 0) -> PixelDraw:
    return packed.draw(rays, torch.Generator().manual_seed(seed))


def colors(packed: PackedPixels, drawn: PixelDraw) -> torch.Tensor:
    return to_colors(packed.pixels[drawn.places])


def test_indices_and_colors_belong_together_for_images_of_any_size():
    sizes = [(3, 5), (8, 2), (1, 1), (4, 9)]
    numbers = [11, 4, 7, 30]
    packed = PackedPixels.pack(numbers, [ImagePixels(image(n, *size)) for n, size in zip(numbers, sizes, strict=True)])
    assert packed.pixels.dtype == torch.uint8 and packed.num_pixels == sum(h * w for h, w in sizes)
    drawn = draw(packed, 4000)
    found = colors(packed, drawn)
    torch.testing.assert_close(drawn.indices, (found * 255).round().long())
    torch.testing.assert_close(torch.tensor(numbers)[drawn.slots], drawn.indices[:, 0])
    assert found.dtype == torch.float32 and float(found.max()) <= 1


def test_all_pixels_of_the_window_are_equally_likely():
    packed = PackedPixels.pack([0, 1], [ImagePixels(image(0, 2, 2)), ImagePixels(image(1, 4, 8))])
    rays = 36_000
    index = draw(packed, rays).indices
    flat = torch.where(index[:, 0] == 0, index[:, 1] * 2 + index[:, 2], 4 + index[:, 1] * 8 + index[:, 2])
    counts = torch.bincount(flat, minlength=36).double()
    expected = rays / 36
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(counts) == 36 and chi_square < 66  # 99.9 % quantile of 35 degrees of freedom


def test_alpha_is_kept_and_others_become_opaque():
    packed = PackedPixels.pack([0, 1], [ImagePixels(image(0, 2, 2)), ImagePixels(image(1, 2, 2, channels=4))])
    drawn = draw(packed, 200)
    alpha = colors(packed, drawn)[:, 3]
    assert (alpha[drawn.slots == 0] == 1).all()
    torch.testing.assert_close(alpha[drawn.slots == 1], torch.full_like(alpha[drawn.slots == 1], 100 / 255))


def test_masked_pixels_are_never_drawn_and_all_others_are():
    keep = torch.zeros(6, 7, dtype=torch.bool)
    keep[2:4, 1:5] = True
    packed = PackedPixels.pack([0, 1], [ImagePixels(image(0, 6, 7), keep), ImagePixels(image(1, 2, 3))])
    assert packed.num_pixels == 8 + 6
    drawn = draw(packed, 2000)
    first = drawn.indices[drawn.indices[:, 0] == 0]
    assert keep[first[:, 1], first[:, 2]].all()
    assert len(torch.unique(drawn.indices, dim=0)) == 14


def test_masks_that_leave_nothing_are_an_error():
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    with pytest.raises(CaptureError, match="leave no pixel"):
        PackedPixels.pack([0], [ImagePixels(image(0, 2, 2), nothing)])


def test_the_generator_decides():
    packed = PackedPixels.pack([0], [ImagePixels(image(0, 20, 20))])
    torch.manual_seed(0)
    first = draw(packed, 50, seed=1)
    torch.manual_seed(5)
    torch.testing.assert_close(draw(packed, 50, seed=1).indices, first.indices)
    assert not torch.equal(draw(packed, 50, seed=2).indices, first.indices)


def test_batch_seeds_differ_and_are_stable():
    seeds = {
        batch_seed(seed, split, rank, number)
        for seed in (0, 1)
        for split in ("train", "eval")
        for rank in range(2)
        for number in range(50)
    }
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert batch_seed(1, "train", 0, 7) == batch_seed(1, "train", 0, 7) != batch_seed(1, "train", 0, 8)
    assert len(np.unique([seed & 0xFFFFFFFF for seed in seeds])) == 400, "torch's CPU generator takes 32 bits"


def test_colors_are_the_same_numbers_as_by_division():
    pixels = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 3)
    assert torch.equal(to_colors(pixels), pixels.float() / 255.0)


def test_few_rays_go_to_what_is_empty():
    """Nine tenths of the pixels are empty, but an object needs the rays."""
    empty = torch.arange(100)[None, :].repeat(10, 1) >= 10
    image = ImagePixels(torch.zeros(10, 100, 4, dtype=torch.uint8), empty=empty)
    columns = draw(PackedPixels.pack([0, 1], [image, image]), 8000).indices[:, 2]
    assert float((columns >= 10).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert set(columns.tolist()) == set(range(100))
    assert draw(PackedPixels.pack([0], [image]), 50).indices.shape == (50, 3)


def test_a_small_empty_part_has_its_share_of_the_rays():
    empty = torch.arange(100)[None, :].repeat(10, 1) >= 90
    valid = torch.arange(100)[None, :].repeat(10, 1) < 95
    image = ImagePixels(torch.zeros(10, 100, 4, dtype=torch.uint8), valid=valid, empty=empty)
    columns = draw(PackedPixels.pack([0], [image]), 8000).indices[:, 2]
    assert int(columns.max()) == 94
    assert float((columns >= 90).float().mean()) == pytest.approx(5 / 95, abs=0.01)


def test_a_window_may_be_empty():
    image = ImagePixels(torch.zeros(2, 3, 4, dtype=torch.uint8), empty=torch.ones(2, 3, dtype=torch.bool))
    assert len(set(draw(PackedPixels.pack([0], [image]), 200).places.tolist())) == 6


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
