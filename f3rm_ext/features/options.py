"""Options of 2D feature extraction, shared by the datamanager's config and the command line."""

from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError

MIN_CODES, MAX_CODES = 8, 512


@dataclass
class FeatureOptions:
    """Options of the 2D features to distil."""

    extractors: tuple[str, ...] = ("clip",)
    """Extractors whose features are distilled together, each written as NAME or NAME:key=value,key=value.
    Examples are `clip:model=ViT-B-16,pretrained=laion2b_s34b_b88k` and `dinov2:weights=/path/to/vits14.pth`.
    `f3rm-ext doctor` lists the names. Without any extractor a plain radiance field is trained."""
    cache_dir: Path | None = None
    """Folder of the feature store, which serves all captures.
    By default it is $F3RM_EXT_CACHE or, if that is not set, ~/.cache/f3rm_ext."""
    codes: int = 0
    """Number of PCA codes to distil instead of the full features, 8 to 512 and fewer than their dimensions. 64 to 128
    codes suit CLIP; 0 distils the full features."""

    def __post_init__(self) -> None:
        if self.codes and not MIN_CODES <= self.codes <= MAX_CODES:
            raise ConfigError(
                f"The number of PCA codes is {self.codes}, outside {MIN_CODES} to {MAX_CODES}: "
                "use 0 for full features, or 64 to 128."
            )
