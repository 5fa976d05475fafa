"""Renders an image in chunks of rays that shrink when memory runs out."""

from collections import defaultdict
from collections.abc import Callable

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.memory.shortage import is_out_of_memory

DEFAULT_CHUNK_CUDA, DEFAULT_CHUNK_CPU = 1 << 15, 1 << 12
MIN_CHUNK = 16
"""Smallest number of rays per chunk: if memory runs out at this size, smaller chunks would not help."""


def default_chunk(device: torch.device) -> int:
    """Returns the number of rays per chunk where the user gave none."""
    return DEFAULT_CHUNK_CPU if device.type == "cpu" else DEFAULT_CHUNK_CUDA


class ChunkedRenderer:
    """Applies a function of rays to an image, chunk by chunk, and remembers the chunk size that fitted.

    A size of 0 chooses by device at the first image.
    """

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk

    def render(
        self, rays: RayBundle, forward: Callable[[RayBundle], dict[str, Tensor | list]], device: torch.device
    ) -> dict[str, Tensor]:
        """Returns the outputs of all rays, each reshaped to (h, w, channels), on the device of the incoming rays.

        Everything that ``forward`` returns is kept in memory, so it should reduce features before it returns. When
        memory runs out, the chunk is halved, a message says so, and rendering continues at the same ray.

        Args:
            forward: maps a bundle of n rays to tensors of n rows; values of other types are dropped.

        Raises:
            RuntimeError: memory runs out even for the smallest chunk, 16 to 31 rays.
        """
        self.chunk = self.chunk or default_chunk(device)
        height, width = rays.origins.shape[:2]
        pieces: dict[str, list[Tensor]] = defaultdict(list)
        start, chunks = 0, 0
        while start < height * width:
            end = min(start + self.chunk, height * width)
            try:
                outputs = forward(rays.get_row_major_sliced_ray_bundle(start, end).to(device))
            except Exception as error:
                if not is_out_of_memory(error) or self.chunk // 2 < MIN_CHUNK:
                    raise
                self.chunk //= 2
                # The traceback would keep the tensors of the failed chunk alive.
                error.__traceback__ = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                CONSOLE.log(f"Out of memory: rendering continues with chunks of {self.chunk} rays.")
                continue
            for name, value in outputs.items():
                if isinstance(value, Tensor):
                    pieces[name].append(value.to(rays.origins.device))
            start, chunks = end, chunks + 1
        # An optional output that failed in a chunk has no complete image.
        return {
            name: torch.cat(parts).view(height, width, -1) for name, parts in pieces.items() if len(parts) == chunks
        }
