"""nerfstudio's data set, which decodes photos with fewer copies."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from f3rm_ext.capture.ground_truth import nearest
from f3rm_ext.capture.images import ends_whole, read_mask


class PhotoDataset(InputDataset):
    """nerfstudio's data set; pixels are the same, unless drafts are enough. Opens no image beforehand.

    Args:
        draft: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, which is faster, and averages as downscaling does,
            but not exactly. Then ``scale_factor`` is 1 / draft.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0, *, draft: int = 1) -> None:
        super().__init__(dataparser_outputs, scale_factor)
        for side, names in (("height", ("fy", "cy")), ("width", ("fx", "cx"))):
            sizes = getattr(dataparser_outputs.cameras, side)
            scaled = (sizes.double() * scale_factor).to(sizes.dtype)  # as images; nerfstudio rounds cameras in float32
            setattr(self.cameras, side, scaled)
            if draft == 1:  # a draft is cut off at the last whole block, but a scaled image shows the whole photo
                for name in names:
                    setattr(self.cameras, name, getattr(dataparser_outputs.cameras, name) * scaled / sizes)
        self.draft = draft
        # nerfstudio changes the list it finds, which belongs to the class.
        self.exclude_batch_keys_from_device = list(self.exclude_batch_keys_from_device)

    def at_scale(self, scale_factor: float) -> "PhotoDataset":
        """Returns the data set with its images scaled by another factor in (0, 1]."""
        return type(self)(self._dataparser_outputs, scale_factor)

    def get_numpy_image(self, image_idx: int) -> UInt8[np.ndarray, "h w channels"]:
        """RGB or RGBA."""
        if self.scale_factor * self.draft == 1.0:
            image = _decode_jpeg(Path(self.image_filenames[image_idx]), self.draft)
            if image is not None:
                return image
        return super().get_numpy_image(image_idx)

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32") -> dict[str, Any]:
        """nerfstudio's batch: ``image_idx``, ``image``, and ``mask`` Bool[h w 1] if there is one, also in colour.

        Raises:
            OSError, SyntaxError, ValueError: a file cannot be read, or the mask has another size than the image.
        """
        image = self.get_image_uint8(image_idx) if image_type == "uint8" else self.get_image_float32(image_idx)
        data: dict[str, Any] = {"image_idx": image_idx, "image": image}
        files = self._dataparser_outputs.mask_filenames
        if files is not None:
            mask = read_mask(Path(files[image_idx]))
            mask = nearest(mask, *(int(side * self.scale_factor) for side in mask.shape))
            if mask.shape != image.shape[:2]:
                raise ValueError(f"the mask has {mask.shape} pixels and the image {tuple(image.shape[:2])}")
            data["mask"] = torch.from_numpy(mask[..., None])
            if self.mask_color:
                data["image"] = torch.where(data["mask"], image, torch.ones_like(image) * torch.tensor(self.mask_color))
        data.update(self.get_metadata(data))
        return data


def _decode_jpeg(path: Path, draft: int) -> UInt8[np.ndarray, "h w 3"] | None:
    """Decodes a whole RGB JPEG by OpenCV, at a fraction of its size; None for other files.

    Both libraries have libjpeg-turbo, but PIL copies the pixels three times on their way to an array.
    """
    import cv2

    size = cv2.IMREAD_COLOR if draft == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{draft}")
    with Image.open(path) as photo:
        if photo.format != "JPEG" or photo.mode != "RGB" or not ends_whole(path, "JPEG"):
            return None
        width, height = photo.size
    # From bytes, since OpenCV cannot open every path on Windows.
    image = cv2.imdecode(np.fromfile(path, np.uint8), size | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        return None
    # A last row or column of less than a whole block is left out, as nerfstudio's cameras do.
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)[: height // draft, : width // draft]
