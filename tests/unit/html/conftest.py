"""A report's content with pictures, without any training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.html.content import ReportContent, Stage


@pytest.fixture
def make_content(tmp_path: Path) -> Callable[..., ReportContent]:
    """Content as the demo gives it for a room with two held-out views; keyword arguments replace fields."""
    rng = np.random.default_rng(0)

    def save(name: str) -> str:
        Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
        return f"{name}.png"

    def view(number: int) -> dict[str, Any]:
        names = ("true", "rendered", "depth", "features", "true_depth", "true_features")
        return {
            "image": f"frame_{number}.png",
            "width": 16,
            "height": 12,
            "depth_error_m": {"median": 0.02, "within_5cm": 0.75},
            "files": {name: save(f"view_{number}_{name}") for name in names},
        }

    def make(**fields: Any) -> ReportContent:
        save("exemplar_photo"), save("exemplar_crop")
        found = [{"view": 0, "row": 1, "col": 2, "cosine": 0.97, "visible": True, "inside": True, "file": save("h0")}]
        found.append({**found[0], "view": 1, "inside": False, "file": save("h1")})
        objects = [
            {"name": "duck", "image": "a.png", "x": 3.0, "y": 4.0, "views": 2, "hits": 1, "iou": 0.25},
            {"name": "vase", "image": "b.png", "x": 5.0, "y": 6.0, "views": 2, "hits": 2, "iou": 0.75},
            {"name": "hidden", "image": "b.png", "x": 5.0, "y": 6.0, "views": 0, "hits": 0, "iou": None},
        ]
        measured = {
            "steps": 100,
            "device": "cpu",
            "heads": {"dense-daisy": "dense-daisy"},
            "train_images": 9,
            "eval_images": 2,
            "views": [view(0), view(1)],
            "depth": {"median_m": 0.0213, "within_5cm": 0.75, "views": 2},
            "query": {
                "head": "dense-daisy",
                "image": "a.png",
                "x": 3.0,
                "y": 4.0,
                "object": "duck",
                "low": 0.5,
                "high": 0.97,
                "views": found,
                "mask_cosine": 0.93,
                "objects": objects,
            },
        }
        images = [
            {"image": f"i{k}.png", "pixels": 100, "appearances": 1, "steps": 50, "rays": 50 + k} for k in range(9)
        ]
        defaults: dict[str, Any] = {
            "title": "A room",
            "data_name": "room",
            "synthetic": True,
            "measured": measured,
            "pictures": tmp_path,
            "metrics": {
                "psnr": 24.5,
                "psnr_std": 0.5,
                "ssim": 0.8,
                "l1": 0.03,
                "feature_cosine_dense-daisy": 0.95,
                "feature_mse_dense-daisy": 1e-3,
                "num_rays_per_sec": 12345.0,
            },
            "lpips_note": "LPIPS is left out: its weights are not there.",
            "coverage": {
                "images": 9.0,
                "images_seen": 9.0,
                "appearances_min": 1.0,
                "appearances_max": 1.0,
                "rays": 486.0,
                "effective_epochs": 0.54,
                "per_image": images,
            },
            "curves": {
                "Train Metrics Dict/psnr": [(0.0, 10.0), (50.0, 18.0), (99.0, 22.0)],
                "Train Rays / Sec": [(0.0, 1.0), (1.0, 8000.0), (2.0, 9000.0)],
            },
            "stages": [Stage("Making the room", 20.0, "f3rm-ext scene synth capture"), Stage("Training", 100.0)],
            "next_commands": [("Look", "ns-viewer --load-config config.yml")],
            "facts": [("device", "cpu")],
        }
        return ReportContent(**{**defaults, **fields})

    return make
