"""Tells from masks and cameras whether masks cut an object out of its surroundings.

What such masks keep are silhouettes: a point of the object is kept by every photo whose frame it is in. So the ray of a
kept pixel meets a point that nearly all photos keep (a point of the visual hull, Laurentini 1994), and the ray of a
masked pixel meets none. Masks that take passers-by out know nothing of places in the scene: rays of both kinds meet the
same. What is masked in all photos alike (a lens hood, a car's bonnet) belongs to the camera and is left aside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float64
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.ground_truth import nearest
from f3rm_ext.capture.images import read_mask
from f3rm_ext.data.undistort import MAX_HALF_ANGLE_RAD, DistortedCamera
from f3rm_ext.errors import CaptureError
from f3rm_ext.utils.pictures import UNREADABLE, pick_evenly

MAX_RATIO, RATIO_PER_DISAGREEMENT = 0.5, 4.0
"""Masks are silhouettes up to this ratio of the disagreement on rays of kept pixels to that on rays of masked ones; up
to less where the latter is small and so says less. See docs/datamanager.md for masks of many kinds."""
MIN_DISAGREEMENT = 0.02
"""Disagreement of other photos on the rays of masked pixels below which masks are not judged."""
_VIEWS, _RAYS, _DEPTHS, _SIDE_PX = 24, 64, 96, 64
_NEAR, _FAR = 0.1, 30.0
"""Distances along rays, in units of the cameras' median distance from their middle."""
_MIN_SHARE_IN_FRAME = 0.3
"""Points in the frame of a smaller share of the other photos say nothing."""

Mask = Bool[np.ndarray, "h w"]


def are_silhouettes(cameras: Cameras, mask_files: Sequence[Path]) -> bool:
    """Returns whether masks cut an object out of its surroundings; the same answer for the same files.

    Reads at most 24 masks, at 64 × 64 pixels. False also where nothing can be known: masks that cannot be read, fewer
    than three photos, cameras that are neither perspective nor fisheye.

    Args:
        cameras: of the photos, at the size of the files.
        mask_files: a mask for each; non-zero means keep.
    """
    chosen = pick_evenly(len(mask_files), _VIEWS)
    try:
        masks = [nearest(read_mask(Path(mask_files[index])), _SIDE_PX, _SIDE_PX) for index in chosen]
        lenses = [DistortedCamera.of(cameras, index, mask_files[index]) for index in chosen]
    except (*UNREADABLE, CaptureError):  # A mask that cannot be read is reported where training reads it.
        return False
    if len(chosen) < 3:
        return False
    poses = cameras.camera_to_worlds[torch.tensor(chosen)].double().cpu().numpy()
    kept, masked = disagreements(poses, lenses, masks)
    return masked >= MIN_DISAGREEMENT and kept <= min(MAX_RATIO, RATIO_PER_DISAGREEMENT * masked) * masked


def disagreements(
    camera_to_worlds: Float64[np.ndarray, "cams 3 4"], lenses: Sequence[DistortedCamera], masks: Sequence[Mask]
) -> tuple[float, float]:
    """Returns how much other photos disagree to keep what is on the rays of kept pixels, and of masked pixels, 0 to 1.

    Of the other photos in whose frame a point is, some share leaves it out. The disagreement of a ray is the smallest
    such share along it; the result is the mean over rays, 0 if there are none. What is masked in every photo counts as
    outside the frame: it belongs to the camera.
    """
    frame = np.any(masks, axis=0)
    views = [View(lens, mask, frame) for lens, mask in zip(lenses, masks, strict=True)]
    poses, centres = camera_to_worlds, camera_to_worlds[:, :, 3]
    spread = float(np.median(np.linalg.norm(centres - np.median(centres, axis=0), axis=1)))
    distances = max(spread, 1e-9) * np.geomspace(_NEAR, _FAR, _DEPTHS)
    dice = np.random.default_rng(0)
    samples: dict[bool, list[float]] = {True: [], False: []}
    for index, view in enumerate(views):
        rays = np.append(dice.uniform(-1, 1, (_RAYS, 2)) * view.reach, np.full((_RAYS, 1), -1.0), axis=1)
        inside, keeps = view.look_up(rays)
        rays, keeps = rays[inside], keeps[inside]
        steps = distances[:, None] / np.linalg.norm(rays, axis=1)[:, None, None]
        points = centres[index] + (rays @ poses[index, :, :3].T)[:, None] * steps
        in_frame, kept = np.zeros(points.shape[:2]), np.zeros(points.shape[:2])
        for other in set(range(len(views))) - {index}:
            seen, kept_there = views[other].look_up((points - centres[other]) @ poses[other, :, :3])
            in_frame, kept = in_frame + seen, kept + kept_there
        known = in_frame >= max(2, _MIN_SHARE_IN_FRAME * (len(views) - 1))
        disagreement = np.where(known, 1 - kept / np.maximum(in_frame, 1), np.inf).min(axis=1)
        for value in (True, False):
            samples[value] += disagreement[(keeps == value) & (disagreement <= 1)].tolist()
    kept_rays, masked_rays = (float(np.mean(samples[value])) if samples[value] else 0.0 for value in (True, False))
    return kept_rays, masked_rays


@dataclass(frozen=True)
class View:
    """A photo's camera and mask."""

    lens: DistortedCamera
    mask: Mask
    """Pixels that are kept, stretched to some size."""
    frame: Mask
    """Pixels that count as inside the photo."""

    @property
    def reach(self) -> Float64[np.ndarray, "2"]:
        """About the largest |x| and |y| of directions (x, y, 1) in the photo."""
        frame = self.lens.frame
        pinhole = np.array([frame.width / frame.fx, frame.height / frame.fy]) / 2
        return np.full(2, np.tan(MAX_HALF_ANGLE_RAD)) if self.lens.fisheye else 1.1 * pinhole

    def look_up(
        self, points: Float64[np.ndarray, "*batch 3"]
    ) -> tuple[Bool[np.ndarray, "*batch"], Bool[np.ndarray, "*batch"]]:
        """Tells which points (camera frame: x right, y up, z backwards) are in the photo, and which its mask keeps."""
        depth = -points[..., 2]
        inside = depth > 1e-9
        depth = np.where(inside, depth, 1.0)
        x, y = points[..., 0] / depth, -points[..., 1] / depth
        # Far outside the photo the polynomial of the distortion may fold back into it.
        reach = 1.5 * self.reach
        inside &= (np.abs(x) <= reach[0]) & (np.abs(y) <= reach[1])
        column, row = self.lens.project(np.where(inside, x, 0.0), np.where(inside, y, 0.0))
        width, height = self.lens.frame.width, self.lens.frame.height
        inside &= (column >= 0) & (column < width) & (row >= 0) & (row < height)
        rows = np.where(inside, row / height * self.mask.shape[0], 0).astype(int)
        columns = np.where(inside, column / width * self.mask.shape[1], 0).astype(int)
        inside &= self.frame[rows, columns]
        return inside, inside & self.mask[rows, columns]
