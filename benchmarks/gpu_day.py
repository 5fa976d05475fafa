"""Everything that a GPU has to show, in three commands of ten minutes: kernels, then speed, then tests and memory.

    python benchmarks/gpu_day.py --data CAPTURE --call build     # needs CUDA; writes results/gpu_day.json
    python benchmarks/gpu_day.py --data CAPTURE --call speed --keep benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --data CAPTURE --call checks --keep benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --rehearse          # the same programs on the CPU, with tiny sizes

Sections: kernels (gsplat is compiled; seconds where its wheel has them, see build_kernels.py), features (extracted),
fields (f3rm-ext with every hash-grid backend there is, f3rm-ext-big, nerfacto, nerfacto with F3RM's features), splats
(sugar-ext beside splatfacto with the same Gaussians), splat-features (lifting, and a text query), tests (tests/gpu),
plan (planned memory beside what is allocated), poses and moco (training DiffusionSfM at the published size, and MoCo
with the four presets: step time, and memory beside the plan). Every measurement is a process of its own. A failure is
recorded with its sentence and stops nothing else; the file is written again after every row.

Without --call or --only it runs all sections, within --minutes. --keep names the report whose other sections are taken
over; it may lie elsewhere than the new one, as where outputs are emptied at each call.
Nothing is downloaded. Features are those of a CLIP with random weights, which cost what real ones cost and mean
nothing; give --extractor for others.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import moco_training
import plan_memory
import pose_training
from gpu_day_report import (
    BUDGETS_S,
    CALLS,
    F3RM_PEER,
    PEER,
    PLANAR,
    REGULARIZED,
    VANILLA,
    Day,
    Part,
    tables,
    write_report,
)
from processes import attempt, last_words, result_of, run

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "diffusers",
    "nerfstudio",
    "gsplat",
    "nerfacc",
    "tinycudann",
    "numba",
    "numpy",
)
VARIANTS = (PEER, "sugar-ext without filters", VANILLA, "sugar-ext, density", REGULARIZED, PLANAR)
REPORTED = re.compile(r"(?P<name>\S+::.+?) (?P<state>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
REPORTED_BY_WORKER = re.compile(r"\[gw\d+\] \[ *\d+%\] (?P<state>PASSED|FAILED|ERROR|SKIPPED|XFAIL) (?P<name>\S+::.+)")
SMALL_FIELD = [
    "pipeline.model.grid.log2_hashmap_size=12",
    "pipeline.model.feature_grid.log2_hashmap_size=12",
    "pipeline.model.num_samples=8",
]
SMALL_NERFACTO = [
    "pipeline.model.log2_hashmap_size=12",
    "pipeline.model.num_proposal_samples_per_ray=(16, 8)",
    "pipeline.model.num_nerf_samples_per_ray=8",
]
PATIENCE = 8
"""How many times as long everything may take in a rehearsal: CPUs are slow, and some are busy."""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a capture with a transforms.json; needed without --rehearse")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, with a synthetic capture")
    parser.add_argument("--out", type=Path, help="the report; results/gpu_day.json, or for a rehearsal a new folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--call", choices=list(CALLS), help="run the sections of one of the three calls")
    what.add_argument("--only", nargs="+", choices=list(BUDGETS_S), help="sections to run; all by default")
    parser.add_argument("--keep", type=Path, help="a report whose other sections are kept, if it is of this machine")
    parser.add_argument("--minutes", type=float, default=10.0, help=f"for all sections; × {PATIENCE} in a rehearsal")
    parser.add_argument("--extractor", help="of the features; it has to understand text")
    parser.add_argument("--scale", type=float, default=1.0, help="ratio of the images' sides to those of the files")
    parser.add_argument("--gaussians", type=int, default=500_000, help="number of splats")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training of each method, after its warm-up")
    return parser


class GpuDay:
    """The sections of a GPU day.

    Args:
        options: of the command line.
        work: an empty folder.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.device = "cpu" if options.rehearse else "cuda"
        tiny = "clip:model=ViT-B-32,pretrained=random,short_side_px=64"
        full = "clip:model=ViT-L-14-336,pretrained=random"
        self.extractor: str = options.extractor or (tiny if options.rehearse else full)
        self.picture = ("64", "36") if options.rehearse else ("1920", "1080")
        self.environment = {
            **os.environ,
            "F3RM_EXT_CACHE": str(work / "cache"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TORCHDYNAMO_DISABLE": "1",
        }
        if options.rehearse:
            self.environment |= {"CUDA_VISIBLE_DEVICES": "", "F3RM_EXT_REHEARSE_GPU_TESTS": "1"}

    def kernels(self, part: Part) -> None:
        """Compiles gsplat's kernels, which torch keeps for later processes."""
        if self.device == "cpu":
            part.row("gsplat", lambda _: {"problem": "On the CPU there is nothing to compile."})
            return
        code = (
            "from processes import report_result; from f3rm_ext import compat; compat.check_gsplat_kernels();"
            "report_result({'kernels': 'usable'})"
        )
        part.row("gsplat's kernels", self._measured("-c", code))

    def tests(self, part: Part) -> None:
        """Runs tests/gpu. Without CUDA only those run that may be rehearsed on the CPU."""
        part.row("tests/gpu", self._run_tests)

    def features(self, part: Part) -> None:
        """Extracts the features that the fields distil, so that no training pays for it."""

        def extract(limit_s: float) -> dict[str, Any]:
            command = [Path(sys.executable).parent / "f3rm-ext", "features", "extract", "--data", self.options.data]
            command += ["--features.extractors", self.extractor, "--device", self.device]
            command += ["--camera-res-scale-factor", self.options.scale]
            code, said = run(command, limit_s, self.environment)
            return {} if code == 0 else {"problem": last_words(said, code), "log": said[-2000:]}

        part.row("extraction, with start-up", extract)

    def fields(self, part: Part) -> None:
        """Trains fields for the same time."""
        small = self.options.rehearse
        nerfacto, ours = (SMALL_NERFACTO, SMALL_FIELD) if small else ([], [])
        there = "tiny-cuda-nn" if self.device == "cuda" and is_there("tinycudann") else "torch"
        runs: list[tuple[str, str, list[str], str]] = []
        for backend, problem in backends(self.device).items():
            if problem:
                part.row(f"f3rm-ext, {backend}", lambda _, problem=problem: {"problem": problem})
            else:
                runs.append((f"f3rm-ext, {backend}", "f3rm-ext", [*ours, f"pipeline.model.backend='{backend}'"], "ask"))
        peer = ["pipeline.model.feature_log2_hashmap_size=12"] if small else []
        runs.append((F3RM_PEER, "nerfacto-f3rm", [*nerfacto, *peer], ""))
        runs.append(("nerfacto", "nerfacto", nerfacto, ""))
        runs.append(("f3rm-ext-big", "f3rm-ext-big", ours, ""))
        for index, (label, method, changes, query) in enumerate(runs):
            command = [HERE / "gpu_day_field.py", "--method", method, "--data", self.options.data]
            command += ["--output-dir", self.work / f"field-{index}", "--scale", self.options.scale]
            command += ["--device", self.device, "--steps", 20 if small else 30_000]
            command += ["--seconds", self.options.seconds, "--warm-up", 2 if small else 50]
            if method != "nerfacto":
                command += ["--extractors", self.extractor]
            if query:
                command += ["--text", "a chair", "--picture", *self.picture]
            if small:
                command += ["--rays", 64, "--views", 1]
            command += ["--change", *changes] if changes else []
            part.row(label, self._measured(*command), share=max(0.4, 1 / (len(runs) - index)))
            rows = part.section["rows"]
            rows[-1].setdefault("grids", there if method.startswith("nerfacto") else None)

    def splats(self, part: Part) -> None:
        """Trains splats whose number stays the same."""
        from splat_speed import accounted_mib

        for index, name in enumerate(VARIANTS):
            if self.device == "cpu" and name == PEER:
                part.row(name, lambda _: {"problem": "splatfacto draws on CUDA only."})
                continue
            command = [HERE / "splat_speed.py", *self._splat_options(), "--one", name]
            part.row(name, self._measured(*command), share=max(0.4, 1 / (len(VARIANTS) - index)))
            account = accounted_mib(name, self._gaussians, self._points)
            part.section["rows"][-1]["accounted_mib"] = account and round(account)

    def splat_features(self, part: Part) -> None:
        """Lifts features onto splats and queries them."""
        command = [HERE / "gpu_day_splats.py", *self._splat_options(), "--extractor", self.extractor]
        part.row("sugar-ext", self._measured(*command, "--picture", *self.picture))

    def plan(self, part: Part) -> None:
        """Compares planned memory with what torch's allocator hands out."""
        names = list(plan_memory.RUNS)
        for index, name in enumerate(names):
            command = [HERE / "plan_memory.py", "--one", name, "--device", self.device]
            command += ["--tiny"] if self.options.rehearse else []
            part.row(name, self._measured(*command), share=max(0.4, 1 / (len(names) - index)))

    def poses(self, part: Part) -> None:
        """Trains the pose estimator at the published size, beside its plan."""
        self._training(part, "pose_training.py", list(pose_training.ROWS))

    def moco(self, part: Part) -> None:
        """Pre-trains with MoCo's presets, beside their plans."""
        self._training(part, "moco_training.py", list(moco_training.PRESETS))

    def _training(self, part: Part, program: str, names: list[str]) -> None:
        for index, name in enumerate(names):
            command = [HERE / program, "--one", name, "--device", self.device, "--seconds", self.options.seconds]
            command += ["--tiny", "--warm-up", 1, "--steps", 4] if self.options.rehearse else []
            part.row(name, self._measured(*command), share=max(0.4, 1 / (len(names) - index)))

    @property
    def _gaussians(self) -> int:
        return 300 if self.options.rehearse else self.options.gaussians

    @property
    def _points(self) -> int:
        return 1000 if self.options.rehearse else 1_000_000

    def _splat_options(self) -> list[object]:
        small = self.options.rehearse
        return [
            *("--data", self.options.data, "--device", self.device, "--scale", self.options.scale),
            *("--count", self._gaussians, "--samples", self._points, "--steps", 16 if small else 2000),
            *("--seconds", self.options.seconds, "--warm-up", 3 if small else 50),
        ]

    def _measured(self, *command: object) -> typing.Callable[[float], dict[str, Any]]:
        def measure(limit_s: float) -> dict[str, Any]:
            environment = {**self.environment, "PYTHONPATH": str(HERE)}
            return attempt(lambda: result_of([sys.executable, *command], limit_s, environment))

        return measure

    def _run_tests(self, limit_s: float) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", ROOT / "tests" / "gpu", "-v", "-p", "no:cacheprovider"]
        command += ["--tb=line", "-W", "ignore", "--durations=0", "--durations-min=5"]
        if self.device == "cuda" and is_there("xdist"):
            command += ["-n", min(4, os.cpu_count() or 1), "--dist", "loadfile"]  # most of the time is start-up
        # Output that comes line by line keeps what was found when the time is over.
        environment = {**self.environment, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        code, said = run(command, limit_s, environment)
        found = read_tests(said)
        if code == 124:
            found["problem_of_all"] = f"The tests were ended after {limit_s:.0f} s."
        elif not any(found[key] for key in ("passed", "failed", "skipped")):
            return {"problem": last_words(said, code), "log": said[-2000:]}
        return {**found, "log": said[-4000:] if found["failed"] or code == 124 else ""}


def read_tests(said: str) -> dict[str, Any]:
    """Counts what `pytest -v` reported, with or without xdist, also if it was ended before its summary.

    >>> read_tests("tests/a.py::b PASSED [ 50%]\\n[gw0] [100%] FAILED tests/a.py::c[1]\\n")["failures"]
    ['tests/a.py::c[1]']
    """
    states: Counter[str] = Counter()
    failures: list[str] = []
    for line in said.splitlines():
        if match := REPORTED.match(line) or REPORTED_BY_WORKER.match(line):
            state, name = match["state"], match["name"]
            states[state] += 1
            if state in ("FAILED", "ERROR"):
                failures.append(name)
    return {
        "passed": states["PASSED"],
        "failed": states["FAILED"] + states["ERROR"],
        "skipped": states["SKIPPED"] + states["XFAIL"],
        "failures": failures,
    }


def is_there(module: str) -> bool:
    """Whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def backends(device: str) -> dict[str, str]:
    """Returns the hash-grid backends of a device, each with why it cannot be measured or an empty text."""
    from f3rm_ext.nerf.hash_grid import Backend

    known = typing.get_args(Backend)
    if device == "cpu":
        return {name: "" for name in ("numba", "torch")}
    missing = {
        "tcnn": "" if is_there("tinycudann") else "tiny-cuda-nn (tinycudann) is not installed.",
        "triton": "" if is_there("triton") else "Triton is not installed.",
        "torch": "",
    }
    return {name: why if name in known else "This version has no such backend." for name, why in missing.items()}


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Returns machine, versions and options, for the report."""
    import torch

    device = platform.processor() or platform.machine()
    machine: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    if torch.cuda.is_available() and not options.rehearse:
        properties = torch.cuda.get_device_properties(0)
        device = properties.name
        machine |= {"memory_mib": properties.total_memory >> 20, "capability": f"{properties.major}.{properties.minor}"}
        machine["cuda"] = torch.version.cuda
    machine |= {"device": device, "nvcc": shutil.which("nvcc") is not None}
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.date.today().isoformat(),
        "rehearsal": options.rehearse,
        "machine": machine,
        "versions": versions,
        "capture": "synthetic room" if options.data is None else options.data.name,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
    }


def make_capture(folder: Path) -> Path:
    """Makes a small synthetic capture."""
    from f3rm_ext.synthetic import SynthConfig, synthesize

    config = SynthConfig(num_images=8, width=64, height=48, seed=1, light_rays=1, holdout_every=4)
    return synthesize(folder / "room", config, progress=False)


def main() -> None:
    """Runs the sections, writes the report and prints its tables."""
    parser = make_parser()
    options = parser.parse_args()
    if not options.rehearse:
        import torch

        if options.data is None:
            parser.error("--data is missing: give a capture with a transforms.json, or --rehearse.")
        if not torch.cuda.is_available():
            parser.error("This machine has no CUDA device that PyTorch can use: give --rehearse to try the programs.")
    report = describe(options)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        work = Path(folder)
        options.data = make_capture(work) if options.data is None else options.data.resolve()
        if options.rehearse:
            options.seconds = min(options.seconds, 2.0)
        path = options.out
        if path is None and options.rehearse:
            path = Path(tempfile.mkdtemp(prefix="gpu-day-rehearsal-")) / "gpu_day.json"
        path = path or HERE / "results" / "gpu_day.json"
        sections_to_run = options.only or list(CALLS[options.call] if options.call else BUDGETS_S)
        if options.keep:
            report["sections"] = kept_sections(json.loads(options.keep.read_text()), report, sections_to_run)
        patience = PATIENCE if options.rehearse else 1
        day = Day(report, path, 60 * options.minutes * patience)
        sections = GpuDay(options, work)
        begin = time.monotonic()
        for name in sections_to_run:
            found = day.run(name, BUDGETS_S[name] * patience, functools.partial(call, sections, name))
            print(f"{name}: {found['state']} after {found['seconds']:.0f} s. {found.get('problem', '')}", flush=True)
        report["seconds"] = round(time.monotonic() - begin, 1)
        write_report(report, path)
    print(f"\n{tables(report)}\n\nThe report is {path}.")


def kept_sections(before: dict[str, Any], report: dict[str, Any], anew: list[str]) -> dict[str, Any]:
    """Returns the sections of an earlier report that are not measured anew; none if it is of another machine.

    Args:
        before: the earlier report.
        report: the new one.
        anew: names of its sections.
    """
    if any(before.get(key) != report[key] for key in ("rehearsal", "machine", "versions")):
        return {}
    return {name: section for name, section in before.get("sections", {}).items() if name not in anew}


def call(sections: GpuDay, name: str, part: Part) -> None:
    """Runs the method of a section."""
    getattr(sections, name.replace("-", "_"))(part)


if __name__ == "__main__":
    main()
