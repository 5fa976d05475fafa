"""The depth loss of a field in training: it draws light to where stereo finds surfaces, less and less."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from nerfstudio.cameras.rays import RaySamples
from torch import Tensor

from f3rm_ext.data.stereo.surfaces import RayDepths
from f3rm_ext.nerf.losses import depth_loss


class DepthSupervision:
    """Weight and targets of the depth loss; stereo is asked at the first step that needs it.

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
