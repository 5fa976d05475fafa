"""Vectors of places in images: photos of the capture, whose features are stored, and any other image file."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from f3rm_ext.capture.images import image_size
from f3rm_ext.errors import ConfigError, ExtractorError, UserError
from f3rm_ext.features.base import Extractor, FeatureMap, FileExtractor
from f3rm_ext.features.pca_codes import encode
from f3rm_ext.features.store.images import on_white
from f3rm_ext.query.background import background_clusters
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.encoders import check_same_model
from f3rm_ext.query.exemplar import Region, exemplar
from f3rm_ext.query.queryable import QueryHead
from f3rm_ext.query.run import Photos


@dataclass(frozen=True)
class Example:
    """A place in an image as a query."""

    positives: Embeddings
    """The feature there."""
    background_clusters: Embeddings
    """What else the image shows; nothing where the place is all of it."""


class Examples:
    """Takes examples in the space of one head.

    Args:
        photos: of the capture.
        head: in whose space.
        device: where the extractor runs; it is loaded for images that are not of the capture only.
    """

    def __init__(self, photos: Photos, head: QueryHead, device: torch.device) -> None:
        self.photos, self.head, self.device = photos, head, device
        self._extractor: Extractor | None = None

    def example(self, region: Region) -> Example:
        """The feature of a region, and of what else its image shows.

        A photo of the capture needs no weights where the feature store is complete. Other image files are taken
        upright, as image viewers show them.

        Args:
            region: in pixels of the image file.

        Raises:
            ConfigError: there is no such image, or the region lies outside of it.
            UserError: its features cannot be had.
        """
        photo = self._find(region.image)
        if photo is None:
            feature_map, place = self._map_of_file(region), region
        else:
            split, index, file = photo
            width, height = image_size(file)
            region.require_inside(width, height)
            camera = self.photos.cameras(split)[index]
            place = region.scaled(int(camera.width.item()) / width, int(camera.height.item()) / height)
            feature_map = self.photos.feature_map(split, index, self.head.name)
        positives = exemplar(feature_map, place)
        return Example(replace(positives, sources=(str(region),)), background_clusters(feature_map, place))

    def _find(self, image: str) -> tuple[str, int, Path] | None:
        """Split and index of a photo of the capture, and the file whose pixels are meant."""
        path, place = Path(image), self.photos.find_photo(image)
        if place is not None:
            return *place, self.photos.files(place[0])[place[1]]
        folder = self.photos.data if self.photos.data.is_dir() else self.photos.data.parent
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            # The original of a photo that the run reads at another size.
            place = self.photos.find_photo(path.name)
        return None if place is None else (*place, path)

    def _map_of_file(self, region: Region) -> FeatureMap:
        path = Path(region.image)
        image = _read(path)
        height, width = image.shape[:2]
        region.require_inside(width, height)
        extractor = self._load()
        with torch.inference_mode():
            if isinstance(extractor, FileExtractor):
                (values,) = extractor.extract_files([image], [path])
            else:
                (values,) = extractor.extract([image])
            values = values.float().cpu()
            if self.head.basis is not None:
                values = encode(self.head.basis.float().cpu(), values)
        half = values.numpy().astype(np.float16)
        codes = self.head.basis is not None
        return FeatureMap(
            values=half[..., :-1] if codes else half,
            grid=extractor.patch_grid(height, width),
            residual_norm=half[..., -1] if codes else None,
        )

    def _load(self) -> Extractor:
        from f3rm_ext.features.extractors.registry import build_extractor

        if self._extractor is None:
            try:
                extractor = build_extractor(self.head.extractor, device=self.device)
            except UserError as error:
                kind = type(error) if isinstance(error, ExtractorError) else ExtractorError
                raise kind(f"{str(error).rstrip('.')}. Examples from photos of the capture go on working.") from error
            check_same_model(self.head, extractor)
            self._extractor = extractor
        return self._extractor


def _read(path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """An image file, upright, on white where it is transparent."""
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            transparent = upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info
            return on_white(np.asarray(upright.convert("RGBA" if transparent else "RGB")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no image {str(path)!r}, neither among the photos of the capture nor as a file: check its name."
        ) from error
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"The image {path} cannot be read ({error}): give a picture such as .jpg or .png.") from error
