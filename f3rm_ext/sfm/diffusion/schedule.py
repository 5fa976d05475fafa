"""The published noise schedule, and sampling with it.

100 steps, β linear from 0.0120 down to 0.00085, √ᾱ rescaled so that the last step is pure noise (zero terminal SNR; Lin
et al. 2024, arXiv 2305.08891). The network predicts the clean map.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm.rays import CHANNELS, normalize_maps

if TYPE_CHECKING:
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

STEPS = 100
BETA_START, BETA_END = 0.0120, 0.00085
PUBLISHED_STOP = 10
"""Number of sampling steps after which the prediction is best, as published: 11 calls of the network."""
Maps = Float[Tensor, "batch images 8 rows cols"]
Predict = Callable[[Maps, Int64[Tensor, " batch"]], Maps]
"""Predicts clean maps from noisy ones and their step."""


def make_scheduler() -> "DDIMScheduler":
    """Returns the schedule as diffusers' DDIM scheduler, all 100 steps set. Raises ConfigError if diffusers is not
    installed."""
    try:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    except ImportError as error:
        raise ConfigError(
            "DiffusionSfM needs the package diffusers for its noise schedule: `pip install 'f3rm-ext[sfm]'`."
        ) from error
    scheduler = DDIMScheduler(
        num_train_timesteps=STEPS,
        beta_start=BETA_START,
        beta_end=BETA_END,
        beta_schedule="linear",
        rescale_betas_zero_snr=True,
        prediction_type="sample",
        clip_sample=False,
        timestep_spacing="leading",
    )
    scheduler.set_timesteps(STEPS)
    return scheduler


def add_noise(
    clean: Maps,
    noise: Maps,
    steps: Int64[Tensor, " batch"],
    known: Float[Tensor, "batch images rows cols"],
    alphas_bar: Float[Tensor, " steps"],
) -> Maps:
    """Returns √ᾱ · clean + √(1 - ᾱ) · noise, and 0 where the depth is not known."""
    alpha_bar = alphas_bar.to(clean.device)[steps].to(clean.dtype)[:, None, None, None, None]
    return (alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise) * known[:, :, None]


@torch.no_grad()
def sample(
    predict: Predict, shape: tuple[int, int, int, int], generator: torch.Generator, stop: int = PUBLISHED_STOP
) -> Maps:
    """Samples ray maps: the mean of DDIM's posterior at every step, without its noise, as published.

    Every 4-vector gets length 1 after every step. ᾱ of the last step is 0, so the first prediction sees pure noise, of
    which nothing is kept: sampling is a regression followed by refinements.

    Args:
        stop: number of steps, after which one more prediction is the result, 0 to 99.
    """
    scheduler = make_scheduler()
    batch, images, rows, cols = shape
    device = generator.device
    maps = torch.randn(batch, images, CHANNELS, rows, cols, generator=generator, device=device)
    for done, step in enumerate(scheduler.timesteps.tolist()):
        clean = predict(maps, torch.full((batch,), step, dtype=torch.long, device=device))
        if done == stop:
            return normalize_maps(clean)
        still = torch.zeros_like(maps)
        (after, *_) = scheduler.step(clean, step, maps, eta=1.0, variance_noise=still, return_dict=False)
        maps = normalize_maps(after)
    raise ValueError(f"stop is {stop}, but the schedule has {STEPS} steps")


def chunks_with_first(count: int, most: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Splits images into random groups that all begin with image 0, for a network that takes ``most`` at once.

    >>> chunks_with_first(3, 8)
    [[0, 1, 2]]
    >>> sorted(len(chunk) for chunk in chunks_with_first(10, 4))
    [4, 4, 4]
    """
    if count <= most:
        return [list(range(count))]
    order = (torch.randperm(count - 1, generator=generator) + 1).tolist()
    return [[0, *order[start : start + most - 1]] for start in range(0, count - 1, most - 1)]


def predict_in_chunks(predict: Callable[[Maps, Int64[Tensor, " batch"], list[int]], Maps], most: int) -> Predict:
    """Returns a prediction for any number of images from one for so many at most, 2 or more: image 0 is in every group,
    and is averaged."""
    generator = torch.Generator().manual_seed(0)  # of the groups, which are other ones at every step

    def predict_all(maps: Maps, steps: Int64[Tensor, " batch"]) -> Maps:
        result = torch.zeros_like(maps)
        chunks = chunks_with_first(maps.shape[1], most, generator)
        for chunk in chunks:
            part = predict(maps[:, chunk], steps, chunk)
            result[:, chunk[1:]] = part[:, 1:].to(result.dtype)
            result[:, 0] += part[:, 0].to(result.dtype) / len(chunks)
        return result

    return predict_all
