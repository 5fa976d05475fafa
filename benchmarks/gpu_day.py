"""Everything that a GPU has to show: a list of programs in three calls, each of which takes at most ten minutes.

    python benchmarks/gpu_day.py --data CAPTURE --call build    # compiles gsplat's kernels
    python benchmarks/gpu_day.py --data CAPTURE --call speed    # fields and splats beside their peers, queries
    python benchmarks/gpu_day.py --data CAPTURE --call checks   # tests/gpu, planned memory, pose training, MoCo
    python benchmarks/gpu_day.py --call speed --rehearse        # the same programs on the CPU, tiny sizes

Every program is a process of its own. A failure is recorded as a sentence and stops nothing else; the report is written
again after each program. A call replaces its own rows in results/gpu_day.json and keeps the others if they are of the
same machine and versions; --keep names another report to take them from. Nothing is downloaded: features are those of a
CLIP with random weights, which cost what real ones cost and mean nothing; give --extractor for others.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import attempt, last_words, result_of, run, write_report

from f3rm_ext.html.tables import Table

HERE = Path(__file__).parent
CALL_S = 585
"""Seconds of a call without its start-up."""
VANILLA, REGULARIZED = "sugar-ext without regularisation", "sugar-ext, dn-consistency"
VARIANTS = ("splatfacto", "sugar-ext without filters", VANILLA, "sugar-ext, density", REGULARIZED, "sugar-ext, planar")
PACKAGES = "torch torchvision triton diffusers nerfstudio gsplat nerfacc tinycudann numba numpy".split()
TARGETS = (
    ("f3rm-ext: Triton ÷ tiny-cuda-nn, rays/s, ≥ 0.8", "f3rm-ext, triton", "rays_per_s", "f3rm-ext, tcnn"),
    (
        "f3rm-ext, Triton ÷ nerfacto with F3RM's features, rays/s, ≥ 2",
        "f3rm-ext, triton",
        "rays_per_s",
        "nerfacto-f3rm",
    ),
    ("sugar-ext, vanilla stage ÷ splatfacto, it/s, ≥ 1", VANILLA, "steps_per_s", "splatfacto"),
    ("sugar-ext, regularised ÷ splatfacto, it/s, ≥ 0.5", REGULARIZED, "steps_per_s", "splatfacto"),
    ("text query at 1080p, splats, ms, ≤ 50", "features on splats", "query_ms", ""),
    ("text query at 1080p, field, ms, ≤ 50", "f3rm-ext, triton", "query_ms", ""),
    ("features lifted onto splats, s, ≤ 15", "features on splats", "lifting_s", ""),
)
"""What was promised before the first run: name with the wanted figure, row, key, and the row to divide by."""
COLUMNS = {
    "fields": "steps rays_per_step rays_per_s step_ms psnr ssim peak_mib launches_per_step synchronisations_per_step "
    "picture_ms query_ms",
    "splats": "gaussians steps_per_s step_ms peak_mib accounted_mib launches_per_step synchronisations_per_step",
    "splat-features": "gaussians views dimensions lifting_s lifting_peak_mib query_ms",
    "plan": "train_planned_mib train_mib evaluation_planned_mib evaluation_mib whole_planned_mib reserved_mib",
    "poses": "batch images full_step_ms step_ms steps_per_s images_per_s planned_mib peak_mib peak_to_plan "
    "whole_planned_mib reserved_mib synchronisations_per_step stage_steps stage_days",
    "moco": "batch accumulation queue step_ms steps_per_s images_per_s planned_mib peak_mib peak_to_plan "
    "whole_planned_mib reserved_mib run_steps run_hours views_images_per_s",
}
"""What the table of a section shows beside the seconds of the program; the report has more."""


@dataclass(frozen=True)
class Program:
    """One row of the report."""

    section: str
    """Its table."""
    label: str
    """Unique in the report."""
    seconds: float
    """It may take that long, and what the programs before it left over."""
    command: tuple[object, ...]
    """Arguments of Python."""
    has_result: bool = True
    """Whether it hands over a result (:func:`processes.report_result`); otherwise its exit code counts."""


def programs(options: argparse.Namespace, work: Path) -> dict[str, list[Program]]:
    """Returns the programs of each call."""
    from moco_training import PRESETS
    from plan_memory import RUNS
    from pose_training import ROWS

    small = options.rehearse
    device = "cpu" if small else "cuda"
    extractor = options.extractor or (
        "clip:model=ViT-B-32,pretrained=random,short_side_px=64"
        if small
        else "clip:model=ViT-L-14-336,pretrained=random"
    )
    cli = "from f3rm_ext.scripts.cli import main; raise SystemExit(main())"
    extract = ("-c", cli, "features", "extract", "--data", options.data)
    features = ("--features.extractors", extractor, "--device", device, "--camera-res-scale-factor", options.scale)
    picture = ("--picture", *(("64", "36") if small else ("1920", "1080")))
    splats = (
        *("--data", options.data, "--device", device, "--scale", options.scale),
        *("--count", 300 if small else options.gaussians, "--samples", 1000 if small else 1_000_000),
        *("--steps", 16 if small else 2000, "--warm-up", 2 if small else 50, "--seconds", options.seconds),
    )
    training = ("--device", device, "--seconds", options.seconds)
    training += ("--tiny", "--warm-up", 1, "--steps", 4) if small else ()
    code = "from f3rm_ext import compat; compat.check_gsplat_kernels()"
    tests = ("-m", "pytest", HERE.parent / "tests" / "gpu", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE")
    if not small and importlib.util.find_spec("xdist"):
        tests += ("-n", min(4, os.cpu_count() or 1), "--dist", "loadfile")  # most of the time is start-up
    return {
        "build": [] if small else [Program("kernels", "gsplat's kernels", CALL_S, ("-c", code), False)],
        "speed": [
            Program("features", "extraction, with start-up", 45, (*extract, *features), False),
            *(
                Program("fields", label, 40,
                        field(method, changes, options, extractor, work / f"field-{index}", picture))
                for index, (label, method, changes) in enumerate(fields(small))
            ),
            *(
                Program("splats", name, 35, (HERE / "splat_speed.py", *splats, "--one", name))
                for name in (VARIANTS[1:] if small else VARIANTS)  # splatfacto draws on CUDA only
            ),
            Program("splat-features", "features on splats", 85,
                    (HERE / "gpu_day_splats.py", *splats, "--extractor", extractor, *picture)),
        ],
        "checks": [
            Program("tests", "tests/gpu", 170, tests, False),
            *(
                Program("plan", name, 11, (HERE / "plan_memory.py", "--one", name, "--device", device,
                        *(("--tiny",) if small else ())))
                for name in RUNS
            ),
            *(Program("poses", name, 57, (HERE / "pose_training.py", "--one", name, *training)) for name in ROWS),
            *(Program("moco", name, 35, (HERE / "moco_training.py", "--one", name, *training)) for name in PRESETS),
        ],
    }  # fmt: skip


def fields(small: bool) -> list[tuple[str, str, list[str]]]:
    """Returns label, method and changed options of each field: our backends, then peers."""
    tiny = "pipeline.model.{}log2_hashmap_size=12"
    ours = [tiny.format("grid."), tiny.format("feature_grid."), "pipeline.model.num_samples=8"] if small else []
    peer = [tiny.format(""), "pipeline.model.num_proposal_samples_per_ray=(16, 8)"] if small else []
    peer += ["pipeline.model.num_nerf_samples_per_ray=8"] if small else []
    backends = ("numba", "torch") if small else ("triton", "tcnn", "torch")
    return [
        *((f"f3rm-ext, {name}", "f3rm-ext", [*ours, f"pipeline.model.backend='{name}'"]) for name in backends),
        ("nerfacto-f3rm", "nerfacto-f3rm", [*peer, *([tiny.format("feature_")] if small else [])]),
        ("nerfacto", "nerfacto", peer),
        ("f3rm-ext-big", "f3rm-ext-big", ours),
    ]


def field(
    method: str,
    changes: list[str],
    options: argparse.Namespace,
    extractor: str,
    out: Path,
    picture: tuple[object, ...],
) -> tuple[object, ...]:
    """Returns the command that trains a field for a while and measures it."""
    small = options.rehearse
    command: tuple[object, ...] = (HERE / "gpu_day_field.py", "--method", method, "--data", options.data)
    command += ("--output-dir", out, "--scale", options.scale, "--device", "cpu" if small else "cuda")
    command += ("--steps", 20 if small else 30_000, "--seconds", options.seconds, "--warm-up", 2 if small else 50)
    command += ("--rays", 64, "--views", 1) if small else ()
    command += ("--extractors", extractor) if method != "nerfacto" else ()
    command += ("--text", "a chair", *picture) if method == "f3rm-ext" else ()
    return (*command, "--change", *changes) if changes else command


def measure(program: Program, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """Returns the row of a program: its result, or the sentence with which it failed."""
    command, begin = [sys.executable, *program.command], time.monotonic()
    if limit_s < 3:
        row: dict[str, Any] = {"problem": "The time of this call was over."}
    elif program.has_result:
        row = attempt(lambda: result_of(command, limit_s, environment))
        row["query_ms"] = row.pop("query", {}).get("ms")
    else:
        code, said = run(command, limit_s, environment)
        problem = f"It was ended after {limit_s:.0f} s." if code == 124 else last_words(said, code)
        row = {"said": problem} if code == 0 else {"problem": problem, "log": said[-4000:]}
    return {"section": program.section, "label": program.label, **row, "seconds": round(time.monotonic() - begin, 1)}


def machine(rehearsal: bool) -> dict[str, Any]:
    """Returns device and versions."""
    import torch

    there = {name for name in PACKAGES if importlib.util.find_spec(name)}
    found: dict[str, Any] = {"rehearsal": rehearsal, "cores": os.cpu_count(), "python": platform.python_version()}
    found |= {"device": platform.processor() or platform.machine()}
    if torch.cuda.is_available() and not rehearsal:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_mib": properties.total_memory >> 20, "cuda": torch.version.cuda}
    distributions = importlib.metadata.packages_distributions()
    return found | {name: importlib.metadata.version(distributions[name][0]) for name in sorted(there)}


def tables(report: dict[str, Any]) -> str:
    """Returns the report as Markdown: machine, targets, a table for each section, and what failed."""
    rows = {row["label"]: row for row in report["rows"]}
    parts = [", ".join(f"{key} {value}" for key, value in {"date": report["date"], **report["machine"]}.items())]
    found = [(name, ratio(rows, label, key, peer)) for name, label, key, peer in TARGETS]
    parts.append(Table(["target", "found"], [[name, cell(value)] for name, value in found]).markdown())
    for section, columns in COLUMNS.items():
        here = [row for row in report["rows"] if row["section"] == section and "problem" not in row]
        if here:
            keys = columns.split()
            body = [[row["label"], *(cell(row.get(key)) for key in keys), cell(row["seconds"])] for row in here]
            head = [section, *(key.replace("_", " ") for key in keys), "seconds"]
            parts.append(Table(head, body).markdown())
    for row in report["rows"]:
        said = [row[key] for key in ("problem", "problem_of_all", "said") if key in row] + row.get("refused", [])
        parts += [f"{row['label']}: {sentence}".replace("|", "/") for sentence in said]
    return "\n\n".join(parts)


def ratio(rows: dict[str, dict[str, Any]], label: str, key: str, peer: str) -> float | None:
    """Returns a figure, divided by that of a peer if there is one; None if one of them was not measured."""
    value, other = (rows.get(name, {}).get(key) for name in (label, peer))
    return value if value is None or not peer else value / other if other else None


def cell(value: float | None) -> str:
    """Returns a figure with three digits or more.

    >>> cell(1234567.0), cell(20.123), cell(None)
    ('1,234,567', '20.12', '–')
    """
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


def main() -> None:
    """Runs the programs of a call, writes the report and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=["build", "speed", "checks"], required=True, help="which programs to run")
    parser.add_argument("--data", type=Path, help="a capture with a transforms.json; needed without --rehearse")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, with a synthetic capture")
    parser.add_argument("--out", type=Path, help="the report; results/gpu_day.json, or a new folder for a rehearsal")
    parser.add_argument("--keep", type=Path, help="the report whose other rows are kept; by default that of --out")
    parser.add_argument("--extractor", help="of the features; it has to understand text")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the size of the images")
    parser.add_argument("--gaussians", type=int, default=500_000, help="number of splats")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training of each method, after its warm-up")
    options = parser.parse_args()
    if not options.rehearse and options.data is None:
        parser.error("--data is missing: give a capture with a transforms.json, or --rehearse.")
    report = {"date": datetime.date.today().isoformat(), "machine": machine(options.rehearse), "rows": []}
    if not options.rehearse and "cuda" not in report["machine"]:
        parser.error("PyTorch finds no CUDA device on this machine: give --rehearse to try the programs.")
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        work = Path(folder)
        if options.rehearse:
            options.seconds = min(options.seconds, 2.0)
        if options.data is None:
            from f3rm_ext.synthetic import SynthConfig, synthesize

            room = SynthConfig(num_images=8, width=64, height=48, seed=1, light_rays=1, holdout_every=4)
            options.data = synthesize(work / "room", room, progress=False)
        options.data = options.data.resolve()
        place = Path(tempfile.mkdtemp(prefix="gpu-day-rehearsal-")) if options.rehearse else HERE / "results"
        path = options.out or place / "gpu_day.json"
        todo, before = programs(options, work)[options.call], options.keep or path
        if before.is_file():
            old, labels = json.loads(before.read_text()), {program.label for program in todo}
            if old["machine"] == report["machine"]:
                report["rows"] = [row for row in old["rows"] if row["label"] not in labels]
        environment = {
            **os.environ,
            **{"F3RM_EXT_CACHE": str(work / "cache"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
            **{"TORCHDYNAMO_DISABLE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
            **({"CUDA_VISIBLE_DEVICES": "", "F3RM_EXT_REHEARSE_GPU_TESTS": "1"} if options.rehearse else {}),
        }
        end = time.monotonic()
        for program in todo:
            end += program.seconds * (8 if options.rehearse else 1)  # CPUs are slow, and some are busy
            row = measure(program, end - time.monotonic(), environment)
            report["rows"].append(row)
            write_report(report, path, report["machine"])
            print(f"{program.label}: {row['seconds']:.0f} s. {row.get('problem', '')}", flush=True)
    print(f"\n{tables(report)}\n\nThe report is {path}.")


if __name__ == "__main__":
    main()
