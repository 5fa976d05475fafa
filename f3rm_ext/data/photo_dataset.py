"""nerfstudio's data set, which decodes photos with fewer copies."""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from f3rm_ext.capture.images import ends_whole


class PhotoDataset(InputDataset):
    """nerfstudio's data set; pixels are the same."""

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0) -> None:
        """Opens no image."""
        super().__init__(dataparser_outputs, scale_factor)
        # nerfstudio changes the list it finds, which belongs to the class.
        self.exclude_batch_keys_from_device = list(self.exclude_batch_keys_from_device)

    def at_scale(self, scale_factor: float) -> "PhotoDataset":
        """Returns the data set with its images scaled by another factor in (0, 1]."""
        return type(self)(self._dataparser_outputs, scale_factor)

    def get_numpy_image(self, image_idx: int) -> UInt8[np.ndarray, "h w channels"]:
        """RGB or RGBA."""
        if self.scale_factor == 1.0:
            image = _decode_jpeg(Path(self.image_filenames[image_idx]))
            if image is not None:
                return image
        return super().get_numpy_image(image_idx)


def _decode_jpeg(path: Path) -> UInt8[np.ndarray, "h w 3"] | None:
    """Decodes a whole RGB JPEG by OpenCV; None for other files.

    Both libraries have libjpeg-turbo, but PIL copies the pixels three times on their way to an array.
    """
    import cv2

    with Image.open(path) as photo:
        if photo.format != "JPEG" or photo.mode != "RGB" or not ends_whole(path, "JPEG"):
            return None
    # From bytes, since OpenCV cannot open every path on Windows.
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    return None if image is None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
