"""Options of a plan, besides the command that is planned. Imports nothing slow, so that ``--help`` comes at once."""

from dataclasses import dataclass
from typing import Annotated

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Range, check_ranges


@dataclass(kw_only=True)
class PlanOptions:
    """The card to plan for, and sizes."""

    gpu: str | None = None
    """Part of the name of the card to plan for, such as 4090; by default the device of this machine."""
    vram_gib: Annotated[float, Range(0, 100_000, above=True)] | None = None
    """Memory of the card, GiB, above 0."""
    gaussians: Annotated[int, Range(1, 10**9)] | None = None
    """Number of Gaussians at the end of a splat run, 1 or more; by default its limit, or 3 million if it has none.
    Needed with --pipeline.model.start-from, except for a refinement."""
    images: Annotated[int, Range(1, 100_000)] | None = None
    """Number of training images, 1 or more; together with --width-px and --height-px in place of a capture."""
    width_px: Annotated[int, Range(1, 100_000)] | None = None
    """Width of the image files, px."""
    height_px: Annotated[int, Range(1, 100_000)] | None = None
    """Height of the image files, px."""
    points: Annotated[int, Range(0, 10**9)] = 0
    """Number of initial points for splats, with --images."""

    def __post_init__(self) -> None:
        by_hand = (self.images, self.width_px, self.height_px)
        if any(value is not None for value in by_hand) and None in by_hand:
            raise ConfigError("--images, --width-px and --height-px must be given together.")
        if self.points and self.images is None:
            raise ConfigError(
                "--points is the number of points of a capture that is given by --images, --width-px and --height-px: "
                "add these, or leave it out, since a capture given by --data tells its own."
            )
        check_ranges(self)

    @property
    def device_is_given(self) -> bool:
        """Whether the plan is for a given card, which this machine need not have."""
        return self.gpu is not None or self.vram_gib is not None
