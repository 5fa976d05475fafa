"""Nerfstudio's options without those that nothing here reads.

They are kept as fields, so that config.yml of earlier runs goes on loading, and left out of the command line.
"""

from dataclasses import dataclass, field

import tyro
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.models.base_model import ModelConfig

from f3rm_ext.compat import LOCAL_HOST


@dataclass
class OwnModelConfig(ModelConfig):
    """What the options of all our models begin with."""

    # Rays start and end at planes of our own, losses have weights of our own, and nothing is generated from a text.
    enable_collider: tyro.conf.Suppress[bool] = True
    collider_params: tyro.conf.Suppress[dict[str, float] | None] = field(default_factory=dict)
    loss_coefficients: tyro.conf.Suppress[dict[str, float]] = field(default_factory=dict)
    prompt: tyro.conf.Suppress[str | None] = None


@dataclass
class LocalViewerConfig(ViewerConfig):
    """A viewer on this machine."""

    websocket_host: str = LOCAL_HOST
    """The host address to bind the websocket server to."""
    # Models choose their chunks themselves: --pipeline.model.eval-num-rays-per-chunk.
    num_rays_per_chunk: tyro.conf.Suppress[int] = 1 << 15
