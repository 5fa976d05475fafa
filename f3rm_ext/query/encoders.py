"""From texts and places in images to embeddings: the extractors that the features were distilled from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, UInt8

from f3rm_ext.capture.images import image_size
from f3rm_ext.errors import ConfigError, ExtractorError, UserError
from f3rm_ext.features.base import Extractor, FeatureMap, FileExtractor, TextExtractor
from f3rm_ext.features.pca_codes import encode
from f3rm_ext.features.store.images import blend_background
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.exemplar import Example, take_example
from f3rm_ext.query.options import Region
from f3rm_ext.query.queryable import QueryHead
from f3rm_ext.query.run import Photos
from f3rm_ext.utils.pictures import UNREADABLE, open_photo, to_eight_bits, turn_upright

DEFAULT_NEGATIVES = ("object", "things", "stuff", "texture")
"""LERF's canonical phrases: the negatives of a text unless the user names others."""


class _Extractors:
    """Extractors that features were distilled from, each built once, when it is first needed."""

    def __init__(self, device: torch.device | str, alternative: str) -> None:
        self.device = torch.device(device)
        self._alternative = alternative
        """What goes on working without an extractor, for messages."""
        self._built: dict[str, Extractor] = {}

    def get(self, head: QueryHead, *, texts: bool = False) -> Extractor:
        """Returns the extractor of a head, with the weights that its features were made with."""
        from f3rm_ext.features.extractors.registry import build_extractor, understands_text

        extractor = self._built.get(head.extractor)
        if extractor is None:
            try:
                if texts and not understands_text(head.extractor):
                    raise ExtractorError(
                        f"The feature {head.name!r} ({head.extractor}) understands no text: query, or train with, "
                        "one that does, such as clip"
                    )
                extractor = self._built[head.extractor] = build_extractor(head.extractor, device=self.device)
            except UserError as error:
                kind = type(error) if isinstance(error, ExtractorError) else ExtractorError
                raise kind(f"{str(error).rstrip('.')}. {self._alternative} go on working.") from error
        require_same_model(head, extractor)
        return extractor


class TextEncoder:
    """Embeds texts in the spaces of heads. Loads each extractor once, when it is first needed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._extractors = _Extractors(device, "Queries by example")

    def encode(self, head: QueryHead, prompts: Sequence[str], *, known: Sequence[str] = ()) -> Embeddings:
        """Returns one embedding for each prompt.

        Args:
            known: those among them that are looked for, which the extractor has to know.

        Raises:
            WeightsNotFoundError: the weights are not on this machine; the message says which and where they belong.
            ExtractorError: the extractor cannot be used here, understands no text, or does not know what is looked for.
            ConfigError: the features were made with other weights, or a text is empty.
        """
        if not all(prompt.strip() for prompt in prompts):
            raise ConfigError("The text to look for is empty: write a word or a phrase such as `blue mug`.")
        if not prompts:
            return Embeddings.empty(head.dim)
        extractor = cast(TextExtractor, self._extractors.get(head, texts=True))
        if (require_known := getattr(extractor, "require_known", None)) is not None:
            require_known(known)
        with torch.inference_mode():
            vectors = extractor.encode_text(list(prompts))
        full = head.dim if head.basis is None else head.basis.shape[1]
        if vectors.shape != (len(prompts), full):
            raise ExtractorError(
                f"{head.extractor} gave texts of shape {tuple(vectors.shape)} where the feature {head.name!r} has "
                f"{full} dimensions: report this to its author."
            )
        # The clone is an ordinary tensor, not one of inference mode.
        return Embeddings.from_full(vectors.clone(), prompts, head.basis)


class ExampleEncoder:
    """Embeds places in images in the spaces of heads. Extractors are loaded only for images that are no photos of the
    capture.
    """

    def __init__(self, photos: Photos, device: torch.device) -> None:
        self.photos = photos
        self._extractors = _Extractors(device, "Examples from photos of the capture")

    def encode(self, head: QueryHead, region: Region) -> Example:
        """Returns what lies in a region, and what to tell it from.

        In a photo of the capture these are the features of the scene, seen from there. Features of other images are
        extracted; they are turned upright, as image viewers show them.

        Raises:
            ConfigError: there is no such image, or the region lies outside it.
            UserError: the image's features are not available.
        """
        photo = self._find_photo(region.image)
        if photo is None:
            feature_map, place = self._extract(head, region), region
        else:
            split, index, file = photo
            width, height = image_size(file)
            region.require_inside(width, height)
            camera = self.photos.cameras(split)[index]
            place = region.scale(int(camera.width.item()) / width, int(camera.height.item()) / height)
            feature_map = self.photos.scene_map(split, index, head.name)
        example = take_example(feature_map, place, self.photos.scene_clusters(head.name))
        # Named by the pixels that were typed, which are those of the file and not of the run's copy of it.
        sources = (str(region), *example.positives.sources[1:])
        return replace(example, positives=replace(example.positives, sources=sources))

    def _find_photo(self, image: str) -> tuple[str, int, Path] | None:
        """Split and index of a photo of the capture, and the file whose pixels a region counts."""
        path, match = Path(image), self.photos.find_photo(image)
        if match is not None:
            return *match, self.photos.files(match[0])[match[1]]
        folder = self.photos.data if self.photos.data.is_dir() else self.photos.data.parent
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            # The original of a photo that the run reads at another size, by as many of its folders as fit.
            ends = ("/".join(path.parts[start:]) for start in range(1, len(path.parts)))
            match = next(filter(None, map(self.photos.find_photo, ends)), None)
        return None if match is None else (*match, path)

    def _extract(self, head: QueryHead, region: Region) -> FeatureMap:
        """Extracts the features of an image file that is no photo of the capture."""
        path = Path(region.image)
        image = read_upright(path)
        height, width = image.shape[:2]
        region.require_inside(width, height)
        extractor = self._extractors.get(head)
        values, grid = extract_values(extractor, image, path), extractor.patch_grid(height, width)
        if head.basis is None:
            return FeatureMap(values.numpy().astype(np.float16), grid)
        codes = encode(head.basis.float().cpu(), values).numpy().astype(np.float16)
        return FeatureMap(codes[..., :-1], grid, codes[..., -1])


def require_same_model(head: QueryHead, extractor: Extractor) -> None:
    """Raises ConfigError unless the features of a head were made with this extractor's model and weights."""
    here = extractor.identity
    for part, other in (("model", "another model"), ("weights", "other weights")):
        if head.identity.get(part, getattr(here, part)) != getattr(here, part):
            raise ConfigError(
                f"{head.extractor} has {other} on this machine ({getattr(here, part)}) than the feature {head.name!r} "
                f"was made with ({head.identity[part]}): queries would be compared with another space; "
                "use the same weights file."
            )


@torch.inference_mode()
def extract_values(
    extractor: Extractor, image: UInt8[np.ndarray, "h w 3"], path: Path
) -> Float[torch.Tensor, "rows cols feat"]:
    """Returns the features of one image, float32 on the CPU, not normalised."""
    if isinstance(extractor, FileExtractor):
        (values,) = extractor.extract_files([image], [path])
    else:
        (values,) = extractor.extract([image])
    return values.float().cpu()


def read_upright(path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """Reads an image file, upright, and on white where it is transparent.

    Raises:
        CaptureError: it is HEIC, and the package that reads it is missing.
        ConfigError: there is no such file, or it is no picture.
    """
    try:
        with open_photo(path) as image:
            pixels = to_eight_bits(turn_upright(image))
            return blend_background(np.asarray(pixels if pixels.mode == "RGBA" else pixels.convert("RGB")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no image {str(path)!r}, neither among the photos of the capture nor as a file: check its name."
        ) from error
    except UNREADABLE as error:
        raise ConfigError(f"The image {path} cannot be read ({error}): give a picture such as .jpg or .png.") from error
