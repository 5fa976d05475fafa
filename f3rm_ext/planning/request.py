"""What is to be planned: a method with its options, the sizes of a capture, and a card."""

from dataclasses import dataclass

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.planning.allowances import CARD_SHARE
from f3rm_ext.planning.refinements import RefinementStart


@dataclass(frozen=True)
class CaptureSizes:
    """What a plan needs to know of a capture: sizes only, no pixels."""

    train_images: int
    """Number of training images."""
    eval_images: int
    """Number of evaluation images."""
    width_px: int
    """Width of the largest image as it is trained on."""
    height_px: int
    """Height of the largest image as it is trained on."""
    points: int = 0
    """Number of points that splats start from; 0 if the capture has none."""


@dataclass(frozen=True)
class Device:
    """Where a run is planned to be trained."""

    type: str
    """``"cuda"`` or ``"cpu"``."""
    memory_bytes: int
    """Memory of the card, or of the machine for the CPU, bytes."""
    name: str = ""
    """Name of the card, such as ``RTX 4090``; empty if only its memory was given."""

    @property
    def usable_bytes(self) -> int:
        """Memory that a run may be planned to take."""
        return self.memory_bytes if self.type == "cpu" else int(CARD_SHARE * self.memory_bytes)


@dataclass(frozen=True)
class PlanRequest:
    """A run to be planned."""

    config: F3rmTrainerConfig
    """The run as ``ns-train`` would start it with the same arguments."""
    capture: CaptureSizes
    """Sizes of its capture."""
    device: Device
    """Each of its devices."""
    processes: int = 1
    """Number of devices over all machines."""
    gaussians: int | None = None
    """Gaussians at the end of training, for splats; None: what the options and the capture suggest."""
    pictures: bool = True
    """Whether evaluation pictures and queries are planned too, not training steps only."""
    start: RefinementStart | None = None
    """What a refinement begins with, where its mesh, splats and capture are given; None: what the mesh alone tells."""
