"""A window of images with their features in memory, and the two halves of making a batch from it.

The first half runs on the CPU, ahead of time in a background thread: it draws pixels and, where the window is in main
memory, gathers what belongs to them. The second half runs on the training device. What is copied between them is small:
bytes of pixels, and unconverted features of patches.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from f3rm_ext.data.pixel_sampler import PackedPixels, PixelDraw, to_colors
from f3rm_ext.data.uploads import Upload, Uploader
from f3rm_ext.features.sampling import PackedMaps, interpolate


@dataclass(frozen=True)
class LoadedWindow:
    """The pixels and features of a window."""

    pixels: PackedPixels
    features: dict[str, PackedMaps]
    on_device: bool = False
    """Whether colours and features are on the training device; tables are on the CPU all the same."""
    arriving: Upload | None = None
    """Colours and features on their way there; see :meth:`receive`."""

    @property
    def images(self) -> tuple[int, ...]:
        """The images' indices in the data set."""
        return self.pixels.images

    @property
    def nbytes(self) -> int:
        """Memory that colours and features take, in bytes."""
        return self.pixels.pixels.nbytes + sum(maps.values.nbytes for maps in self.features.values())

    def to(self, device: torch.device) -> "LoadedWindow":
        """Returns the window with colours and features on a device."""
        features = {name: replace(maps, values=maps.values.to(device)) for name, maps in self.features.items()}
        return LoadedWindow(self.pixels.to(device), features, on_device=True)

    def upload(self, uploader: Uploader) -> "LoadedWindow":
        """Returns the window with colours and features on their way to a device, for :meth:`receive`.

        This thread waits for the copy, as in :meth:`to`, but the device goes on.
        """
        upload = uploader.send(
            {"": self.pixels.pixels, **{name: maps.values for name, maps in self.features.items()}}, page_locked=False
        )
        features = {name: replace(maps, values=upload.tensors[name]) for name, maps in self.features.items()}
        return LoadedWindow(replace(self.pixels, pixels=upload.tensors[""]), features, True, upload)

    def receive(self) -> "LoadedWindow":
        """Returns the window for use on the current stream, which waits for what was sent; the host does not."""
        if self.arriving is not None:
            self.arriving.receive()
        return replace(self, arriving=None)


@dataclass(frozen=True)
class Draft:
    """The first half of a batch."""

    rays_of_slots: Int64[Tensor, "cams"]
    """Number of rays from each image of the window; on the CPU."""
    upload: Upload
    """``indices``; ``places`` or ``pixels``; and for each feature NAME, ``weights/NAME`` with ``patches/NAME`` or
    ``values/NAME``: what to gather on the device, or what was gathered on the CPU."""


def draft_batch(window: LoadedWindow, drawn: PixelDraw, featured: int, uploader: Uploader) -> Draft:
    """Makes the first half of a batch, of which the first ``featured`` pixels get features."""
    parts = {"indices": drawn.indices}
    if window.on_device:
        parts["places"] = drawn.places
    else:
        parts["pixels"] = _gather(window.pixels.pixels, drawn.places, uploader)
    slots, yx_px = drawn.slots[:featured], centres_px(drawn.indices[:featured])
    for name, maps in window.features.items():
        patches, parts[f"weights/{name}"] = maps.corners(slots, yx_px)
        if window.on_device:
            parts[f"patches/{name}"] = patches
        else:
            parts[f"values/{name}"] = _gather(maps.values, patches.reshape(-1), uploader)
    counts = torch.bincount(drawn.slots, minlength=len(window.images))
    return Draft(counts, uploader.send(parts))


def finish_batch(window: LoadedWindow, draft: Draft) -> dict[str, Any]:
    """Makes the second half of a batch, see :meth:`PixelStream.next`. The host waits for nothing."""
    parts = draft.upload.receive()
    pixels = window.pixels.pixels.index_select(0, parts["places"]) if window.on_device else parts["pixels"]
    batch: dict[str, Any] = {"image": to_colors(pixels), "indices": parts["indices"]}
    features: dict[str, Tensor] = {}
    for name, maps in window.features.items():
        weights = parts[f"weights/{name}"]
        if window.on_device:
            values = maps.values.index_select(0, parts[f"patches/{name}"].reshape(-1))
        else:
            values = parts[f"values/{name}"]
        features[name] = interpolate(zip(values.view(*weights.shape, -1), weights, strict=True))
    if features:
        batch["features"] = features
    return batch


def centres_px(indices: Int64[Tensor, "rays 3"]) -> Tensor:
    """Centres (y, x) of pixels given by image, row and column, px."""
    return indices[:, 1:].float() + 0.5


def _gather(values: Tensor, rows: Int64[Tensor, "_"], uploader: Uploader) -> Tensor:
    buffer = uploader.buffer((len(rows), *values.shape[1:]), values.dtype)
    return torch.index_select(values, 0, rows, out=buffer)
