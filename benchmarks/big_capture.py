"""Memory, speed and time of the first step with many large photos, beside a few of the same photos.

python benchmarks/big_capture.py                 # 200 photos of 2 megapixels: a trial
python benchmarks/big_capture.py --photos 2000 --width-px 4000 --height-px 3000 --write

Captures are links to eight files, so that 2000 photos need no disk. Each run is the plain command `ns-train METHOD
--data CAPTURE` without 2D features, whose extraction takes a time of its own, and without evaluation. Beside it stand
windows of images that take as much memory, each for ten steps per image, and what all photos would take.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from processes import read_report, write_report

from f3rm_ext.data.cycling_config import flag
from f3rm_ext.memory.devices import total_bytes

RESULT = Path(__file__).parent / "results" / "big_capture.json"
STEPS = {"f3rm-ext-lite": 700, "sugar-ext-lite": 60}
"""Steps of a run by method."""
BEGIN = {"f3rm-ext-lite": 550, "sugar-ext-lite": 40}
"""Step from which the rate is measured: fields with few images before, and splats without points with small ones."""
FILES, FEW = 8, 40
MIB, SHARE, STEPS_PER_IMAGE = 1 << 20, 1 / 8, 10
"""Share of the memory that a window of images takes."""


def write_photos(folder: Path, width_px: int, height_px: int) -> None:
    """Writes photos with detail of all sizes, and masks that leave a bar out."""
    dice = np.random.default_rng(0)
    for number in range(FILES):
        photo = np.zeros((height_px, width_px, 3), np.float32)
        for side in (8, 64, 512):
            noise = dice.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8)
            photo += np.asarray(Image.fromarray(noise).resize((width_px, height_px), Image.Resampling.BICUBIC)) / 3
        photo += dice.normal(0, 3, (height_px, width_px, 1))
        Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)
        mask = np.full((height_px, width_px), 255, np.uint8)
        mask[: height_px // 5, : width_px // (2 + number)] = 0
        Image.fromarray(mask).save(folder / f"{number}.png")


def write_capture(folder: Path, originals: Path, photos: int, size_px: tuple[int, int], *, masks: bool) -> Path:
    """Writes a capture of links to the photos, on a spiral around the origin."""
    (folder / "images").mkdir(parents=True)
    width, height = size_px
    frames: list[dict[str, Any]] = []
    for number in range(photos):
        angle = 7.3 * math.tau * number / photos
        back = np.array([math.cos(angle), math.sin(angle), 0.5 * number / photos])
        back /= np.linalg.norm(back)
        right = np.cross([0.0, 0.0, 1.0], back)
        right /= np.linalg.norm(right)
        pose = np.eye(4)
        pose[:3] = np.stack([right, np.cross(back, right), back, 2 * back], axis=1)
        frame = {"file_path": f"images/{number:05}.jpg", "transform_matrix": pose.tolist()}
        os.link(originals / f"{number % FILES}.jpg", folder / frame["file_path"])
        if masks:
            frame["mask_path"] = f"images/{number:05}.png"
            os.link(originals / f"{number % FILES}.png", folder / frame["mask_path"])
        frames.append(frame)
    lens = {"fl_x": 0.8 * width, "fl_y": 0.8 * width, "cx": width / 2, "cy": height / 2, "k1": 0.03, "k2": -0.01}
    meta = {"camera_model": "OPENCV", "w": width, "h": height, **lens, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(meta))
    return folder


def arguments(method: str, capture: Path, steps: int) -> list[str]:
    """The arguments of ns-train and of the plan."""
    words = [method, "--data", str(capture), "--max-num-iterations", str(steps), "--vis", "tensorboard"]
    words += ["--steps-per-save", "1000000", "--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"]
    return [*words, "--steps-per-eval-batch", "0", "--pipeline.datamanager.features.extractors"]


def train(method: str, words: list[str], folder: Path) -> dict[str, Any]:
    """Trains, and returns what it took."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    programs = Path(sys.executable).parent
    command = [sys.executable, programs / "ns-train", *words]
    command += ["--output-dir", folder, "--experiment-name", "run", "--timestamp", "now"]
    environment = {**os.environ, "F3RM_EXT_CACHE": str(folder / "cache")}
    log = folder / "log.txt"
    began = time.time()
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        return {"failed": log.read_text(errors="replace")[-600:]}
    events = EventAccumulator(str(folder / "run" / method / "now"), size_guidance={"scalars": 0})
    events.Reload()
    times = {event.step: event.wall_time for event in events.Scalars("Train Iter (time)")}
    begin = min(step for step in times if step >= BEGIN[method])
    return {
        "first_step_s": round(times[0] - began, 1),
        "steps_per_s": round((max(times) - begin) / (times[max(times)] - times[begin]), 3),
        "peak_mib": usage.ru_maxrss // 1024,
    }


def plan(words: list[str]) -> dict[str, Any]:
    """Returns the planned peak of the training steps, and which images and pixels are in memory."""
    program = Path(sys.executable).parent / "f3rm-ext"
    command = [sys.executable, program, "plan", *words, "--json"]
    answer = json.loads(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)
    kept = {key: answer["coverage"][key] for key in ("window", "repeat", "pixel_stride")}
    return {"planned_mib": answer["memory"]["peak_bytes"]["train"] // MIB, **kept}


def main() -> None:
    """Measures, prints a table, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--width-px", type=int, default=1600)
    parser.add_argument("--height-px", type=int, default=1200)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--methods", nargs="+", default=list(STEPS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    size, rows = (options.width_px, options.height_px), []
    memory_mib = total_bytes(torch.device("cpu")) // MIB
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-big-") as name:
        folder = Path(name)
        write_photos(folder, *size)
        image_mib = 3 * size[0] * size[1] / MIB
        window = int(SHARE * memory_mib / image_mib)
        windows = [f"--{flag('train_num_images_to_sample_from')}", str(window)]
        windows += [f"--{flag('train_num_times_to_repeat_images')}", str(STEPS_PER_IMAGE * window)]
        for photos, more in ((FEW, []), (options.photos, []), (options.photos, windows)):
            capture = folder / f"capture{photos}"
            if not capture.exists():
                write_capture(capture, folder, photos, size, masks=options.masks)
            for method in options.methods:
                row = {"method": method, "photos": photos, "masks": options.masks, "windows": bool(more)}
                row["all_images_mib"] = round(round(0.9 * photos) * image_mib)
                words = arguments(method, capture, STEPS[method])
                words[1:1] = more
                with tempfile.TemporaryDirectory(dir=folder) as run:
                    rows.append(row | plan(words) | train(method, words, Path(run)))
                print(json.dumps(rows[-1]), flush=True)
    if options.write:
        known = read_report(RESULT).get("runs", [])
        keys = ("method", "photos", "masks", "windows")
        same = {tuple(row[key] for key in keys) for row in rows}
        kept = [row for row in known if tuple(row[key] for key in keys) not in same]
        options_used = {"size_px": size, "steps": STEPS, "memory_mib": memory_mib}
        write_report({**options_used, "runs": kept + rows}, RESULT)


if __name__ == "__main__":
    main()
