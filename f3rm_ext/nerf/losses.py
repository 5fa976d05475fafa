"""Losses on rendered features and on the density along rays, and the samples at which features are rendered."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.rays import RaySamples
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.stereo.surfaces import RayDepths

FeatureLoss = Literal["mse", "cosine", "huber"]

HUBER_DELTA = 1.25
"""Error above which the Huber loss is linear (LERF's value)."""
NEAR_SURFACE = 0.1
"""Distance to a surface, as a share of its distance from the camera, within which light counts as coming from it."""


def feature_loss(
    predicted: Float[Tensor, "rays feat"], target: Float[Tensor, "rays feat"], kind: FeatureLoss
) -> Float[Tensor, ""]:
    """Returns the distance between rendered and 2D features, computed in float32.

    Args:
        predicted: rendered features, not normalised.
        target: features of the image at the rays' pixels, not normalised.
        kind: ``mse`` (as F3RM, mean over rays and dimensions), ``cosine`` (1 − cosine similarity, mean over rays) or
            ``huber`` (mean over rays and dimensions; LERF sums over dimensions). Below its limit, which features of
            length 1 do not reach, it is half of ``mse``.
    """
    predicted, target = predicted.float(), target.float()
    if kind == "mse":
        return functional.mse_loss(predicted, target)
    if kind == "cosine":
        return (1.0 - cosine(predicted, target)).mean()
    return functional.huber_loss(predicted, target, delta=HUBER_DELTA)


def depth_loss(
    weights: Float[Tensor, "rays samples"], middles: Float[Tensor, "rays samples"], surfaces: Float[Tensor, " rays"]
) -> Float[Tensor, ""]:
    """Returns the share of the light that does not come from near a known surface, mean over all rays; 0 on rays
    without one.

    Depth-supervised NeRF (Deng et al., 2022) takes the logarithm of the weights instead. This is linear in them, so
    that surfaces that stereo puts in a wrong place pull no harder than others.

    Args:
        surfaces: distances of the surfaces; 0 where that is unknown.

    >>> depth_loss(torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 2.0]]), torch.tensor([2.1]))
    tensor(0.7500)
    """
    near = (middles - surfaces[:, None]).abs() < NEAR_SURFACE * surfaces[:, None]
    return ((1 - (weights * near).sum(dim=1)) * (surfaces > 0)).mean()


class DepthSupervision:
    """Weight and targets of the depth loss in training; stereo is asked at the first step that needs it.

    Args:
        measure: finds where training rays meet a surface; None turns the loss off.
        mult: weight at step 0.
        steps: after which the weight is 0.
    """

    def __init__(self, measure: Callable[[], RayDepths | None] | None, mult: float, steps: int) -> None:
        self._measure, self._mult, self._steps = measure if mult else None, mult, steps
        self.weight = 0.0
        self.depths: RayDepths | None = None

    def begin_step(self, step: int, device: torch.device) -> None:
        """Sets the weight of a step, and asks stereo if that is still to be done."""
        self.weight = self._mult * max(0.0, 1 - step / self._steps)
        if not self.weight:
            self.depths = self._measure = None
        elif self._measure is not None:
            depths, self._measure = self._measure(), None
            self.depths = None if depths is None else depths.to(device)

    def losses(self, weights: Float[Tensor, "rays samples 1"], samples: RaySamples) -> Mapping[str, Tensor]:
        """Returns the weighted loss by its name; nothing where it is off."""
        if self.depths is None:
            return {}
        assert samples.camera_indices is not None
        frustums = samples.frustums
        surfaces = self.depths.along(samples.camera_indices[:, 0, 0], frustums.directions[:, 0])
        middles = ((frustums.starts + frustums.ends) / 2)[..., 0]
        return {"depth_loss": self.weight * depth_loss(weights[..., 0], middles, surfaces)}


def distortion_loss(weights: Float[Tensor, "rays samples"], edges: Float[Tensor, "rays edges"]) -> Float[Tensor, ""]:
    """Returns how far the weights along rays are spread, mean over rays (mip-NeRF 360, eq. 15).

    Midpoints ascend along a ray, so that sums over pairs Σⱼ wⱼ |mᵢ − mⱼ| are differences of cumulative sums: time and
    memory grow with the samples instead of their square.

    Args:
        edges: ascending ends of the samples, one more than there are samples; no gradient flows to them.

    >>> distortion_loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 0.5, 1.0]]))
    tensor(0.3333)
    """
    with torch.no_grad():
        middles, widths = (edges[:, 1:] + edges[:, :-1]) / 2, edges[:, 1:] - edges[:, :-1]
        moments = weights * middles
        sums, moment_sums = weights.cumsum(-1), moments.cumsum(-1)
        apart = middles * (2 * sums - weights - sums[:, -1:]) - (2 * moment_sums - moments - moment_sums[:, -1:])
        slopes = 2 * (apart + weights * widths / 3)
    # The loss is quadratic in the weights, half of their product with its slopes. Only the value is halved here, since
    # the slopes are constants and the gradient of the product is already that of the loss.
    doubled = (weights * slopes).sum(-1).mean()
    return doubled - doubled.detach() / 2


def feature_pairs(
    rendered: Mapping[str, Float[Tensor, "rays feat"]],
    targets: Mapping[str, Float[Tensor, "rays feat"]],
    kept: Bool[Tensor, "rays 1"] | None = None,
) -> Iterator[tuple[str, Float[Tensor, "pairs feat"], Float[Tensor, "pairs feat"]]]:
    """Yields (head, rendered, target) over the rays that have both, float32 targets on the device of the rendering.

    Args:
        rendered: features by head, for the first rays of a batch.
        targets: 2D features by head, for the first rays of the same batch.
        kept: False for rays through masked pixels, which have no features; heads without a kept ray are left out.
    """
    for name in rendered:
        if name not in targets:
            continue
        count = min(len(rendered[name]), len(targets[name]))
        some, truth = rendered[name][:count], targets[name][:count].to(rendered[name].device, torch.float32)
        if kept is not None:
            some, truth = some[kept[:count, 0]], truth[kept[:count, 0]]
        if len(some):
            yield name, some, truth


def cosine(a: Float[Tensor, "*batch feat"], b: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch"]:
    """Returns the cosine similarity over the last dimension, in float32; 0 where a vector is zero.

    >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[4.0, 3.0], [1.0, 0.0]]))
    tensor([0.9600, 0.0000])
    """
    return functional.cosine_similarity(a.float(), b.float(), dim=-1, eps=1e-8)


def heaviest_samples(
    weights: Float[Tensor, "rays samples 1"], positions: Float[Tensor, "rays samples 3"], count: int
) -> tuple[Float[Tensor, "rays kept 1"], Float[Tensor, "rays kept 3"]]:
    """Returns the samples of each ray with the largest weights, rescaled so that the sum of weights stays the same.

    A trained ray has most of its weight in very few samples, so features rendered there alone lose little. Rescaling
    preserves the magnitude of what is rendered.

    Args:
        weights: volume-rendering weights, ≥ 0.
        count: samples to keep per ray, ≥ 1; if there are no more than that, all are kept unchanged.

    >>> weights, positions = torch.tensor([[[0.1], [0.3], [0.4]]]), torch.arange(9.0).view(1, 3, 3)
    >>> kept, at = heaviest_samples(weights, positions, count=1)
    >>> round(kept.item(), 3), at.tolist()
    (0.8, [[[6.0, 7.0, 8.0]]])
    """
    if count >= weights.shape[1]:
        return weights, positions
    kept, index = weights[..., 0].topk(count, dim=-1)
    scale = weights.sum(dim=1) / kept.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return (kept * scale)[..., None], positions.gather(1, index[..., None].expand(-1, -1, 3))
