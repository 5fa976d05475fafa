"""Rendering an image in chunks of rays that shrink when memory runs out."""

from collections import defaultdict
from collections.abc import Callable

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.engine.shortage import is_out_of_memory

DEFAULT_CHUNK_CUDA, DEFAULT_CHUNK_CPU = 1 << 15, 1 << 12
MIN_CHUNK = 16
"""Below this many rays, memory is not what is missing."""


def default_chunk(device: torch.device) -> int:
    """Rays per chunk where the user gave none."""
    return DEFAULT_CHUNK_CPU if device.type == "cpu" else DEFAULT_CHUNK_CUDA


class ChunkedRenderer:
    """Runs a ray function over an image, chunk by chunk; remembers the chunk size that fitted.

    Args:
        chunk: rays per chunk; 0 chooses by device when the first image comes.
    """

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk

    def render(
        self, rays: RayBundle, forward: Callable[[RayBundle], dict[str, Tensor | list]], device: torch.device
    ) -> dict[str, Tensor]:
        """Outputs of all rays, each reshaped to (h, w, channels), on the device of the incoming rays.

        Only what ``forward`` returns is kept, so it should reduce features before it returns. When memory runs out
        the chunk is halved, the user is told once per halving, and the image goes on where it was.

        Args:
            rays: an (h, w) bundle.
            forward: maps a bundle of n rays to tensors of n rows; other values are dropped.
            device: where ``forward`` runs.

        Raises:
            RuntimeError: memory runs out even for 16 rays.
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
                # Without the frames of the failed chunk, which the traceback would keep alive.
                error.__traceback__ = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                CONSOLE.log(f"Out of memory: rendering goes on with chunks of {self.chunk} rays.")
                continue
            for name, value in outputs.items():
                if isinstance(value, Tensor):
                    pieces[name].append(value.to(rays.origins.device))
            start, chunks = end, chunks + 1
        # An optional output that failed in some chunk has no complete image.
        return {
            name: torch.cat(parts).view(height, width, -1) for name, parts in pieces.items() if len(parts) == chunks
        }
