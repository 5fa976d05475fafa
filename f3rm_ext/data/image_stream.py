"""Whole training images, one at a time, from a cycling window."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.data.image_cycle import ImageCycle, ImageTurns
from f3rm_ext.data.image_reader import MaskedPixels
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_sampler import ImagePixels, no_valid_pixel
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.prefetch import Prefetcher, read_each
from f3rm_ext.data.undistort import shrunk, shrunk_cameras, shrunk_size
from f3rm_ext.data.uploads import Upload, Uploader
from f3rm_ext.data.window_stream import WindowStream
from f3rm_ext.memory.shortage import is_out_of_memory


@dataclass(frozen=True)
class PackedPicture:
    """An image whose mask is kept as bits."""

    pixels: UInt8[torch.Tensor, "h w channels"]
    """RGB or RGBA."""
    mask: UInt8[np.ndarray, "bytes"] | None
    """Whether pixels count, eight in a byte, row by row; None means that all do."""

    @classmethod
    def pack(cls, picture: ImagePixels) -> "PackedPicture":
        """Packs an image's mask."""
        return cls(picture.pixels, None if picture.valid is None else np.packbits(picture.valid.numpy()))

    def unpack(self) -> ImagePixels:
        """Returns the image as it was."""
        if self.mask is None:
            return ImagePixels(self.pixels)
        height, width = self.pixels.shape[:2]
        valid = np.unpackbits(self.mask, count=height * width).view(bool).reshape(height, width)
        return ImagePixels(self.pixels, torch.from_numpy(valid))

    @property
    def nbytes(self) -> int:
        """Memory of the image and its mask, in bytes."""
        return self.pixels.nbytes + (0 if self.mask is None else self.mask.nbytes)


@dataclass
class PictureWindow:
    """The images of a window (uint8, CPU), and downscaled copies of those used at a lower resolution."""

    images: tuple[int, ...]
    """Indices of the images in the data set."""
    pictures: dict[int, PackedPicture]
    """The images by index."""
    _halvings: int = 0
    _small: dict[int, ImagePixels] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory that the images take, in bytes."""
        return sum(picture.nbytes for picture in self.pictures.values())

    def picture(self, image_idx: int, halvings: int) -> ImagePixels:
        """Returns an image with its sides halved ``halvings`` times. Copies of one resolution are kept at a time."""
        if halvings != self._halvings:
            self._halvings, self._small = halvings, {}
        if halvings == 0:
            return self.pictures[image_idx].unpack()
        small = self._small.get(image_idx)  # Two threads may ask at once.
        if small is None:
            picture = self.pictures[image_idx].unpack()
            height, width = picture.pixels.shape[:2]
            small = self._small[image_idx] = shrunk(picture, *shrunk_size(height, width, 0.5**halvings))
        return small


def picture_batch(picture: ImagePixels, image_idx: int, device: torch.device | str) -> dict[str, Any]:
    """Turns an image into the batch of the model.

    Returns:
        ``image`` Float[h w 3] in [0, 1] (not multiplied by alpha) and ``image_idx``; ``alpha`` Float[h w 1] in [0, 1]
        if the file has alpha; ``mask`` Bool[h w 1] if there is a mask, False for pixels that do not count.
    """
    pixels = picture.pixels.to(device).float().div_(255.0)  # bytes are moved, four times less than floats
    batch: dict[str, Any] = {"image": pixels[..., :3].contiguous(), "image_idx": image_idx}
    if pixels.shape[-1] == 4:
        batch["alpha"] = pixels[..., 3:].contiguous()
    if picture.valid is not None:
        batch["mask"] = picture.valid.to(device)[..., None]
    return batch


class PictureUploads:
    """Copies the images of a window to a device when they are used; keeps the copies while they fit there.

    Bytes are copied, and stay bytes. Copies of one resolution are kept at a time.

    Args:
        read: returns an image of the present window on the CPU, given its index and number of halvings. Called on a
            thread of its own.
    """

    def __init__(self, device: torch.device, placement: Placement, read: Callable[[int, int], ImagePixels]) -> None:
        self._placement, self._read = placement, read
        self._uploader = Uploader(device)
        self._arriving: Prefetcher[Upload] = Prefetcher(self._send, "f3rm-ext-picture")
        self._kept: dict[int, ImagePixels] = {}
        self._halvings = 0

    def begin(self, needed_bytes: int) -> None:
        """Drops the copies of the old window."""
        self._kept = {}
        self._placement.decide(needed_bytes)

    def take(self, image_idx: int, halvings: int, following: int | None) -> ImagePixels:
        """Returns an image on the device, and starts copying the following one if it is known; does not wait."""
        if halvings != self._halvings:
            self._halvings, self._kept = halvings, {}
        picture = self._kept.get(image_idx)
        if picture is None:
            picture = self._receive_image(image_idx, halvings)
            if self._placement.on_device:
                self._kept[image_idx] = picture
        if following is not None and following not in self._kept:
            self._arriving.request((following, halvings))
        return picture

    def present(self, image_idx: int, halvings: int) -> ImagePixels:
        """Returns an image beside that of the step, halved alike: the copy on the device, or one that is not kept."""
        kept = self._kept.get(image_idx)
        return _receive(self._send((image_idx, halvings), lambda: False)) if kept is None else kept

    def close(self) -> None:
        """Stops copying and drops the copies. Another :meth:`take` would start it again."""
        self._arriving.close()
        self._kept = {}

    def _receive_image(self, image_idx: int, halvings: int) -> ImagePixels:
        try:
            upload = self._arriving.take((image_idx, halvings))
        except RuntimeError as error:
            if not (self._placement.on_device and is_out_of_memory(error)):
                raise
            self._placement.give_up()
            self._kept = {}
            upload = self._arriving.take((image_idx, halvings))
        return _receive(upload)

    def _send(self, key: tuple[int, ...], stopped: Callable[[], bool]) -> Upload:
        picture = self._read(*key)
        parts = {"pixels": picture.pixels}
        if picture.valid is not None:
            parts["valid"] = picture.valid
        return self._uploader.send(parts)


def _receive(upload: Upload) -> ImagePixels:
    parts = upload.receive()
    return ImagePixels(parts["pixels"], parts.get("valid"))


class ImageStream(WindowStream[PictureWindow]):
    """Endless images from one data set. Loads nothing before the first image.

    The images of a window take turns, see :class:`~f3rm_ext.data.image_cycle.ImageTurns`.

    With a placement, the next image is copied to the device in the background, or is kept there, and nothing in
    :meth:`next` waits for the device.
    """

    def __init__(
        self,
        dataset: PinholeDataset,
        cycle: ImageCycle,
        *,
        device: torch.device | str = "cpu",
        masked: MaskedPixels = "ignore",
        placement: Placement | None = None,
    ) -> None:
        cameras = dataset.cameras
        super().__init__(
            cameras, cycle, split="train", device=device, masked=masked, placement=placement, whole_images=True
        )
        self.dataset = dataset
        self._turns = ImageTurns(cycle, self.split)
        self.pixels_per_batch = int(cameras.height[0]) * int(cameras.width[0])
        """Pixels of the last image; before the first step, of the first image."""
        self._cameras = cameras  # The host reads their sizes; models move the rest.
        self._uploads = None if placement is None else PictureUploads(self.device, placement, self._small)
        self._halvings = 0

    def next(self, halvings: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """Returns the next camera (shape 1, on the CPU) and its batch (see :func:`picture_batch`) on the device.

        The sides of both are halved as often as asked. If masked pixels are transparent, the batch also has ``kept``
        Bool[h w 1], False for transparent pixels.

        Raises:
            CaptureError: an image of the window cannot be read.
        """
        window = self._step()
        if self._begins:
            self._turns.begin_window()
        image_idx = self._turns.draw(window.images)
        self._steps += 1
        if self._uploads is None:
            picture = window.picture(image_idx, halvings)
        else:
            # The next step's image cannot be known where it is of another window.
            following = None if self.cycle.ends else self._turns.next(window.images)
            picture = self._uploads.take(image_idx, halvings, following)
        self._halvings = halvings
        height, width = picture.pixels.shape[:2]
        self.pixels_per_batch = height * width
        self._coverage.add_rays((image_idx,), np.array([height * width]))
        camera = self._cameras[image_idx : image_idx + 1]
        if halvings:
            camera = shrunk_cameras(camera, height, width)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": image_idx}
        batch = picture_batch(picture, image_idx, self.device)
        if self.masked == "background" and "alpha" in batch:
            batch["kept"] = batch["alpha"] > 0
        return camera, batch

    def photo(self, image_idx: int) -> dict[str, Any] | None:
        """Returns the batch of an image of the present window, at the resolution of the last step; None for others.

        This does not count as a use of the image.
        """
        window = self._window
        if window is None or image_idx not in window.pictures:
            return None
        source = window.picture if self._uploads is None else self._uploads.present
        return picture_batch(source(image_idx, self._halvings), image_idx, self.device)

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self._turns.state()}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        if not super().load_state(state):
            return False
        # Where the window is of another size now, its first step begins another turn.
        self._turns.load_state(state)
        return True

    def _place(self, window: PictureWindow) -> PictureWindow:
        if self._uploads is not None:
            self._uploads.begin(window.nbytes)
        return window

    def _small(self, image_idx: int, halvings: int) -> ImagePixels:
        """An image of the present window."""
        assert self._window is not None
        return self._window.picture(image_idx, halvings)

    def _forget(self) -> None:
        if self._uploads is not None:
            self._uploads.close()

    def _load(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> PictureWindow:
        def read(image: int) -> PackedPicture:
            return PackedPicture.pack(self.dataset.picture(image, self.masked))

        pictures = list(read_each(images, read, stopped))
        if all(picture.mask is not None and not picture.mask.any() for picture in pictures):
            raise no_valid_pixel()
        return PictureWindow(images, dict(zip(images, pictures, strict=True)))
