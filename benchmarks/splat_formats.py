"""Formats of splats: size, loss and time to write, beside splat-transform's conversion of the same PLY.

python benchmarks/splat_formats.py --load-config RUN/config.yml
python benchmarks/splat_formats.py --load-config RUN/config.yml --many 300000

Each format is written from the Gaussians of a run, with its filter in them. Where the format is read, too, the loss is
that of the PSNR on held-out photos, and the pictures of these cameras are compared with those of the Gaussians before.
Where `splat-transform` (npm) is on the PATH, it converts the PLY file to the same format. Times are CPU seconds of all
threads, with the start of the program for splat-transform. `--many` measures only .sog, of so many Gaussians: those of
the run, repeated with jitter. Writes results/splat_formats.json.
"""

import json
import math
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from processes import read_report, write_report

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.budget import SplatBudget
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.profiling.memory import MIB, peak_bytes, reset_peak
from f3rm_ext.splat.files.convert import convert_splats
from f3rm_ext.splat.files.formats import SUFFIXES, WRITE_ONLY, read_splats, write_splats
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rendering import render

_CONVERTED = (".compressed.ply", ".spz", ".sog", ".glb")
"""Formats that splat-transform writes."""
_CAMERAS = 8


@dataclass
class SplatFormats:
    """Measures all formats on a run of splats."""

    load_config: Path
    """config.yml of the run."""
    out: Path = Path(__file__).with_name("results") / "splat_formats.json"
    """The JSON file to write."""
    repeats: int = 3
    """How often each format is written."""
    many: int | None = None
    """Measures .sog of so many Gaussians instead: writing, reading, and a limit of half the size."""
    limit_s: float = 900.0
    """Longest time of a conversion by splat-transform, s."""

    def main(self) -> None:
        """Measures, and writes the results."""
        run = load_splat_run(self.load_config)
        report = read_report(self.out)
        if self.many is not None:
            report["many"] = {"run": self.load_config.parents[2].name, **measure_sog(repeat(run.splats(), self.many))}
            print(json.dumps(report["many"]))
            write_report(report, self.out)
            return
        judge = Judge(run)
        program = shutil.which("splat-transform")
        info = SplatInfo(render_mode="mip" if run.model.config.mip.filter_2d else "default")
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source.ply"
            write_splats(source, judge.gaussians, info)
            for suffix in SUFFIXES:
                for version in (3, 4) if suffix == ".spz" else (3,):
                    row = self._ours(Path(folder) / f"ours{version}{suffix}", judge, info, version)
                    if program is not None and suffix in _CONVERTED:
                        row["theirs"] = self._theirs(program, source, suffix, version, judge)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        report |= {
            "torch": torch.__version__,
            "splat_transform": None if program is None else version_of(program),
            "capture": run.manager.train_dataset.image_filenames[0].parent.parent.name,
            "method": run.config.method_name,
            "steps": run.step + 1,
            "gaussians": len(judge.gaussians),
            "sh_degree": judge.gaussians.sh_degree,
            "psnr": round(judge.psnr, 2),
            "rows": rows,
        }
        write_report(report, self.out)

    def _ours(self, path: Path, judge: "Judge", info: SplatInfo, version: Any) -> dict[str, Any]:
        times = []
        for _ in range(self.repeats):
            path.unlink(missing_ok=True)
            before = time.process_time()
            write_splats(path, judge.gaussians, info, spz_version=version)
            times.append(time.process_time() - before)
        named = path.name.removeprefix(f"ours{version}")
        row = {"format": f"{named} {version}" if named == ".spz" else named, "bytes": path.stat().st_size}
        row |= {"write_cpu_s": round(statistics.median(times), 3)}
        return row | ({} if SUFFIXES[named] in WRITE_ONLY else judge.losses(read_splats(path)[0]))

    def _theirs(self, program: str, source: Path, suffix: str, version: int, judge: "Judge") -> dict[str, Any]:
        path = source.with_name(f"theirs{suffix}")
        typed = [program, "-w", "--gpu", "cpu", *(["--spz-version", str(version)] if suffix == ".spz" else [])]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            subprocess.run([*typed, str(source), str(path)], check=True, capture_output=True, timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            return {"longer_than_s": self.limit_s}
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        row = {"bytes": path.stat().st_size}
        row |= {"write_cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3)}
        if SUFFIXES[suffix] in WRITE_ONLY:
            return row
        axes = "rub" if version_of(program).startswith("2.") else "ply"
        return row | judge.losses(read_splats(path, spz_axes=axes)[0])


class Judge:
    """Compares Gaussians with those of a run, on at most eight held-out photos and in pictures of their cameras."""

    def __init__(self, run: SplatRun) -> None:
        self._budget = SplatBudget(run, Path("splats.ply"))
        self.gaussians = self._budget.gaussians
        self._run = run
        cameras = PinholeCameras.of(run.photos.cameras).to(run.model.device)
        step = -(-len(cameras.widths) // _CAMERAS)
        self._views = [cameras.take(slice(at, at + 1)) for at in range(0, len(cameras.widths), step)]
        self.psnr = self._budget.psnr(self.gaussians)
        self._pictures = self._draw(self.gaussians)

    def losses(self, gaussians: Gaussians) -> dict[str, float | None]:
        """The loss of PSNR on photos, dB, and the PSNR of pictures to those of the run, dB (None: the same)."""
        moved = gaussians.to(self.gaussians.means.device)
        errors = [
            (ours - theirs).square().mean() for ours, theirs in zip(self._draw(moved), self._pictures, strict=True)
        ]
        psnr = float(-10 * torch.stack(errors).log10().mean())
        shown = round(psnr, 1) if math.isfinite(psnr) else None
        return {"lost_db": round(self.psnr - self._budget.psnr(moved), 4), "picture_psnr": shown}

    @torch.no_grad()
    def _draw(self, gaussians: Gaussians) -> list[torch.Tensor]:
        scene = self._run.scene(gaussians)
        return [render(scene, view).outputs()["rgb"].clamp(0, 1) for view in self._views]


def repeat(gaussians: Gaussians, count: int) -> Gaussians:
    """Returns so many Gaussians: those given in turn, inside each other, with a tenth of the spread of other values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(count) % len(gaussians)
    tensors = {}
    for name, values in gaussians.to("cpu").tensors().items():
        spread = gaussians.scales.cpu().exp()[rows] if name == "means" else 0.1 * values.std(dim=0)
        tensors[name] = values[rows] + spread * torch.randn(count, *values.shape[1:], generator=generator)
    return Gaussians.from_tensors(tensors)


def measure_sog(gaussians: Gaussians) -> dict[str, Any]:
    """CPU seconds and peak memory of writing, reading and reducing a .sog, and its size."""
    cpu = torch.device("cpu")
    row: dict[str, Any] = {"gaussians": len(gaussians), "sh_degree": gaussians.sh_degree}
    with tempfile.TemporaryDirectory() as folder:
        source, out, small = (Path(folder) / name for name in ("source.ply", "out.sog", "small.sog"))
        write_splats(source, gaussians, SplatInfo())
        steps: dict[str, Callable[[], object]] = {
            "write": lambda: write_splats(out, gaussians, SplatInfo()),
            "read": lambda: read_splats(out),
            "reduce": lambda: convert_splats(source, small, max_mb=out.stat().st_size / 2e6),
        }
        for name, step in steps.items():
            reset_peak(cpu)
            resident, before = peak_bytes(cpu), time.process_time()
            step()
            row[f"{name}_cpu_s"] = round(time.process_time() - before, 1)
            row[f"{name}_peak_mib"] = round((peak_bytes(cpu) - resident) / MIB)
        return row | {"bytes": out.stat().st_size, "reduced_bytes": small.stat().st_size}


def version_of(program: str) -> str:
    """The version of splat-transform."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"v([\d.]+)", told.stdout + told.stderr)
    return match[1] if match else "unknown"


if __name__ == "__main__":
    tyro.cli(SplatFormats).main()
