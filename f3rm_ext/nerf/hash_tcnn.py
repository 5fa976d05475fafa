"""The hash grid by tiny-cuda-nn: its kernels on our table."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.nerf.hash_levels import level_growth


def encoding_options(
    num_levels: int, features_per_level: int, base_res: int, max_res: int, log2_hashmap_size: int
) -> dict[str, Any]:
    """Returns what tiny-cuda-nn calls a grid of this size."""
    return {
        "otype": "HashGrid",
        "n_levels": num_levels,
        "n_features_per_level": features_per_level,
        "log2_hashmap_size": log2_hashmap_size,
        "base_resolution": base_res,
        "per_level_scale": level_growth(num_levels, base_res, max_res),
    }


class TcnnGrid:
    """An encoding of tiny-cuda-nn that reads a table it does not own.

    Args:
        options: from :func:`encoding_options`.

    Raises:
        ConfigError: tiny-cuda-nn lays this grid out in another way.
    """

    def __init__(self, options: dict[str, Any], numbers: int) -> None:
        import tinycudann as tcnn  # pyright: ignore[reportMissingImports]

        self._encoding: Any = tcnn.Encoding(3, options)
        if self._encoding.params.numel() != numbers:
            raise ConfigError(
                f"tiny-cuda-nn stores this grid in {self._encoding.params.numel()} parameters instead of {numbers}: "
                "use another backend, --pipeline.model.backend triton."
            )
        # The table takes their place in each call; kept, they would fill as much memory as it does.
        del self._encoding.params

    def __call__(
        self, points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"]
    ) -> Float[Tensor, "points feat"]:
        """Interpolates like ``hash_grid_reference``, in half precision; float32 comes out except under autocast."""
        # tiny-cuda-nn reads the table's memory, and gradients flow to it.
        self._encoding.params = table.view(-1)
        features = self._encoding(points)
        # They are float16, which the float32 layers behind the grid accept only under autocast.
        return features if torch.is_autocast_enabled() else features.float()
