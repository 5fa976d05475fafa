"""Decides whether training images live on the training device, by the memory that is free there."""

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.profiling.memory import readable

SHARE = 0.25
"""Share of a device's free memory that images and features may take.

The rest is for gradients, moments and activations, which do not exist yet when the first batch is made.
"""


def fits(needed_bytes: int, free_bytes: int) -> bool:
    """Returns whether images fit on a device.

    >>> fits(0, 0), fits(6, 24), fits(7, 24)
    (True, True, False)
    """
    return needed_bytes <= SHARE * free_bytes


def free_memory(device: torch.device) -> int:
    """Returns the memory that a process can still allocate on a CUDA device, in bytes.

    What torch's allocator holds without using it counts as free.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class Placement:
    """Where the training images of a run are: on the training device while they fit, otherwise in main memory.

    Batches are the same in both places. Nothing is decided before the model is on the device. The log names ``off``,
    the option that keeps images in main memory.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        wanted: bool,
        off: str,
        what: str = "Training images",
        log: bool = True,
    ) -> None:
        self.device = device
        self.wanted = wanted
        self.on_device: bool | None = None
        """Whether they are there; None before :meth:`decide`."""
        self._off = off
        self._what = what
        self._log = log

    def decide(self, needed_bytes: int) -> bool:
        """Returns whether the images of a window belong on the device. The first call decides for the whole run."""
        if self.on_device is None:
            needed = readable(needed_bytes)
            if not self.wanted:
                self.on_device = False
                self._say(f"{needed} in main memory (--{self._off}), copied to the GPU batch by batch.")
            else:
                free = free_memory(self.device)
                self.on_device = fits(needed_bytes, free)
                if self.on_device:
                    self._say(f"{needed} on the GPU, within {SHARE:.0%} of its {readable(free)} of free memory.")
                else:
                    self._say(
                        f"{needed} in main memory, more than {SHARE:.0%} of the GPU's {readable(free)} of free "
                        "memory; copied there batch by batch."
                    )
        return self.on_device

    def has_room(self, needed_bytes: int) -> bool:
        """Returns whether the next window fits on the device now, beside the present one."""
        return bool(self.on_device) and fits(needed_bytes, free_memory(self.device))

    def give_up(self) -> None:
        """Keeps images in main memory from here on, because memory ran out while they were copied to the device."""
        self.on_device = False
        self._say("in main memory from here on, because the GPU's memory ran out; copied there batch by batch.")

    def _say(self, text: str) -> None:
        if self._log:
            CONSOLE.log(f"{self._what}: {text}", markup=False)
