"""The options of 2D feature extraction, shared by the datamanager's config and by the command line."""

from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError

MIN_CODES, MAX_CODES = 8, 512


@dataclass
class FeatureOptions:
    """Which 2D features are distilled and where they are kept."""

    extractors: tuple[str, ...] = ("clip",)
    """Extractors to distil together, each as NAME or NAME:key=value,key=value, for instance
    `clip:model=ViT-B-16,pretrained=laion2b_s34b_b88k` or `dinov2:weights=/path/to/vits14.pth`.
    `f3rm-ext doctor` lists the names. None at all gives a plain radiance field."""
    cache_dir: Path | None = None
    """Folder of the feature store; default $F3RM_EXT_CACHE, else ~/.cache/f3rm_ext. Features are keyed by image
    content and extractor, so one folder serves all captures."""
    codes: int = 0
    """Dimension K of the PCA codes to distil instead of the full features; 0 keeps the full features.
    64 to 128 is a good choice for CLIP; range 8 to 512, below the extractor's own dimension."""

    def __post_init__(self) -> None:
        if self.codes and not MIN_CODES <= self.codes <= MAX_CODES:
            raise ConfigError(
                f"The number of PCA codes is {self.codes}, outside {MIN_CODES} to {MAX_CODES}: "
                "use 0 for full features, or 64 to 128."
            )
