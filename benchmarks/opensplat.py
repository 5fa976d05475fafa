"""`sugar-ext-lite` and `f3rm-ext-lite` beside OpenSplat on the CPU: time of a step, and quality after equal times.

    python benchmarks/opensplat.py --data CAPTURE --opensplat PROGRAM --torch-home DIR

writes results/opensplat.json. OpenSplat is a program of its own (AGPL), to be built without CUDA from its source:

    cmake -B build -DGPU_RUNTIME=CPU -DCMAKE_PREFIX_PATH=LIBTORCH -DCMAKE_BUILD_TYPE=Release && cmake --build build

with libtorch for the CPU and OpenCV. Without ``--opensplat`` its rows are left out, and the report says so. All
programs read the same photos, reduced beforehand, and begin at the same points of stereo. The held-out photos (each
eighth, where the capture has no lists) are compared with what `ns-eval` draws of our runs, and with OpenSplat's
Gaussians drawn as it trains them: without antialiasing, on black, and with the principal point in the middle of the
picture. Times are those of the training loop, on all cores unless the row says otherwise: the machine has to be quiet.
"""

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from cpu_training import evaluate
from PIL import Image
from processes import read_report, require_result, write_report

from f3rm_ext.capture.checks import read_transforms

HERE = Path(__file__).parent
SPEED = ((20_000, (200, 150), 40), (100_000, (800, 600), 12))
"""Gaussians, width and height of the photos, and steps, for the time of a step; the first third is not counted."""
QUALITY = SPEED[0]
"""The same for quality after equal times; a trial of so many steps, of ours three times as many, tells the pace."""
SH_DEGREE = 2
"""That of `sugar-ext-lite`."""
WORLD_FRAME = (
    "pipeline.datamanager.dataparser.orientation_method='none'",
    "pipeline.datamanager.dataparser.center_method='none'",
    "pipeline.datamanager.dataparser.auto_scale_poses=False",
)
"""Changes that leave the scene where the capture has it."""
FIXED_COUNT = (
    "pipeline.model.densify.max_gaussians=1_000_000",
    "pipeline.model.densify.strategy='none'",
    "pipeline.model.sh_steps_per_degree=1",
    "pipeline.datamanager.num_downscales=0",
)
"""Changes that keep Gaussians, colours and photos the same from the first step on."""
PLAIN = ("pipeline.model.regularization='none'", "pipeline.datamanager.stereo_points='never'")
"""Changes that leave out what OpenSplat does not have: regularisation, and points besides the given ones."""


@dataclass
class OpenSplat:
    """Compares the methods."""

    data: Path
    """A capture with a transforms.json, cameras without distortion."""
    opensplat: Path | None = None
    """The program opensplat."""
    torch_home: Path | None = None
    """A TORCH_HOME with AlexNet's weights: `ns-eval` of the methods needs it off-line."""
    seconds: tuple[int, ...] = (30, 60, 120)
    """Training times after which quality is measured."""
    speed: bool = True
    """Measure the time of a step."""
    out: Path = HERE / "results" / "opensplat.json"
    """Where the figures are written; captures of before are kept."""

    def main(self) -> None:
        report = {"captures": {}, **read_report(self.out), "opensplat": self._version()}

        def add(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_report(report, self.out)

        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            if self.speed:
                report["speed"] = {"capture": self.data.name, "rows": []}
                self._speeds(functools.partial(add, report["speed"]["rows"]))
            if self.seconds:
                count, size, _ = QUALITY
                captures = report["captures"]
                captures[self.data.name] = {"gaussians": count, "size": list(size), "rows": []}
                self._qualities(functools.partial(add, captures[self.data.name]["rows"]))

    def _version(self) -> str:
        if self.opensplat is None:
            return "left out: no program was given by --opensplat"
        return subprocess.run([self.opensplat, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    @cached_property
    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | ({"TORCH_HOME": str(self.torch_home.resolve())} if self.torch_home else {})

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        """The points of stereo (N, 3), in the frame of the capture, and their colours."""
        from f3rm_ext.capture.dataparser import CaptureDataParserConfig
        from f3rm_ext.data.stereo.points import seek_points

        parser = CaptureDataParserConfig(
            data=self.data, orientation_method="none", center_method="none", auto_scale_poses=False
        )
        points = seek_points(parser.setup().get_dataparser_outputs("train"))
        return np.asarray(points.xyz), np.asarray(points.rgb)

    def _scene(self, count: int, size: tuple[int, int]) -> Path:
        """Writes the photos at a size, with so many points: `transforms.json` with all frames, `peer/` with the others.

        Points that are too few are taken several times, a little apart.
        """
        from f3rm_ext.utils.ply import write_ply

        meta, source = read_transforms(self.data)
        scene = self.folder / f"{count}_{size[0]}x{size[1]}"
        (scene / "images").mkdir(parents=True)
        (scene / "peer").mkdir()
        generator = np.random.default_rng(0)
        xyz, rgb = self._points
        rows = np.resize(generator.permutation(len(xyz)), count)
        spread = 1e-3 * np.ptp(xyz, axis=0) * (np.arange(count) >= len(xyz))[:, None]
        places = (xyz[rows] + spread * generator.standard_normal((count, 3))).astype(np.float32)
        columns = {name: places[:, i] for i, name in enumerate("xyz")}
        columns |= {name: rgb[rows, i].astype(np.uint8) for i, name in enumerate(("red", "green", "blue"))}
        with (scene / "points.ply").open("wb") as stream:
            write_ply(stream, columns)
        frames = []
        for frame in meta["frames"]:
            lens = {**meta, **frame}
            if any(lens.get(name) for name in ("k1", "k2", "p1", "p2")):
                raise SystemExit(f"{self.data} has lenses with distortion: give a capture without.")
            path = scene / "images" / f"{Path(frame['file_path']).stem}.png"
            with Image.open(source / frame["file_path"]) as image:
                wide, high = size[0] / image.width, size[1] / image.height
                kernel = Image.Resampling.BOX if wide < 1 else Image.Resampling.BICUBIC
                image.convert("RGB").resize(size, kernel).save(path)
            frames.append(
                {
                    "file_path": str(path),
                    "transform_matrix": frame["transform_matrix"],
                    "fl_x": lens["fl_x"] * wide,
                    "fl_y": lens.get("fl_y", lens["fl_x"]) * high,
                    "cx": lens["cx"] * wide,
                    "cy": lens["cy"] * high,
                    "w": size[0],
                    "h": size[1],
                }
            )
        listed = {Path(name).stem for name in meta.get("test_filenames", ())}
        held_out = [Path(f["file_path"]).stem in listed if listed else i % 8 == 0 for i, f in enumerate(frames)]
        train, test = ([f for f, out in zip(frames, held_out, strict=True) if out is kind] for kind in (False, True))
        splits = {"train": train, "val": test, "test": test}
        lists = {f"{split}_filenames": [f["file_path"] for f in those] for split, those in splits.items()}
        ours = {"camera_model": "PINHOLE", "frames": frames, "ply_file_path": "points.ply", **lists}
        peers = ours | {"frames": train, "ply_file_path": str(scene / "points.ply")}
        (scene / "transforms.json").write_text(json.dumps(ours))
        (scene / "peer" / "transforms.json").write_text(json.dumps(peers))
        return scene

    def _speeds(self, add: Callable[[dict[str, Any]], None]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for count, size, steps in SPEED:
            scene = self._scene(count, size)
            for threads in range(1, min(len(cores), 2) + 1):
                os.sched_setaffinity(0, cores[:threads])  # of this process, and of those that it starts
                told = {"gaussians": count, "size": list(size), "threads": threads}
                ours = self._train("sugar-ext-lite", scene, steps, (*PLAIN, *FIXED_COUNT))
                if ours["gaussians"] != count:
                    raise SystemExit(f"Ours began with {ours['gaussians']} Gaussians instead of {count}.")
                add(told | {"program": "sugar-ext-lite", **_times(ours)})
                if self.opensplat is not None:
                    never = ("--densify-from", 10**9, "--sh-degree-interval", 1)
                    add(told | {"program": "OpenSplat", **_times(self._run_peer(scene, steps, *never))})
            os.sched_setaffinity(0, cores)
            shutil.rmtree(scene)

    def _qualities(self, add: Callable[[dict[str, Any]], None]) -> None:
        count, size, trial = QUALITY
        scene = self._scene(count, size)
        ours = {"sugar-ext-lite": PLAIN, "f3rm-ext-lite": ()}
        # How many steps a time allows has to be known beforehand: schedules stretch over them.
        paces_ms = {
            program: self._train(
                program, scene, 3 * trial, (*changes, "pipeline.datamanager.num_downscales=0") if changes else ()
            )["step_ms_median"]
            for program, changes in ours.items()
        }
        if self.opensplat is not None:
            paces_ms["OpenSplat"] = self._run_peer(scene, trial)["step_ms_median"]
        for seconds in self.seconds:
            for program, changes in ours.items():
                done = self._train(program, scene, int(1e3 * seconds / paces_ms[program]), changes)
                psnr = evaluate(Path(done["config"]), self._environment)["psnr"]
                add({"program": program, "seconds": seconds, **_times(done), "psnr": psnr})
            if self.opensplat is None:
                continue
            steps = int(1e3 * seconds / paces_ms["OpenSplat"])
            part = max(20, steps // 10)  # it crashes if it adds Gaussians before all its optimisers have stepped
            fitted = ("--sh-degree-interval", part, "--densify-from", part, "--refine-every", part)
            schedules: dict[str, tuple[object, ...]] = {"OpenSplat, schedule fitted to the time": fitted}
            if seconds == max(self.seconds):
                schedules["OpenSplat, its defaults"] = ()
            for program, arguments in schedules.items():
                done = self._run_peer(scene, steps, *arguments)
                psnr = self._judge(scene, done["splats"])
                add({"program": program, "seconds": seconds, **_times(done), "psnr": psnr})

    def _train(self, method: str, scene: Path, steps: int, changes: tuple[str, ...]) -> dict[str, Any]:
        out = tempfile.mkdtemp(dir=self.folder)
        command = [sys.executable, HERE / "train_once.py", "--method", method, "--data", scene, "--output-dir", out]
        changes = (*WORLD_FRAME, *changes) if method == "sugar-ext-lite" else changes
        change = ("--change", *changes) if changes else ()
        return require_result([*command, "--steps", steps, "--scale", 1.0, *change], self._environment)

    def _run_peer(self, scene: Path, steps: int, *arguments: object) -> dict[str, Any]:
        assert self.opensplat is not None
        splats = Path(tempfile.mkdtemp(dir=self.folder)) / "splats.ply"
        fixed = ("-o", splats, "-n", steps, "--cpu", "--sh-degree", SH_DEGREE)
        typed = [self.opensplat, scene / "peer", *fixed, *arguments]
        process = subprocess.Popen(list(map(str, typed)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        at, status = [], ""
        for line in process.stdout:
            if line.startswith("Step "):
                at.append(time.perf_counter())
                # Not rusage, which counts what this process had when it forked.
                status = Path(f"/proc/{process.pid}/status").read_text() if len(at) % 10 == 0 else status
        process.wait()
        if not splats.exists():
            raise SystemExit(f"{' '.join(map(str, typed))} wrote nothing.")
        with splats.open("rb") as stream:
            count = next(int(line.split()[2]) for line in stream if line.startswith(b"element vertex"))
        ms = 1e3 * np.diff(at)[len(at) // 3 :]
        q1, median, q3 = statistics.quantiles(ms, n=4)
        return {
            "steps": len(at),
            "train_s": at[-1] - at[0],
            "step_ms_median": median,
            "step_ms_q1": q1,
            "step_ms_q3": q3,
            "peak_rss_mib": int(status.split("VmHWM:")[1].split()[0]) // 1024,
            "gaussians": count,
            "splats": splats,
        }

    @torch.no_grad()
    def _judge(self, scene: Path, splats: Path) -> float:
        """The mean PSNR of all held-out photos, dB, drawn as OpenSplat trains on the CPU.

        It has no antialiasing, draws on black and takes the principal point to be the middle of the picture.
        """
        from f3rm_ext.data.image_stream import picture_batch
        from f3rm_ext.data.pinhole_cameras import PinholeCameras
        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.splat.files.formats import read_splats
        from f3rm_ext.splat.rendering import render

        filters = ("pipeline.model.mip.filter_2d=False", "pipeline.model.mip.filter_3d=False")
        config = Path(self._train("sugar-ext-lite", scene, 8, (*PLAIN, *filters))["config"])
        run = load_splat_run(config)
        gaussians, photos, values = read_splats(splats)[0], run.photos, []
        for index in range(len(photos)):
            view = PinholeCameras.to_render(photos.cameras[index : index + 1], run.model.device)
            view.Ks[:, :2, 2] = torch.stack([view.widths, view.heights], dim=1) / 2
            picture = render(run.scene(gaussians), view).outputs()["rgb"].clamp(0, 1)
            truth = picture_batch(photos.picture(index), index, run.model.device)["image"]
            values.append(float(-10 * (picture - truth).square().mean().log10()))
        return statistics.mean(values)


def _times(result: dict[str, Any]) -> dict[str, Any]:
    """What the rows have of a training."""
    names = ("steps", "train_s", "step_ms_median", "step_ms_q1", "step_ms_q3", "peak_rss_mib", "gaussians")
    return {name: round(result[name], 2) for name in names if name in result}


if __name__ == "__main__":
    tyro.cli(OpenSplat).main()
