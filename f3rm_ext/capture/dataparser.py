"""nerfstudio's dataparser, also for COLMAP's models, with checks: bad captures are refused with one clear sentence."""

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from nerfstudio.cameras.cameras import CAMERA_MODEL_TO_TYPE
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.nerfstudio_dataparser import (
    MAX_AUTO_RESOLUTION,
    Nerfstudio,
    NerfstudioDataParserConfig,
)
from nerfstudio.plugins.registry_dataparser import DataParserSpecification
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.capture import checks
from f3rm_ext.capture.colmap_model import MODEL_KEY, align_z_up
from f3rm_ext.capture.images import COPY_FACTORS, allow_large_photos, image_size, image_sizes, name_some
from f3rm_ext.capture.points import read_capture_points
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.utils.ranges import Range, check_ranges


@dataclass
class CaptureDataParserConfig(NerfstudioDataParserConfig):
    """Options of :class:`CaptureDataParser`."""

    _target: type = field(default_factory=lambda: CaptureDataParser)
    """Class to build."""
    eval_mode: Literal["auto", "fraction", "filename", "interval", "all"] = "auto"  # type: ignore[assignment]
    """How images are held out if the capture has no split lists: a fraction, those with eval in their file name, every
    eval-interval-th, or all for both. auto takes interval for COLMAP's models, as 3DGS does, and else fraction."""
    train_split_fraction: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of images for training, (0, 1], with eval-mode fraction."""
    load_3D_points: bool = False
    """Read the points of the capture, at which splats are initialised.
    They come from ply_file_path in transforms.json, otherwise from COLMAP's model."""
    drop_missing_frames: bool = False
    """Leave out frames whose image files are missing."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value cannot work."""
        check_ranges(self)
        if self.eval_interval < 1:
            raise ConfigError(f"--eval-interval is {self.eval_interval}, but it has to be 1 or more.")
        if self.downscale_factor is not None and self.downscale_factor < 1:
            raise ConfigError(f"--downscale-factor is {self.downscale_factor}, but it has to be 1 or more.")


class CaptureDataParser(Nerfstudio):
    """Reads a capture in nerfstudio's format, or a COLMAP model, after checking it; never changes its files.

    Frames may have their own intrinsics and size, and lists of evaluation images may be missing.
    """

    config: CaptureDataParserConfig

    def __init__(self, config: CaptureDataParserConfig) -> None:
        super().__init__(config)
        self._checked: checks.Meta | None = None
        self._folder = Path()
        self._opens_images = True

    def _generate_dataparser_outputs(self, split: str = "train") -> DataparserOutputs:
        """Returns cameras and files of a split. Raises CaptureError if the capture cannot be used."""
        if self._checked is None:
            # nerfstudio sets a factor beforehand if it needs only the cameras; images may be absent then.
            self._opens_images = self.downscale_factor is None
            self._checked = self._check()
        meta = self._checked
        meta = checks.check_splits(meta, split, drop_unknown=self.config.drop_missing_frames)
        try:
            # nerfstudio would ask whether it may write to the capture, and only warn of missing points.
            self.prompted_user, self.create_pc = True, False
            without_points = {key: value for key, value in meta.items() if key != "ply_file_path"}
            if MODEL_KEY in meta:
                without_points = align_z_up(without_points)
            outputs = _inject_transforms(Nerfstudio._generate_dataparser_outputs, without_points)(self, split)
        except ValueError as error:
            if self.config.eval_mode != "filename":
                raise
            raise CaptureError(f"Images cannot be split by file name: {error}.") from error
        radius_px = (outputs.cameras.metadata or {}).get("fisheye_crop_radius")
        if radius_px is not None:  # nerfstudio scales cameras to reduced copies of the photos, but not this
            outputs.cameras.metadata["fisheye_crop_radius"] = radius_px / self.downscale_factor  # type: ignore[index]
        if self._opens_images:
            self._fit_cameras(outputs, meta)
        if self.config.load_3D_points and split == "train":
            outputs.metadata.update(read_capture_points(meta, self._folder, outputs))
        return outputs

    def _check(self) -> checks.Meta:
        """The transforms, checked, without frames that are to be dropped."""
        allow_large_photos()
        meta, folder = checks.read_transforms(Path(self.config.data))
        self._folder = folder
        if self.config.eval_mode == "auto":
            self.config = replace(self.config, eval_mode="interval" if MODEL_KEY in meta else "fraction")
        checks.require_images(len(meta["frames"]), self.config.data)
        if self._opens_images or self.config.drop_missing_frames:
            meta = self._drop_missing(meta, folder)
        checks.check_frame_poses(meta["frames"])
        if self.config.auto_scale_poses:
            checks.check_places(meta["frames"])
        if checks.ORIGIN_KEY in meta:
            origin = ", ".join(f"{value:.10g}" for value in meta[checks.ORIGIN_KEY])
            CONSOLE.log(
                "The cameras lie far from the origin, as in geographic coordinates: all positions, also those of "
                f"exports, are relative to ({origin}).",
                markup=False,
            )
        meta = checks.per_frame_intrinsics(meta)
        checks.check_intrinsics(meta)
        meta = checks.share_camera_model(meta, CAMERA_MODEL_TO_TYPE)
        for key in ("mask_path", "depth_file_path"):
            checks.check_same_keys(meta["frames"], key)
        return meta

    def _drop_missing(self, meta: checks.Meta, folder: Path) -> checks.Meta:
        """Refuses or drops frames whose files are missing; determines the downscale factor."""
        if self.downscale_factor is None and self.config.downscale_factor is None:
            self.downscale_factor = _only_copies(meta, folder)
        if self.downscale_factor is None and self.config.downscale_factor is None:
            # nerfstudio looks at the first original image to choose a factor.
            meta = self._keep_present(meta, lambda path: folder / path)
            image_size(folder / meta["frames"][0]["file_path"])
            self._get_fname(Path(meta["frames"][0]["file_path"]), folder)
            masks = [Path(frame["mask_path"]) for frame in meta["frames"] if "mask_path" in frame]
            if not all(self._get_fname(mask, folder, "masks_").is_file() for mask in masks):
                self.downscale_factor = 1  # reduced copies of the photos do not help without those of the masks
        return self._keep_present(meta, lambda path: self._get_fname(Path(path), folder))

    def _keep_present(self, meta: checks.Meta, locate: Callable[[str], Path]) -> checks.Meta:
        paths = [locate(frame["file_path"]) for frame in meta["frames"]]
        there = {path for path in paths if path.is_file()}
        missing = [path for path in paths if path not in there]
        if not missing:
            return meta
        kept = [frame for frame, path in zip(meta["frames"], paths, strict=True) if path in there]
        sentence = f"{len(missing)} of {len(meta['frames'])} images of the capture are not there ({name_some(missing)})"
        if not kept and (self.config.downscale_factor or 1) > 1:
            raise CaptureError(
                f"--downscale-factor {self.config.downscale_factor} reads images that were downscaled beforehand, and "
                f"there are none in {missing[0].parent}: use --pipeline.datamanager.camera-res-scale-factor "
                f"{1 / self.config.downscale_factor:.3g} instead, which scales while reading."  # type: ignore[operator]
            )
        if not self.config.drop_missing_frames:
            raise CaptureError(
                f"{sentence}: copy them back, or remove their frames from transforms.json; `ns-train` leaves them out "
                "with `f3rm-ext-data --drop-missing-frames True` at its end."
            )
        checks.require_images(len(kept), f"{self.config.data} without its missing frames")
        CONSOLE.log(f"Going on without missing frames: {sentence}.", markup=False)
        return {**meta, "frames": kept}

    def _fit_cameras(self, outputs: DataparserOutputs, meta: checks.Meta) -> None:
        """Checks image sizes against cameras; adopts the files' size where rounding makes a difference of one pixel."""
        sizes = image_sizes(outputs.image_filenames)
        cameras = outputs.cameras
        slack = 0 if self.downscale_factor == 1 else 1
        for i, ((width, height), path) in enumerate(zip(sizes, outputs.image_filenames, strict=True)):
            stated = int(cameras.width[i]), int(cameras.height[i])
            if abs(width - stated[0]) > slack or abs(height - stated[1]) > slack:
                halved = "" if slack == 0 else f" after downscaling by {self.downscale_factor}"
                raise CaptureError(
                    f"The image {path} has {width} x {height} pixels, but its camera has {stated[0]} x {stated[1]}"
                    f"{halved}: give this frame its own w, h, fl_x, fl_y, cx and cy, or resize the image."
                )
        if self.downscale_factor != 1:
            whole = {Path(frame["file_path"]).name: {**meta, **frame} for frame in meta["frames"]}
            frames = [whole[path.name] for path in outputs.image_filenames]
            # A copy shows the whole photo, so the sides of one whose size was rounded have factors of their own.
            for axis, side, names in ((0, "w", ("fx", "cx")), (1, "h", ("fy", "cy"))):
                factors = [size[axis] / frame[side] for size, frame in zip(sizes, frames, strict=True)]
                for name in names:
                    value = getattr(cameras, name) * self.downscale_factor
                    setattr(cameras, name, value * torch.tensor(factors, dtype=value.dtype)[:, None])
        for side, axis in (("width", 0), ("height", 1)):
            dtype = getattr(cameras, side).dtype
            setattr(cameras, side, torch.tensor([size[axis] for size in sizes], dtype=dtype)[:, None])
        if outputs.mask_filenames:
            self._check_masks(outputs.mask_filenames, outputs.image_filenames, sizes)

    def _check_masks(self, masks: list[Path], images: list[Path], sizes: list[tuple[int, int]]) -> None:
        for mask, image, size, mask_size in zip(masks, images, sizes, image_sizes(masks, masks=True), strict=True):
            if mask_size != size:
                raise CaptureError(
                    f"The mask {mask} has {mask_size[0]} x {mask_size[1]} pixels, but its image {image} has "
                    f"{size[0]} x {size[1]}: make them equal."
                )


def _only_copies(meta: checks.Meta, folder: Path) -> int | None:
    """The factor of reduced copies (``images_4``) where all photos themselves are missing; None otherwise."""
    first = {**meta, **meta["frames"][0]}
    name = Path(first["file_path"]).name
    factors = [factor for factor in COPY_FACTORS if (folder / f"images_{factor}" / name).is_file()]
    if not factors or any((folder / frame["file_path"]).is_file() for frame in meta["frames"]):
        return None
    sides = (first.get(key) for key in "wh")
    longest_px = max((side for side in sides if isinstance(side, int | float)), default=0)
    factor = next((factor for factor in factors if longest_px / factor <= MAX_AUTO_RESOLUTION), factors[-1])
    CONSOLE.log(f"The photos are missing, and their copies in images_{factor} are used.", markup=False)
    return factor


def _inject_transforms(generate: Callable[..., Any], meta: checks.Meta) -> Callable[..., Any]:
    """Returns a copy of nerfstudio's method that sees these transforms instead of the file.

    The method reads the file through the global ``load_from_json``. The copy has its own globals with another
    ``load_from_json``, so neither the file nor nerfstudio's module is changed.
    """
    if "load_from_json" not in generate.__code__.co_names:
        raise RuntimeError("nerfstudio's dataparser no longer reads transforms.json by load_from_json.")
    names = {**generate.__globals__, "load_from_json": lambda path: meta}
    return types.FunctionType(generate.__code__, names, generate.__name__, generate.__defaults__, generate.__closure__)


capture_dataparser = DataParserSpecification(
    config=CaptureDataParserConfig(),
    description="Capture with transforms.json (nerfstudio's format) or sparse/0 (COLMAP's), checked before use.",
)
"""The entry point for nerfstudio's registry of dataparsers."""
