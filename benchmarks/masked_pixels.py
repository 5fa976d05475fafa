r"""Object captures with masks: masked pixels ignored beside masked pixels trained as background, for both methods.

The capture is made from one in the format of NeRF-synthetic: photos over white, and a mask of the object for each.

    python benchmarks/masked_pixels.py --data chair --picture ../docs/images/masked-pixels.jpg

trains each method with `--pipeline.datamanager.masked-pixels ignore` and `background`, prints a row for each run and
writes results/masked_pixels.json: held-out metrics of the pixels that masks keep, and *fog*, the mean opacity of the
pixels that they leave out. The picture shows held-out views: the photo, and what each run renders there, unmasked.
Runs that are there already are only measured again.
"""

import gzip
import io
import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from commands import call
from PIL import Image, ImageDraw
from processes import write_report

HERE = Path(__file__).parent
METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
MASKED = ("ignore", "background")
METRICS = ("psnr", "ssim", "lpips", "l1")


def make_capture(data: Path, out: Path, size_px: int, every: int) -> None:
    """A masked capture in nerfstudio's format from one in that of NeRF-synthetic.

    Args:
        data: folder with transforms_train.json and transforms_test.json, and RGBA images.
        out: folder to write.
        size_px: sides of the images.
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


@dataclass
class MaskedPixels:
    """Trains object captures in both ways and measures what comes out."""

    data: Path
    """A capture in the format of NeRF-synthetic."""
    work: Path = Path("masked_pixels")
    """Folder of the capture and the runs."""
    size_px: int = 200
    """Sides of the images."""
    steps: int = 1500
    """Steps of each run."""
    every: int = 5
    """Which test images are measured, every n-th."""
    views: tuple[int, ...] = (0, 3)
    """Held-out views in the picture."""
    picture: Path | None = None
    """File for the picture (JPEG); none by default."""
    out: Path = HERE / "results" / "masked_pixels.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        capture = self.work / "capture"
        if not (capture / "transforms.json").exists():
            make_capture(self.data, capture, self.size_px, self.every)
        rows = []
        for method in METHODS:
            for masked in MASKED:
                rows.append(self._run(capture, method, masked))
                print(rows[-1], flush=True)
        report = {
            "python": platform.python_version(),
            "capture": self.data.name,
            "options": {"size_px": self.size_px, "steps": self.steps},
            "rows": rows,
        }
        write_report(report, self.out)
        if self.picture is not None:
            self._sheet(capture).save(self.picture, quality=88)

    def _folder(self, method: str, masked: str) -> Path:
        return self.work / "out" / "object" / method / masked

    def _run(self, capture: Path, method: str, masked: str) -> dict[str, Any]:
        run = self._folder(method, masked)
        row: dict[str, Any] = {"method": method, "masked_pixels": masked}
        if not any((run / "nerfstudio_models").glob("step-*.ckpt")):
            command = ["ns-train", method, "--data", capture, "--output-dir", self.work / "out", "--vis", "tensorboard"]
            command += ["--experiment-name", "object", "--timestamp", masked, "--max-num-iterations", self.steps]
            command += ["--pipeline.datamanager.masked-pixels", masked]
            if method.startswith("f3rm"):
                command += ["--pipeline.datamanager.train-num-rays-per-batch", 512]
                command += ["--pipeline.datamanager.features.extractors"]
            started = time.perf_counter()
            call(command)
            row["train_s"] = time.perf_counter() - started
        answers = self.work / f"{method}-{masked}.json"
        call(["ns-eval", "--load-config", run / "config.yml", "--output-path", answers])
        results = json.loads(answers.read_text())["results"]
        row |= {key: results[key] for key in METRICS if key in results}
        call(
            ["ns-render", "dataset", "--load-config", run / "config.yml", "--output-path", run / "renders"]
            + ["--split", "test", "--image-format", "png", "--rendered-output-names", "rgb", "raw-accumulation"]
        )
        row["fog"] = self._fog(capture, run)
        return row

    @staticmethod
    def _fog(capture: Path, run: Path) -> float:
        """Mean opacity of the pixels of all held-out views that masks leave out, 0 to 1."""
        found = []
        for path in sorted((run / "renders" / "test" / "raw-accumulation").glob("*.npy.gz")):
            with gzip.open(path) as stream:
                values = np.load(io.BytesIO(stream.read()))
            mask = np.asarray(Image.open(capture / "masks" / f"{path.name.split('.')[0]}.png")) > 0
            found.append(values.reshape(mask.shape)[~mask])
        return float(np.concatenate(found).mean())

    def _sheet(self, capture: Path) -> Image.Image:
        names = [Path(name).stem for name in json.loads((capture / "transforms.json").read_text())["test_filenames"]]
        columns = [("photo", None)] + [(f"{m.removesuffix('-lite')}, {k}", (m, k)) for m in METHODS for k in MASKED]
        side, head = self.size_px, 20
        sheet = Image.new("RGB", (side * len(columns), head + side * len(self.views)), "white")
        draw = ImageDraw.Draw(sheet)
        for column, (title, which) in enumerate(columns):
            draw.text((column * side + 6, 4), title, fill="black")
            for row, view in enumerate(self.views):
                path = capture / "images" / f"{names[view]}.png"
                if which is not None:
                    path = self._folder(*which) / "renders" / "test" / "rgb" / f"{names[view]}.png"
                sheet.paste(Image.open(path).convert("RGB"), (column * side, head + row * side))
        return sheet


if __name__ == "__main__":
    tyro.cli(MaskedPixels).main()
