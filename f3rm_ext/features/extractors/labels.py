"""Label images as features: perfect by construction, to test everything that uses features."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from f3rm_ext.capture.ground_truth import LABEL_KEYS, CaptureGroundTruth
from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors.parsing import close_match


@dataclass
class LabelsConfig:
    """Options of ``labels``."""

    data: Path = field(default_factory=Path)
    """Capture whose transforms.json names classes and label images."""


class LabelsExtractor:
    """One-hot labels of a capture that has label images, for tests; text queries are class names.

    Each pixel is a patch. If image and labels differ in size, its feature is the share of each class in its area.
    """

    config_class = LabelsConfig

    def __init__(self, config: LabelsConfig, *, device: torch.device) -> None:
        self.config = config
        self.truth = CaptureGroundTruth(config.data)
        if not self.truth.has_labels:
            raise ExtractorError(
                f"There are no label images in {config.data}: `labels:data=CAPTURE` needs a transforms.json with "
                "`classes`, and `label_file_path` for each frame."
            )
        digest = hashlib.sha256("\n".join(self.truth.names).encode())
        for path in self.truth.files(LABEL_KEYS):
            digest.update(path.read_bytes())
        self._digest = digest.hexdigest()[:16]
        self._names = [name.casefold() for name in self.truth.names]

    @property
    def identity(self) -> ExtractorIdentity:
        return ExtractorIdentity(
            extractor="labels",
            model=f"{self.dim} classes",
            weights=self._digest,
            resolution="image",
            preprocessing="share of each class in the pixel's area",
        )

    @property
    def dim(self) -> int:
        """Number of classes, including that of the background."""
        return len(self.truth.names)

    @property
    def batch_size(self) -> int:
        """One: larger batches bring nothing."""
        return 1

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        return PatchGrid.covering(height_px, width_px, height_px, width_px)

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        """Raises ExtractorError, because labels are found by file; see :meth:`extract_files`."""
        raise ExtractorError("Labels belong to the files of a capture: an image without a file has none.")

    def extract_files(
        self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]], files: Sequence[Path]
    ) -> list[Float[Tensor, "_ _ feat"]]:
        """Returns the share of each class in each pixel, (h, w, classes), from the label image of each file."""
        return [self._shares(file, *image.shape[:2]) for image, file in zip(images, files, strict=True)]

    def encode_text(self, prompts: Sequence[str]) -> Float[Tensor, "prompts feat"]:
        """Returns the one-hot vector of the class with that name; for other texts, all classes alike."""
        vectors = torch.full((len(prompts), self.dim), self.dim**-0.5)
        for row, prompt in zip(vectors, prompts, strict=True):
            if prompt.casefold() in self._names:
                row.zero_()
                row[self._names.index(prompt.casefold())] = 1.0
        return vectors

    def require_known(self, prompts: Sequence[str]) -> None:
        """Raises ExtractorError unless every text is the name of a class, as only classes can be found."""
        for prompt in prompts:
            if prompt.casefold() not in self._names:
                raise ExtractorError(
                    f"{self.config.data} has no class {prompt!r}{close_match(prompt, self.truth.names)}: "
                    f"look for one that it has ({', '.join(self.truth.names)})."
                )

    def _shares(self, file: Path, height_px: int, width_px: int) -> Float[Tensor, "_ _ feat"]:
        labels = self.truth.label_image(file)
        if labels is None or labels.max() >= self.dim:
            wrong = "has no label image" if labels is None else f"has a label {labels.max()} without a name"
            raise ExtractorError(f"The image {file} {wrong}: mend transforms.json in {self.config.data}.")
        onehot = torch.nn.functional.one_hot(torch.from_numpy(labels), self.dim).permute(2, 0, 1)[None].float()
        shares = torch.nn.functional.interpolate(onehot, (height_px, width_px), mode="area")
        return shares[0].permute(1, 2, 0).contiguous()
