"""CO3D v2 as the published training reads it: sets of images of one sequence, with ray maps.

Layout: ``co3d/<category>/<sequence>/{images,depths}`` and ``co3d_annotations/<category>_{train,test}.jgz``, the lists
that RayDiffusion's preparation writes: for each sequence its frames with filepath, bbox, R, T, focal_length and
principal_point, cameras as in PyTorch3D with intrinsics in NDC.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.cameras import CameraSet, PyTorch3DCameras
from f3rm_ext.sfm.rays import cell_ndc, fill_holes, render_maps, scene_scale
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.pictures import UNREADABLE

UNSEEN = frozenset(
    ["ball", "book", "couch", "frisbee", "hotdog", "kite", "remote", "sandwich", "skateboard", "suitcase"]
)
"""Categories that published models never saw."""
BAD_DEPTH = frozenset(
    [
        *("411_55952_107659", "427_59915_115716", "435_61970_121848", "112_13265_22828", "110_13069_25642"),
        *("165_18080_34378", "368_39891_78502", "391_47029_93665", "20_695_1450", "135_15556_31096"),
        "417_57572_110680",
    ]
)
"""Sequences of CO3D whose depth is bad."""
ANNOTATIONS, IMAGES = "co3d_annotations", "co3d"
CAMERA_KEYS = ("R", "T", "focal_length", "principal_point")
Split = Literal["train", "test"]
_FARTHEST = 1e5
_KEPT_IMAGES = 1000
"""Images that are always cut alike stay in memory up to this number, in each process that reads them."""
_CROP_SCALES = (0.8, 1.1)


class SceneSample(NamedTuple):
    """Some images of a sequence; the first is the frame of the maps."""

    images: Float[Tensor, "images 3 h w"]
    """Square crops, 0 to 1."""
    maps: Float[Tensor, "images 8 cells cells"]
    """Ray maps, the median point of the first camera at distance 1."""
    known: Float[Tensor, "images cells cells"]
    """1 where there is depth."""
    ndc: Float[Tensor, "images 2 patches patches"]
    """Positions of the patches in the uncropped image, in NDC."""
    focals_px: Float[Tensor, "images 2"]
    """Focal lengths of the crops."""
    principals_px: Float[Tensor, "images 2"]
    """Principal points of the crops."""
    rotations: Float[Tensor, "images 3 3"]
    """Camera to world, OpenCV axes, in the frame of the maps."""
    centers: Float[Tensor, "images 3"]
    """Positions in the frame of the maps."""
    numbers: Int64[Tensor, " images"]
    """Number of each image in the data set."""


@dataclass(frozen=True)
class _Crop:
    """A square of an image."""

    pixels: UInt8[np.ndarray, "h w 3"]
    depth: Float[np.ndarray, "cells cells"]
    known: Bool[np.ndarray, "cells cells"]
    size: tuple[int, int]
    """Width and height of the whole image, pixels."""
    corner: tuple[int, int]
    """Left and upper edge of the square in it."""
    side: int
    """Side of the square in it."""


def list_path(root: Path, category: str, split: Split) -> Path:
    """Returns where the list of a category is."""
    return root / ANNOTATIONS / f"{category}_{split}.jgz"


def depth_path(image: Path) -> Path:
    """Returns where the depth map of an image is."""
    return image.parent.parent / "depths" / f"{image.name}.geometric.png"


def read_depth(path: Path) -> Float[np.ndarray, "h w"]:
    """Reads a depth map of CO3D: a 16-bit PNG whose bits are float16."""
    try:
        with Image.open(path) as image:
            bits = np.asarray(image, dtype=np.uint16)
    except UNREADABLE as error:
        raise CaptureError(f"The depth map {path} cannot be read ({error}): download the sequence again.") from error
    return bits.view(np.float16).astype(np.float32)


def write_depth(path: Path, depth: Float[np.ndarray, "h w"]) -> None:
    """Writes a depth map as CO3D has it. Raises ConfigError if the file cannot be written."""
    with replace_file(path, "--output") as stream:
        Image.fromarray(depth.astype(np.float16).view(np.uint16)).save(stream, "PNG")


class Co3dScenes(Dataset[SceneSample]):
    """Random sets of images. A sample is determined by its number alone, so that training can go on anywhere.

    Args:
        root: folder with ``co3d`` and ``co3d_annotations``.
        categories: names; ``all_train`` for all that are there but the unseen ones.
        cells: rays along each side.
        patches: patches along each side.

    Raises:
        CaptureError: there is no such data, or no sequence has enough images.
    """

    def __init__(
        self,
        root: Path,
        categories: Sequence[str],
        split: Split,
        *,
        num_images: int,
        cells: int,
        patches: int,
        image_size_px: int,
        augment: bool,
        seed: int,
    ) -> None:
        self.root = root
        self.split: Split = split
        self.num_images, self.cells, self.patches = num_images, cells, patches
        self.image_size_px, self.augment, self.seed = image_size_px, augment, seed
        self._kept: dict[int, _Crop] = {}
        self.sequences = [
            sequence for category in find_categories(root, categories, split) for sequence in self._read(category)
        ]
        if not self.sequences:
            raise CaptureError(
                f"No sequence in {root / ANNOTATIONS} ({split}) has {num_images} images with usable cameras: download "
                "more of CO3D, or lower model.num_images."
            )
        frames = [frame for sequence in self.sequences for frame in sequence]
        for number, frame in enumerate(frames):
            frame["number"] = number
        self.num_frames = len(frames)

    def _read(self, category: str) -> list[list[dict[str, Any]]]:
        """Returns the frames of each sequence."""
        path = list_path(self.root, category, self.split)
        try:
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                annotation = json.load(stream)
        except (OSError, EOFError, ValueError) as error:
            raise CaptureError(f"The list {path} cannot be read ({error}): prepare the data again.") from error
        return [
            frames
            for name, frames in sorted(annotation.items())
            if len(frames) >= self.num_images and name not in BAD_DEPTH and _has_sane_cameras(frames)
        ]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, number: int) -> SceneSample:
        """Returns a sample; numbers beyond the last sequence begin another epoch in another order."""
        epoch, place = divmod(number, len(self.sequences))
        # The second number keeps the random numbers of epochs and samples apart.
        order = np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.sequences))
        rng = np.random.default_rng([self.seed, 1, number])
        sequence = self.sequences[order[place]]
        chosen = rng.choice(len(sequence), self.num_images, replace=False)
        return self.load([sequence[index] for index in chosen], rng)

    def load(self, frames: Sequence[dict[str, Any]], rng: np.random.Generator) -> SceneSample:
        """Reads frames and renders their ray maps."""
        crops = [self._read_crop(frame, rng) for frame in frames]
        sizes, corners, sides = ([getattr(crop, name) for crop in crops] for name in ("size", "corner", "side"))
        depth = torch.from_numpy(np.stack([crop.depth for crop in crops])).double()
        annotated = PyTorch3DCameras(
            *(torch.tensor(np.array([frame[key] for frame in frames], dtype=np.float64)) for key in CAMERA_KEYS)
        )
        whole = CameraSet.from_pytorch3d(annotated, torch.tensor(sizes, dtype=torch.float64))
        cameras = whole.crop(
            torch.tensor(corners, dtype=torch.float64), torch.tensor(sides, dtype=torch.float64), self.image_size_px
        )
        scale = scene_scale(cameras, depth)
        local = cameras.relative_to_first(scale)
        pixels = torch.from_numpy(np.stack([crop.pixels for crop in crops])).permute(0, 3, 1, 2)
        values = (
            pixels.float() / 255,
            render_maps(cameras, depth, scale),
            torch.from_numpy(np.stack([crop.known for crop in crops])),
            torch.stack([_ndc(crop, self.patches) for crop in crops]),
            *(cameras.focals_px, cameras.principals_px, local.rotations, local.centers),
        )
        numbers = torch.tensor([frame["number"] for frame in frames])
        return SceneSample(*(value.float() for value in values), numbers=numbers)

    def _read_crop(self, frame: dict[str, Any], rng: np.random.Generator) -> _Crop:
        """Reads an image and its depth, unless it is in memory."""
        if frame["number"] in self._kept:
            return self._kept[frame["number"]]
        path = self.root / IMAGES / frame["filepath"]
        try:
            with Image.open(path) as image:
                photo = image.convert("RGB")
        except UNREADABLE as error:
            raise CaptureError(f"The image {path} cannot be read ({error}): download it again.") from error
        # A square in the middle, which may reach over the edge.
        scale = rng.uniform(*_CROP_SCALES) if self.augment else 1.0
        side = max(round(min(photo.size) * scale), 1)
        left, upper = round((photo.width - side) / 2), round((photo.height - side) / 2)
        box = (left, upper, left + side, upper + side)
        pixels = photo.crop(box).resize((self.image_size_px, self.image_size_px), Image.Resampling.BILINEAR)
        depth = read_depth(depth_path(path))
        filled, known = fill_holes(_sample_cells(depth, box, photo.size, self.cells))
        crop = _Crop(np.asarray(pixels), filled, known, photo.size, (left, upper), side)
        if not self.augment and len(self._kept) < _KEPT_IMAGES:
            self._kept[frame["number"]] = crop
        return crop


def find_categories(root: Path, wanted: Sequence[str], split: Split) -> list[str]:
    """Returns the categories that are wanted. Raises CaptureError if one has no list, or there are none."""
    ending = f"_{split}.jgz"
    available = sorted(path.name.removesuffix(ending) for path in (root / ANNOTATIONS).glob(f"*{ending}"))
    if not available:
        raise CaptureError(
            f"There are no lists of CO3D in {root / ANNOTATIONS}: give the folder with dataset.path, or make one of a "
            "capture with `f3rm-ext sfm prepare`."
        )
    categories = [name for name in available if name not in UNSEEN] if "all_train" in wanted else sorted(wanted)
    missing = [category for category in categories if category not in available]
    if missing:
        raise CaptureError(
            f"CO3D's {', '.join(missing)} is not in {root / ANNOTATIONS}, which has {', '.join(available)}."
        )
    return categories


def _has_sane_cameras(frames: Sequence[dict[str, Any]]) -> bool:
    rotations = np.array([frame["R"] for frame in frames], dtype=np.float64)
    translations = np.array([frame["T"] for frame in frames], dtype=np.float64)
    determinants = np.linalg.det(rotations)
    return bool((np.abs(translations) <= _FARTHEST).all() and (np.abs(determinants - 1) <= 0.01).all())


def _ndc(crop: _Crop, patches: int) -> Float[Tensor, "2 patches patches"]:
    """Patches of a square in the NDC of the whole image, whose short side spans -1 to 1."""
    short = min(crop.size)
    middle = [(size - 2 * corner - crop.side) / short for size, corner in zip(crop.size, crop.corner, strict=True)]
    grid = cell_ndc(patches, patches, torch.empty(0, dtype=torch.float64))
    return grid * (crop.side / short) + grid.new_tensor(middle)[:, None, None]


def _sample_cells(
    depth: Float[np.ndarray, "h w"], box: tuple[int, int, int, int], size: tuple[int, int], cells: int
) -> Float[np.ndarray, "cells cells"]:
    """The depth at the cells of a crop, nearest neighbour; 0 outside of the image. Depth may have another size."""
    height, width = depth.shape
    offsets = (np.arange(cells) + 0.5) / cells
    x = np.floor((box[0] + offsets * (box[2] - box[0])) * width / size[0]).astype(int)
    y = np.floor((box[1] + offsets * (box[3] - box[1])) * height / size[1]).astype(int)
    inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None]
    return np.where(inside, depth[y.clip(0, height - 1)[:, None], x.clip(0, width - 1)[None]], 0.0)
