"""DiffusionSfM's tiny model on the rooms of `f3rm-ext scene synth`, on one CPU core: data, encoder and measurements.

    f3rm-ext scene synth room1 --num-images 128 --width 112 --height 84 --seed 1 --light-rays 4
    f3rm-ext sfm prepare --output data --category room --captures room1
    python benchmarks/tiny_diffusion.py encoder --data data --vit dinov2_vits14.pth --out encoder.pth
    f3rm-ext sfm train model.size=tiny model.encoder_weights=encoder.pth dataset.path=data dataset.category=room \
        dataset.image_size=56 training.full_num_patches_x=4 training.full_num_patches_y=4 ...
    python benchmarks/tiny_diffusion.py measure --data data --checkpoint run/checkpoints/ckpt_00001000.pth

The encoder has the first ten blocks of a ViT-S/14, and its final norm is fitted to the images: every channel has mean 0
and variance 1 over all patches. Image sets are drawn from the test list.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import load_state_dict
from f3rm_ext.sfm.diffusion.checkpoint import build_model, image_side_px, read_weights
from f3rm_ext.sfm.diffusion.co3d import Co3dScenes
from f3rm_ext.sfm.diffusion.encoder import ImageEncoder
from f3rm_ext.sfm.diffusion.prediction import evaluate, predict_maps
from f3rm_ext.sfm.rays import map_points

CATEGORY, PATCH_PX, BLOCKS, DENSE = "room", 14, 10, 16


def scenes(data: Path, split: str, side_px: int, images: int, cells: int) -> Co3dScenes:
    patches = side_px // PATCH_PX
    return Co3dScenes(
        data,
        [CATEGORY],
        "train" if split == "train" else "test",
        num_images=images,
        cells=cells,
        patches=patches,
        image_size_px=side_px,
        augment=False,
        seed=0,
    )


def write_encoder(data: Path, vit: Path, side_px: int, out: Path) -> None:
    """Writes the first blocks of a ViT with a norm fitted to the training images."""
    state = {
        name: value.float()
        for name, value in load_state_dict(vit).items()
        if not name.startswith("blocks.") or int(name.split(".")[1]) < BLOCKS
    }
    encoder = ImageEncoder(VisionTransformer.from_state_dict(dict(state)))
    found = scenes(data, "train", side_px, 2, side_px // PATCH_PX)
    patches = []
    with torch.no_grad():
        for sequence in found.sequences:
            images = found.load(sequence.frames, np.random.default_rng(0)).images
            patches += [encoder(part[None]).patches[0].movedim(1, -1).flatten(0, 2) for part in images.split(8)]
    values = torch.cat(patches)
    mean, deviation = values.mean(dim=0), values.std(dim=0)
    state["norm.weight"] = state["norm.weight"] / deviation
    state["norm.bias"] = (state["norm.bias"] - mean) / deviation
    torch.save(state, out)


def endpoint_error(maps: Tensor, true: Tensor, known: Tensor) -> float:
    """Mean distance of endpoints in the frame of the first camera, whose median point is at distance 1.

    Cells of the maps are repeated to those of the truth.
    """
    found, wanted = map_points(maps)[1], map_points(true)[1]
    times = true.shape[-1] // maps.shape[-1]
    found = found.repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    return float((found - wanted).norm(dim=-1)[known > 0].mean())


def measure(data: Path, path: Path, count: int, images: int, split: str) -> dict[str, float]:
    """Means over image sets: poses with known intrinsics, and endpoints at 16 × 16 cells per patch."""
    model = build_model(read_weights(path)).eval()
    side_px = image_side_px(path)
    patches = side_px // PATCH_PX
    poses = evaluate(model, scenes(data, split, side_px, images, patches * model.cells), count)
    found = {
        "RRA@15": float(np.mean([one.rra["15"] for one in poses])),
        "RRA@30": float(np.mean([one.rra["30"] for one in poses])),
        "RTA@15": float(np.mean([one.rta["15"] for one in poses])),
        "AUC@30": float(np.mean([one.auc_30 for one in poses])),
        "centres": float(np.mean([one.center_accuracy for one in poses])),
    }
    truth, errors = scenes(data, split, side_px, images, patches * DENSE), []
    for number in range(count):
        scene = truth[number]
        maps = predict_maps(model, scene.images, scene.ndc, torch.Generator().manual_seed(number))
        errors.append(endpoint_error(maps, scene.maps, scene.known))
    return {**found, "endpoint error": float(np.mean(errors))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("encoder", "measure"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vit", type=Path, help="ViT-S/14 whose blocks are used")
    parser.add_argument("--out", type=Path, default=Path("encoder.pth"))
    parser.add_argument("--checkpoint", type=Path, nargs="*", default=[])
    parser.add_argument("--side", type=int, default=56, help="side of the images, pixels")
    parser.add_argument("--sets", type=int, default=32)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--split", choices=("train", "test"), default="test")
    options = parser.parse_args()
    if options.what == "encoder":
        write_encoder(options.data, options.vit, options.side, options.out)
    for path in options.checkpoint:
        values = measure(options.data, path, options.sets, options.images, options.split)
        print(json.dumps({"checkpoint": str(path), **{name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
