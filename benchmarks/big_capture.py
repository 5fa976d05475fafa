"""Memory, speed and time of the first step with many large photos, beside a few of the same photos.

python benchmarks/big_capture.py                 # 200 photos of 2 megapixels: a trial
python benchmarks/big_capture.py --photos 2000 --width-px 4000 --height-px 3000 --steps 300 --write

Captures are links to eight files, so that 2000 photos need no disk. Each run is the plain command `ns-train METHOD
--data CAPTURE` without 2D features, whose extraction takes a time of its own, and without evaluation. What all photos
would take in main memory, as before they came in windows, stands beside.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from processes import write_report

RESULT = Path(__file__).parent / "results" / "big_capture.json"
METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
FILES, FEW, WARM_UP = 8, 40, 20
MIB = 1 << 20


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


def train(method: str, capture: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Trains, and returns what it took."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    programs = Path(sys.executable).parent
    command = [sys.executable, programs / "ns-train", *arguments(method, capture, steps)]
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
    return {
        "first_step_s": round(times[0] - began, 1),
        "steps_per_s": round((max(times) - WARM_UP) / (times[max(times)] - times[WARM_UP]), 3),
        "peak_mib": usage.ru_maxrss // 1024,
    }


def plan(method: str, capture: Path, steps: int) -> dict[str, Any]:
    """Returns the planned peak of the training steps, and the window."""
    program = Path(sys.executable).parent / "f3rm-ext"
    command = [sys.executable, program, "plan", *arguments(method, capture, steps), "--json"]
    answer = json.loads(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)
    window = {"window": answer["coverage"]["window"], "repeat": answer["coverage"]["repeat"]}
    return {"planned_mib": answer["memory"]["peak_bytes"]["train"] // MIB, **window}


def main() -> None:
    """Measures, prints a table, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--width-px", type=int, default=1600)
    parser.add_argument("--height-px", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    size, rows = (options.width_px, options.height_px), []
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-big-") as name:
        folder = Path(name)
        write_photos(folder, *size)
        for photos in (FEW, options.photos):
            capture = write_capture(folder / f"capture{photos}", folder, photos, size, masks=options.masks)
            for method in options.methods:
                run = folder / f"{method}-{photos}"
                run.mkdir()
                row = {"method": method, "photos": photos, "masks": options.masks}
                row["all_images_mib"] = round(0.9 * photos) * 3 * size[0] * size[1] // MIB
                row |= plan(method, capture, options.steps) | train(method, capture, options.steps, run)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.write:
        report = {"date": str(datetime.date.today()), "machine": platform.machine(), "cores": os.cpu_count()}
        memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
        known = json.loads(RESULT.read_text())["runs"] if RESULT.is_file() else []
        same = {(row["method"], row["photos"], row["masks"]) for row in rows}
        kept = [row for row in known if (row["method"], row["photos"], row["masks"]) not in same]
        options_used = {"size_px": size, "steps": options.steps, "memory_mib": memory_mib}
        write_report({**report, **options_used, "runs": kept + rows}, RESULT)


if __name__ == "__main__":
    main()
