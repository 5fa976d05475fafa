"""Whole images on their way to the training device, one step ahead, or kept there."""

from collections.abc import Callable

import torch

from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.prefetch import Prefetcher
from f3rm_ext.data.uploads import Upload, Uploader
from f3rm_ext.memory.shortage import is_out_of_memory


class PictureUploads:
    """Copies the images of a window to a device when they are used; keeps the copies while they fit there.

    Bytes are copied, and stay bytes. Copies of one resolution are kept at a time.
    """

    def __init__(self, device: torch.device, placement: Placement, read: Callable[[int, int], ImagePixels]) -> None:
        """Copies nothing yet.

        Args:
            read: returns an image of the present window on the CPU, given its index and number of halvings. Called on
                a thread of its own.
        """
        self._placement = placement
        self._read = read
        self._uploader = Uploader(device)
        self._arriving: Prefetcher[Upload] = Prefetcher(self._send, "f3rm-ext-picture")
        self._kept: dict[int, ImagePixels] = {}
        self._halvings = 0

    def begin(self, needed_bytes: int) -> None:
        """Drops the copies of the old window."""
        self._kept = {}
        self._placement.decide(needed_bytes)

    def take(self, image_idx: int, halvings: int, following: int | None) -> ImagePixels:
        """Returns an image on the device, and starts copying the following one if it is known. The host does not wait."""
        if halvings != self._halvings:
            self._halvings, self._kept = halvings, {}
        picture = self._kept.get(image_idx)
        if picture is None:
            picture = self._arrived(image_idx, halvings)
            if self._placement.on_device:
                self._kept[image_idx] = picture
        if following is not None and following not in self._kept:
            self._arriving.request((following, halvings))
        return picture

    def present(self, image_idx: int, halvings: int) -> ImagePixels:
        """Returns an image beside that of the step, halved alike: the copy on the device, or one made now and not kept."""
        kept = self._kept.get(image_idx)
        return _received(self._send((image_idx, halvings), lambda: False)) if kept is None else kept

    def close(self) -> None:
        """Stops copying and drops the copies. Another :meth:`take` would start it again."""
        self._arriving.close()
        self._kept = {}

    def _arrived(self, image_idx: int, halvings: int) -> ImagePixels:
        try:
            upload = self._arriving.take((image_idx, halvings))
        except RuntimeError as error:
            if not (self._placement.on_device and is_out_of_memory(error)):
                raise
            self._placement.give_up()
            self._kept = {}
            upload = self._arriving.take((image_idx, halvings))
        return _received(upload)

    def _send(self, key: tuple[int, ...], stopped: Callable[[], bool]) -> Upload:
        picture = self._read(*key)
        parts = {"pixels": picture.pixels}
        if picture.valid is not None:
            parts["valid"] = picture.valid
        return self._uploader.send(parts)


def _received(upload: Upload) -> ImagePixels:
    parts = upload.receive()
    return ImagePixels(parts["pixels"], parts.get("valid"))
