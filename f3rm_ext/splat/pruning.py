"""Which Gaussians go first, so that what the training views show changes least."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.evidence import compare
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.sight import measure_sight
from f3rm_ext.splat.rendering import SplatScene

_ROUND = 0.1
"""Share of the Gaussians that goes before the others are measured anew."""
_VIEWS = 64
"""Most views of a round but the first: every second, third, ... of them, in turns."""
_MAX_SIDE_PX = 400
"""Views are measured at half their size, and at most at this one: the order is nearly the same, in a quarter of the
time."""


class PruningOrder:
    """Gaussians in the order in which they go: first those without which the training views change least.

    The cost of a Gaussian is the sum of the squared changes of all colours of all views if it alone were missing: those
    behind it show more then. Gaussians that overlap stand in for each other, and cost little until one of them is
    gone. So the cheapest go in rounds, and each round measures the pictures of those that are left: the first round all
    of them, the others some, beyond which a Gaussian keeps the cost that it had. Rounds are made when they are needed.

    Args:
        scene: returns the scene of some of them.
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
        longest_px = int(torch.maximum(views.widths, views.heights).max())
        self._views = views.shrink(min(longest_px // 2, _MAX_SIDE_PX))
        self._on_view = on_view
        self._costs = torch.zeros(len(gaussians))
        self._rest = torch.arange(len(gaussians))
        self._gone: list[Tensor] = []

    def last(self, count: int) -> Int[Tensor, " kept"]:
        """Returns the rows of those that go last, in the order in which they would go."""
        while len(self._rest) > count:
            self._measure()
            cheapest = self._costs[self._rest].argsort()
            share = math.ceil(_ROUND * len(cheapest))
            self._gone.append(self._rest[cheapest[:share]])
            self._rest = self._rest[cheapest[share:].sort().values]
        return torch.cat([*self._gone, self._rest])[-count:]

    def _measure(self) -> None:
        """Measures what those that are left cost now."""
        count, number = len(self._views.widths), len(self._gone)
        step = math.ceil(count / _VIEWS) if number else 1
        views = self._views.take(slice(number % step, None, step))
        costs, shown = self.costs(self._rest, views)
        self._costs[self._rest[shown]] = costs[shown] * count / len(views.widths)

    @torch.no_grad()
    def costs(
        self, rows: Int[Tensor, " left"], views: PinholeCameras
    ) -> tuple[Float[Tensor, " left"], Bool[Tensor, " left"]]:
        """Returns what each Gaussian costs where only some are left: the sum of squared changes of all colours of the
        views, and whether a view shows it."""
        scene = self._scene(self._gaussians[rows])
        shapes, on_cpu = scene.shapes().map(lambda value: value.detach().float().cpu()), views.to("cpu")
        total, shown = torch.zeros(len(rows)), torch.zeros(len(rows), dtype=torch.bool)
        for index in range(len(on_cpu.widths)):
            one = slice(index, index + 1)
            sight = measure_sight(shapes, scene.camera(on_cpu.take(one)), compare(scene, views.take(one)))
            total += sight.gains
            shown |= sight.contributions > 0
            self._on_view(len(on_cpu.widths))
        return total, shown
