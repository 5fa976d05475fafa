"""The published schedule and sampling."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from f3rm_ext.sfm.diffusion import schedule
from f3rm_ext.sfm.rays import normalize_maps


def test_the_schedule_is_the_published_one() -> None:
    alphas_bar = schedule.make_scheduler().alphas_cumprod
    published = {0: 0.988, 9: 0.655, 19: 0.400, 29: 0.233, 49: 0.0638, 69: 0.0103, 89: 3.3e-4, 99: 0.0}
    for step, value in published.items():
        assert float(alphas_bar[step]) == pytest.approx(value, rel=5e-3, abs=1e-7), step


def test_noise_hides_the_map_at_the_last_step_only() -> None:
    clean, noise = torch.ones(2, 1, 8, 2, 2), torch.full((2, 1, 8, 2, 2), -1.0)
    known = torch.tensor([[[[1.0, 0], [1, 1]]]]).expand(2, 1, 2, 2)
    noisy = schedule.add_noise(clean, noise, torch.tensor([0, 99]), known, schedule.make_scheduler().alphas_cumprod)
    assert (noisy[:, :, :, 0, 1] == 0).all() and (noisy[1, 0, 0, 1] == -1).all() and noisy[0, 0, 0, 0, 0] > 0.8


def test_sampling_follows_the_published_recursion() -> None:
    """Written down from the formula: x' = √ᾱ' x̂ + √(1 - ᾱ' - σ²) ε̂, no noise added, vectors of length 1."""
    alphas_bar = schedule.make_scheduler().alphas_cumprod.double()
    target = normalize_maps(torch.randn(1, 2, 8, 3, 3, generator=torch.Generator().manual_seed(5)))
    calls: list[int] = []

    def predict(maps: Tensor, steps: Tensor) -> Tensor:
        calls.append(int(steps[0]))
        return target + 0.1 * maps

    made = schedule.sample(predict, (1, 2, 3, 3), torch.Generator().manual_seed(0), stop=10)
    assert calls == list(range(99, 88, -1))
    x = torch.randn(1, 2, 8, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    for step in range(99, 89, -1):
        now, after = alphas_bar[step], alphas_bar[step - 1]
        clean = target.double() + 0.1 * x
        epsilon = (x - now.sqrt() * clean) / (1 - now).sqrt()
        variance = (1 - after) / (1 - now) * (1 - now / after)
        x = normalize_maps(after.sqrt() * clean + (1 - after - variance).clamp_min(0).sqrt() * epsilon)
    torch.testing.assert_close(made.double(), normalize_maps(target.double() + 0.1 * x), atol=1e-4, rtol=0)


def test_many_images_go_in_groups_with_the_first() -> None:
    chunks = schedule.chunks_with_first(20, 8, torch.Generator().manual_seed(0))
    assert all(chunk[0] == 0 and len(chunk) <= 8 for chunk in chunks)
    assert sorted(index for chunk in chunks for index in chunk[1:]) == list(range(1, 20))

    def predict(maps: Tensor, steps: Tensor, chosen: list[int]) -> Tensor:
        return maps + len(chosen)

    maps = torch.arange(12.0)[None, :, None, None, None].expand(1, 12, 8, 1, 1)
    made = schedule.predict_in_chunks(predict, 8)(maps, torch.zeros(1, dtype=torch.long))
    # Eleven others: 7 in a group of 8 and 4 in a group of 5; image 0 is in both.
    assert made[0, 0, 0, 0, 0] == (8 + 5) / 2
    assert sorted((made - maps)[0, 1:, 0, 0, 0].tolist()) == [5.0] * 4 + [8.0] * 7
