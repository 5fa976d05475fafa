"""Cameras of images by a trained model, and how well those of held-out sets fit."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.diffusion.co3d import Co3dScenes
from f3rm_ext.sfm.diffusion.model import IMAGE_SIDE_PX, RayDiffuser
from f3rm_ext.sfm.diffusion.schedule import predict_in_chunks, sample
from f3rm_ext.sfm.metrics import PoseMetrics, compare_poses
from f3rm_ext.sfm.rays import cell_ndc
from f3rm_ext.sfm.recovery import recover_cameras

_MOST_IMAGES = 8
"""Images that the model takes at once; more go in groups with the first."""


def predict_maps(
    model: RayDiffuser,
    images: Float[Tensor, "images 3 h w"],
    ndc: Float[Tensor, "images 2 patches patches"],
    generator: torch.Generator,
) -> Float[Tensor, "images 8 cells cells"]:
    """Predicts the ray maps of images of one scene (square crops, 0 to 1), in the frame of the first. ``ndc`` tells
    where their patches lie in the uncropped images."""
    with torch.no_grad():
        encoded = model.encoder(images[None])

    def predict(maps: Tensor, steps: Tensor, chosen: list[int]) -> Tensor:
        return model(maps, steps, encoded.select(chosen), ndc[None, chosen]).float()

    cells = ndc.shape[-1] * model.cells
    return sample(predict_in_chunks(predict, _MOST_IMAGES), (1, len(images), cells, cells), generator)[0]


def predict_photos(
    model: RayDiffuser, photos: Iterable[UInt8[np.ndarray, "_ _ 3"]], side_px: int = IMAGE_SIDE_PX
) -> CameraSet:
    """Predicts the cameras of photos of one scene, in the frame of the first; its median point has distance 1.

    The square in the middle of each photo is used, as in training. Principal points are in the middle.

    Args:
        photos: RGB; only the present one has to be in memory.
        side_px: side of the images that the model was trained on.
    """
    model.eval()
    device = next(model.parameters()).device
    images, lengths, offsets = [], [], []
    for photo in map(Image.fromarray, photos):
        side = min(photo.size)
        left, upper = ((length - side) // 2 for length in photo.size)
        lengths.append(photo.size)
        offsets.append((left, upper))
        crop = photo.crop((left, upper, left + side, upper + side))
        pixels = np.asarray(crop.resize((side_px, side_px), Image.Resampling.BILINEAR), np.float32) / 255
        images.append(torch.from_numpy(pixels).permute(2, 0, 1))
    sizes, corners = (torch.tensor(values, dtype=torch.float64) for values in (lengths, offsets))
    patches = side_px // model.encoder.vit.patch_px
    ndc = cell_ndc(patches, patches, images[0]).expand(len(images), -1, -1, -1)
    generator = torch.Generator(device).manual_seed(0)
    maps = predict_maps(model, torch.stack(images).to(device), ndc.to(device), generator).cpu()
    scale = sizes.amin(dim=1, keepdim=True) / side_px
    cropped = recover_cameras(maps, torch.full_like(sizes, side_px))
    return replace(
        cropped,
        focals_px=cropped.focals_px * scale,
        principals_px=cropped.principals_px * scale + corners,
        sizes_px=sizes,
    )


def evaluate(model: RayDiffuser, scenes: Co3dScenes, count: int) -> list[PoseMetrics]:
    """Compares the predicted cameras of image sets with the true ones, with known intrinsics."""
    model.eval()
    device = next(model.parameters()).device
    rows = []
    for number in range(count):
        scene = scenes[number]
        generator = torch.Generator(device).manual_seed(number)
        maps = predict_maps(model, scene.images.to(device), scene.ndc.to(device), generator).cpu()
        sizes = torch.full((len(maps), 2), float(scene.images.shape[-1]))
        cameras = recover_cameras(maps, sizes, (scene.focals_px, scene.principals_px))
        true = (scene.rotations.double().numpy(), scene.centers.double().numpy())
        rows.append(compare_poses((cameras.rotations.numpy(), cameras.centers.numpy()), true))
    return rows
