"""Copies of captures from which something was taken, or to which something was added, for defaults.py."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from sparse_points import SparsePoints

Maker = Callable[[Path, Path], None]
"""Makes a capture, given the folder of all captures and the one to write."""
HELD_OUT = 5
"""Photos of a capture of few that are held out."""


def read_absolute(capture: Path) -> dict[str, Any]:
    """Returns the transforms of a capture with absolute paths of its photos, for a copy elsewhere."""
    meta = json.loads((capture / "transforms.json").read_text())
    for frame in meta["frames"]:
        frame["file_path"] = str((capture / frame["file_path"]).resolve())
    for split in ("train_filenames", "val_filenames", "test_filenames"):
        if split in meta:
            meta[split] = [str((capture / file).resolve()) for file in meta[split]]
    return meta


def with_masks(name: str, mask_of: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Maker:
    """Makes a copy of a capture in which each photo has a mask (True keeps), made from the photo."""

    def make(data: Path, out: Path) -> None:
        meta = read_absolute(data / name)
        dice = np.random.default_rng(0)
        (out / "masks").mkdir(parents=True, exist_ok=True)
        for frame in meta["frames"]:
            file = Path(frame["file_path"])
            kept = mask_of(np.asarray(Image.open(file).convert("RGB")), dice)
            frame["mask_path"] = f"masks/{file.stem}.png"
            Image.fromarray(kept.astype(np.uint8) * 255).save(out / frame["mask_path"])
        (out / "transforms.json").write_text(json.dumps(meta))

    return make


def building(photo: np.ndarray, dice: np.random.Generator) -> np.ndarray:
    """Keeps all but large areas that are quite white or quite black: the table and the dark behind it."""
    import cv2

    extreme = ((photo.min(-1) >= 245) | (photo.max(-1) <= 30)).astype(np.uint8)
    extreme = cv2.morphologyEx(extreme, cv2.MORPH_OPEN, np.ones((5, 5), np.uint8))
    parts = np.asarray(cv2.connectedComponents(extreme)[1]).astype(np.int64)
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0  # the rest
    return sizes[parts] < 0.02 * extreme.size


def passer_by(photo: np.ndarray, dice: np.random.Generator) -> np.ndarray:
    """Takes a standing figure out of two photos of three, which covers 5 to 40 % of them."""
    height, width = photo.shape[:2]
    mask = Image.new("L", (width, height), 255)
    area_px, x, y, there = dice.uniform(0.05, 0.4) * height * width, dice.random(), dice.random(), dice.random() < 2 / 3
    w = (area_px / 2) ** 0.5
    left, top = x * width - w / 2, y * height - w
    if there:
        ImageDraw.Draw(mask).ellipse((left, top, left + w, top + 2.5 * w), fill=0)
    return np.asarray(mask) > 0


def without_points(name: str) -> Maker:
    """Makes a copy of a capture that has no points."""

    def make(data: Path, out: Path) -> None:
        meta = read_absolute(data / name)
        meta.pop("ply_file_path", None)
        out.mkdir(parents=True, exist_ok=True)
        (out / "transforms.json").write_text(json.dumps(meta))

    return make


def with_sparse_points(name: str) -> Maker:
    """Makes a copy of a capture that has the points that structure from motion would find."""
    return lambda data, out: SparsePoints(data / name, out).main()


def with_few(name: str, count: int) -> Maker:
    """Makes a copy of a capture with few training photos, evenly spread, and with the points that they give."""

    def make(data: Path, out: Path) -> None:
        meta = read_absolute(data / name)
        frames: list[dict[str, Any]] = meta["frames"]
        held = set(np.linspace(2, len(frames) - 3, HELD_OUT).round().astype(int).tolist())
        others = [index for index in range(len(frames)) if index not in held]
        train = {others[place] for place in np.linspace(0, len(others) - 1, count).round().astype(int)}
        for split, chosen in (("train", train), ("val", held), ("test", held)):
            meta[f"{split}_filenames"] = [frames[index]["file_path"] for index in sorted(chosen)]
        meta["frames"] = [frames[index] for index in sorted(train | held)]
        without = out.with_name(f"{out.name}-without-points")
        without.mkdir(parents=True, exist_ok=True)
        (without / "transforms.json").write_text(json.dumps(meta))
        SparsePoints(without, out).main()

    return make


def make_capture(data: Path, out: Path, size_px: int, every: int) -> None:
    """A masked capture in nerfstudio's format from one in that of NeRF-synthetic.

    Args:
        data: folder with transforms_train.json and transforms_test.json, and RGBA images.
        every: which test images are taken, every n-th.
    """
    for folder in ("images", "masks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    frames: dict[str, list[dict[str, Any]]] = {}
    angle = 0.0
    for split, step in (("train", 1), ("test", every)):
        meta = json.loads((data / f"transforms_{split}.json").read_text())
        angle = meta["camera_angle_x"]
        frames[split] = []
        for frame in meta["frames"][::step]:
            photo = Image.open(data / (frame["file_path"] + ".png")).convert("RGBA")
            photo = np.asarray(photo.resize((size_px, size_px), Image.Resampling.BOX)).astype(np.float32)
            alpha = photo[..., 3:] / 255
            name = f"{split}_{Path(frame['file_path']).name}.png"
            shown = np.rint(photo[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
            Image.fromarray(shown).save(out / "images" / name)
            Image.fromarray((alpha[..., 0] >= 0.5).astype(np.uint8) * 255).save(out / "masks" / name)
            entry = {"file_path": f"images/{name}", "mask_path": f"masks/{name}"}
            frames[split].append(entry | {"transform_matrix": frame["transform_matrix"]})
    focal = size_px / 2 / math.tan(angle / 2)
    meta = {"camera_model": "OPENCV", "w": size_px, "h": size_px, "fl_x": focal, "fl_y": focal}
    meta |= {"cx": size_px / 2, "cy": size_px / 2, "frames": frames["train"] + frames["test"]}
    for split, key in (("train", "train"), ("test", "val"), ("test", "test")):
        meta[f"{key}_filenames"] = [frame["file_path"] for frame in frames[split]]
    (out / "transforms.json").write_text(json.dumps(meta, indent=1))
