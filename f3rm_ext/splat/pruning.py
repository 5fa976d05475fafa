"""Which Gaussians go first, so that what the training views show changes least."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.evidence import compare
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.sight import measure_sight
from f3rm_ext.splat.rendering import SplatScene

_ROUND = 0.1
"""Share of the Gaussians that goes before the others are measured anew."""
_MAX_VIEWS, _MAX_SIDE_PX = 200, 400
"""Views are measured at half their size and at most at this one; of more views, every second, third, ... is."""


class PruningOrder:
    """Gaussians in the order in which they go: first those without which the training views change least.

    The cost of a Gaussian is the sum of the squared changes of all colours of all views if it alone were missing: those
    behind it show more then. Gaussians that overlap stand in for each other, and cost little until one of them is
    gone. So the cheapest go in rounds, and each round measures the pictures of those that are left. Rounds are made
    when they are needed.

    Args:
        gaussians: all of them.
        scene: returns the scene of some of them.
        views: the training cameras.
        on_view: called after each view of a round, with the number of views of a round.
    """

    def __init__(
        self,
        gaussians: Gaussians,
        scene: Callable[[Gaussians], SplatScene],
        views: PinholeCameras,
        on_view: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._gaussians = gaussians
        self._scene = scene
        self._views = shrink(views.take(slice(None, None, math.ceil(len(views.widths) / _MAX_VIEWS))))
        self._on_view = on_view
        self._rest = torch.arange(len(gaussians))
        self._gone: list[Tensor] = []

    def last(self, count: int) -> Int[Tensor, " kept"]:
        """Returns the rows of those that go last, in the order in which they would go."""
        while len(self._rest) > count:
            cheapest = self.costs(self._rest).argsort()
            share = math.ceil(_ROUND * len(cheapest))
            self._gone.append(self._rest[cheapest[:share]])
            self._rest = self._rest[cheapest[share:].sort().values]
        return torch.cat([*self._gone, self._rest])[-count:]

    @torch.no_grad()
    def costs(self, rows: Int[Tensor, " left"]) -> Float[Tensor, " left"]:
        """Returns what each Gaussian costs where only some are left: sums of squared changes of colours."""
        scene = self._scene(self._gaussians[rows])
        shapes, on_cpu = scene.shapes().map(lambda value: value.detach().float().cpu()), self._views.to("cpu")
        total = torch.zeros(len(rows))
        for index in range(len(on_cpu.viewmats)):
            one = slice(index, index + 1)
            total += measure_sight(shapes, scene.camera(on_cpu.take(one)), compare(scene, self._views.take(one))).gains
            self._on_view(len(on_cpu.widths))
        return total


def shrink(views: PinholeCameras) -> PinholeCameras:
    """Returns the cameras with smaller pictures: costs of Gaussians are in nearly the same order, and a quarter of the
    time.
    """
    scales = (_MAX_SIDE_PX / torch.maximum(views.widths, views.heights)).clamp(max=0.5)
    Ks = views.Ks * torch.stack([scales, scales, torch.ones_like(scales)], dim=1)[..., None]
    widths, heights = ((side * scales).ceil().int() for side in (views.widths, views.heights))
    return PinholeCameras(views.viewmats, Ks, widths, heights)
