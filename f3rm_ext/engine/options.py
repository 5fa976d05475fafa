"""Nerfstudio's options without those that nothing here reads.

Unread options stay fields, so that the config.yml of earlier runs still loads, but are hidden on the command line.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import tyro
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.models.base_model import ModelConfig

from f3rm_ext.compat import LOCAL_HOST


@dataclass
class OwnModelConfig(ModelConfig):
    """Base of the options of all our models."""

    # Our models have their own near and far planes and loss weights, and generate nothing from a text prompt.
    enable_collider: tyro.conf.Suppress[bool] = True
    collider_params: tyro.conf.Suppress[dict[str, float] | None] = field(default_factory=dict)
    loss_coefficients: tyro.conf.Suppress[dict[str, float]] = field(default_factory=dict)
    prompt: tyro.conf.Suppress[str | None] = None

    # Not a field, so never in config.yml.
    opened: ClassVar[Path | None] = None
    """The checkpoint that a command of nerfstudio is about to load; set on the instance."""


@dataclass
class LocalViewerConfig(ViewerConfig):
    """Viewer options, by default for this machine only."""

    websocket_host: str = LOCAL_HOST
    """The host address to bind the websocket server to."""
    # Our models choose their own chunks: --pipeline.model.eval-num-rays-per-chunk.
    num_rays_per_chunk: tyro.conf.Suppress[int] = 1 << 15
