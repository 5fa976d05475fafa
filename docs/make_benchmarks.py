"""Writes the tables of the pages in `PAGES` from benchmarks/results/*.json.

python docs/make_benchmarks.py          # rewrite
python docs/make_benchmarks.py --check  # fail if it is out of date
"""

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mesh_tables
from markdown_table import Report, quality, table

_NAMES = ("benchmarks.md", "coming-from.md")
PAGES = [Path(__file__).with_name(name) for name in _NAMES]
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def _training(report: Report) -> str:
    rows = report["rows"]
    base = rows[0]
    head = ["run", "steps × rays", "training s", "ms/step (quartiles)", "rays/s", "ratio"]
    head += ["PSNR", "SSIM", "LPIPS", "feature cosine", "peak MiB"]
    body = []
    for row in rows:
        metrics = row["metrics"]
        cosine = next((f"{v:.3f}" for k, v in metrics.items() if k.startswith("feature_cosine")), "–")
        body.append(
            [
                row["label"],
                f"{row['steps']} × {row['rays_per_step']}",
                f"{row['train_s']:.0f}",
                f"{row['step_ms_median']:.0f} ({row['step_ms_q1']:.0f}–{row['step_ms_q3']:.0f})",
                f"{row['rays_per_s']:,.0f}",
                f"{row['rays_per_s'] / base['rays_per_s']:.1f}",
                *quality(metrics),
                cosine,
                str(row["peak_rss_mib"]),
            ]
        )
    return table(head, body)


def _speed(report: Report) -> str:
    rows = report["rows"]
    (lite,) = (row["rays_per_cpu_s"] for row in rows if row["method"] == "f3rm-ext-lite")
    body = [
        [
            row["label"],
            f"{row['steps']} × {row['rays_per_step']}",
            f"{row['step_cpu_ms_median']:,.0f}",
            f"{row['rays_per_cpu_s']:,.0f}",
            f"{lite / row['rays_per_cpu_s']:.1f}",
        ]
        for row in rows
    ]
    return table(["run", "steps × rays", "CPU ms/step", "rays per CPU s", "f3rm-ext-lite has × as many"], body)


def _grids(report: Report) -> str:
    rows = [
        [
            row["grid"],
            row["backend"],
            "{1:.0f} ({0:.0f}–{2:.0f})".format(*row["forward_backward_ms"]),
            f"{row['kept_bytes_per_point']:,}",
            f"{row['forward_operators']} + {row['backward_operators']}",
        ]
        for row in report["rows"]
        if row["backend"] != "torch reference"
    ]
    return table(["grid", "backend", "ms (quartiles)", "kept, bytes per point", "operators"], rows)


def _starts(report: Report) -> str:
    rows = [
        [name, *(f"{m:.2f} ({a:.2f}–{b:.2f})" for a, m, b in (clocks["wall_s"], clocks["cpu_s"]))]
        for name, clocks in report["quartiles"].items()
    ]
    return table(["", "wall s (quartiles)", "CPU s (quartiles)"], rows)


def _answers(report: Report) -> str:
    asked = {"labels": "one-hot labels, by name", "example": "DINOv2, by one pixel", "text": "conse, by name"}
    asked["splats"] = "DINOv2 on splats, by ten pixels"
    where = {"rendered": "rendered views", "image-features": "2D features", "direct-3d": "points in 3D"}
    head = ["features, asked", "protocol", "pairs", "localisation", "mIoU", "mAcc", "mIoU at the best threshold"]
    head.append("boundary IoU")

    def cell(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return "–"
        low, high = row.get("intervals", {}).get(key, (None, None))
        return f"{row[key]:.3f}" + ("" if low is None else f" ({low:.3f}-{high:.3f})")

    rows = [
        [
            f"{asked[row['run']]}, {row['classes']} classes",
            where[row["protocol"]],
            str(row["pairs"]),
            *(cell(row, key) for key in ("localisation", "miou", "macc", "best_miou", "boundary_iou")),
        ]
        for row in report["rows"]
    ]
    return table(head, rows)


def _splat_memory(report: Report) -> str:
    """Gigabytes by layout and category, at the peak."""
    names = {"parameters": "parameters", "optimizer": "moments", "gradients": "gradients", "buffers": "buffers"}
    names |= {"activations": "activations", "workspace": "workspace"}
    rows = [
        [row["layout"], *(f"{row['held'].get(name, 0) / 1e9:.2f}" for name in names), f"{row['peak'] / 1e9:.2f}"]
        for row in report["rows"]
    ]
    return table(["layout", *names.values(), "peak"], rows)


def _splat_sizes(report: Report) -> str:
    """Peaks in gigabytes by the number of Gaussians."""
    columns = [key for key in report["rows"][0] if key != "gaussians"]
    rows = [
        [f"{row['gaussians'] / 1e6:g} million", *(f"{row[key] / 1e9:.2f}" for key in columns)] for row in report["rows"]
    ]
    return table(["Gaussians", *columns], rows)


def _splat_formats(report: Report) -> str:
    """Our files, and what splat-transform makes of the same PLY."""

    def cells(row: Report | None) -> list[str]:
        if row is None:
            return ["–"] * 4
        if "longer_than_s" in row:
            return ["–", "–", "–", f"> {row['longer_than_s']:.0f}"]
        losses = ["–", "–"]
        if "lost_db" in row:
            same = row["picture_psnr"] is None
            losses = [f"{row['lost_db']:.3f}", "the same" if same else f"{row['picture_psnr']:.1f}"]
        return [f"{row['bytes'] / report['gaussians']:.1f}", *losses, f"{row['write_cpu_s']:.2f}"]

    head = ["bytes per Gaussian", "dB lost", "pictures, dB", "CPU s"]
    rows = [[f"`{row['format']}`", *cells(row), *cells(row.get("theirs"))] for row in report["rows"]]
    told = table(["", *head, *(f"{name}, splat-transform" for name in head)], rows)
    if "many" not in report:
        return told
    many = report["many"]
    labels = {"write": "write", "read": "read", "reduce": "`convert --max-mb` to half the size"}
    many_rows = [
        [labels[step], f"{many[f'{step}_cpu_s']:.1f}", f"{many[f'{step}_peak_mib']:,}", f"{size / 1e6:.1f}"]
        for step, size in (("write", many["bytes"]), ("read", many["bytes"]), ("reduce", many["reduced_bytes"]))
    ]
    title = f"`.sog` of {many['gaussians']:,} Gaussians, SH degree {many['sh_degree']}"
    return told + "\n\n" + table([title, "CPU s", "peak MiB", "MB"], many_rows)


def _splat_precision(report: Report) -> str:
    def number(value: float | None) -> str:
        return "not finite" if value is None else f"{value:.5f}"

    head = ["storage of harmonics", "error of colours", "of reflective ones", "from float32", "ms/step (quartiles)"]
    keys = ("error", "error_reflective", "from_float32")
    rows = [
        [row["variant"], *(number(row[key]) for key in keys), "{1:.0f} ({0:.0f}–{2:.0f})".format(*row["ms"])]
        for row in report["rows"]
    ]
    return table(head, rows)


def _plan_memory(report: Report) -> str:
    """Planned bytes of each run's steps and pictures, and their ratio to measured ones: tensors, then the process."""
    head = ["run"]
    for label in ("step", "picture"):
        head += [f"{label} planned, MiB", "÷ allocated", "process: planned ÷ taken"]
    rows = []
    for row in report["rows"]:
        cells = []
        for phase in ("train", "evaluation"):
            planned = row["planned"][phase]
            ratios = (planned / row["allocated"][phase], row["planned_process"][phase] / row["process"][phase])
            cells += [f"{planned / 2**20:,.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        rows.append([row["run"], *cells])
    return table(head, rows)


def _plan_process(report: Report) -> str:
    """Memory that plans told and that runs reported, their ratio, and the plan's CPU time, by method."""
    rows = [
        [
            f"`{row['method']}`",
            *(f"{row[key]:,.0f}" for key in ("tensors_mib", "planned_mib", "reported_mib")),
            f"{row['planned_mib'] / row['reported_mib']:.2f}",
            f"{row['plan_cpu_s']:.1f}",
        ]
        for row in report["rows"]
    ]
    return table(["method", "planned: tensors, MiB", "process", "reported", "ratio", "plan, CPU s"], rows)


def _plan_time(report: Report) -> str:
    """Times that plans told and that training took, median and range, and the ratio of the medians."""
    rows = []
    for row in report["rows"]:
        times = {key: [one[key] for one in row["rounds"]] for key in ("told_s", "took_s", "probe_s")}
        middle = {key: statistics.median(values) for key, values in times.items()}
        said = [f"{middle[key]:.1f} ({min(values):.1f}–{max(values):.1f})" for key, values in times.items()]
        rows.append([row["method"], str(row["steps"]), *said, f"{middle['told_s'] / middle['took_s']:.2f}"])
    return table(["method", "steps", "told, s", "took, s", "finding out, s", "told / took"], rows)


def _splats(report: Report) -> str:
    base = {r["scene"]: r["forward_backward_ms"][1] for r in report["rows"] if r["renderer"] == "torch tiles"}
    rows = [
        [
            row["scene"],
            row["renderer"],
            str(row["threads"]),
            *(f"{m:.1f} ({a:.1f}–{b:.1f})" for a, m, b in (row["forward_ms"], row["forward_backward_ms"])),
            f"{base[row['scene']] / row['forward_backward_ms'][1]:.1f}",
            f"{row['forward_backward_cpu_ms']:.1f}",
        ]
        for row in report["rows"]
    ]
    head = ["Gaussians", "renderer", "threads", "forward ms (quartiles)", "forward + backward ms (quartiles)", "ratio"]
    head.append("of it CPU ms of the main thread")
    lifted = [
        [str(row["channels"]), "{1:.0f} ({0:.0f}–{2:.0f})".format(*row["ms"]), f"{row['ms'][1] / row['channels']:.1f}"]
        for row in report["lifting"]
    ]
    lifting = table(["channels lifted, one thread", "ms (quartiles)", "ms per channel"], lifted)
    return f"{table(head, rows)}\n\n{lifting}"


def _splat_steps(report: Report) -> str:
    """Time of a step by variant, range over runs, and its ratio to that without regularisation."""
    speeds = {row["variant"].removeprefix("sugar-ext").strip(", "): row["steps_per_s_all"] for row in report["rows"]}
    plain = statistics.median(speeds["without regularisation"])
    rows = [
        [name, f"{1e3 / statistics.median(all_):.0f} ({1e3 / max(all_):.0f}–{1e3 / min(all_):.0f})",
         f"{plain / statistics.median(all_):.2f}"]
        for name, all_ in speeds.items()
    ]  # fmt: skip
    return table(["step", "ms (range)", "ratio"], rows)


def _opensplat(report: Report) -> str:
    """Time of a step at equal numbers of Gaussians, then quality after equal times by capture."""
    speeds: dict[tuple[int, str, int], dict[str, Report]] = {}
    for row in report["speed"]["rows"]:
        key = row["gaussians"], "{} × {}".format(*row["size"]), row["threads"]
        speeds.setdefault(key, {})[row["program"]] = row

    def spread(row: Report) -> str:
        return f"{row['step_ms_median']:,.0f} ({row['step_ms_q1']:,.0f}–{row['step_ms_q3']:,.0f})"

    steps = []
    for (count, size, threads), programs in speeds.items():
        ours, theirs = programs["sugar-ext-lite"], programs.get("OpenSplat")
        told = [f"{count:,}", size, str(threads), spread(ours)]
        told += [spread(theirs), f"{theirs['step_ms_median'] / ours['step_ms_median']:.1f}"] if theirs else ["–", "–"]
        steps.append(told)
    quality = [
        [capture, str(row["seconds"]), row["program"], f"{row['steps']:,} in {row['train_s']:.0f} s",
         f"{row['gaussians']:,}" if "gaussians" in row else "–", f"{row['psnr']:.2f}", f"{row['peak_rss_mib']:,}"]
        for capture, found in report["captures"].items()
        for row in found["rows"]
    ]  # fmt: skip
    first = ["Gaussians", "photos", "threads", "sugar-ext-lite, ms/step (quartiles)", "OpenSplat", "ratio"]
    second = ["capture", "time, s", "program", "steps", "Gaussians at the end", "held-out PSNR", "peak MiB"]
    return "\n\n".join([table(first, steps), *([table(second, quality)] if quality else [])])


def _defaults(report: Report) -> str:
    def score(row: Report) -> str:
        inner = f" (inside {row['inner_psnr']:.2f})" if "inner_psnr" in row else ""
        runs = f", mean of {len(row['runs'])} runs" if "runs" in row else ""
        return f"{row['psnr']:.2f}" + inner + (f" (F {row['f_score']:.3f}{runs})" if "f_score" in row else "")

    cases: dict[tuple[str, ...], dict[str, Report]] = {}
    for row in report["rows"]:
        cases.setdefault((row["capture"], row["change"], row["method"]), {})[row["option"]] = row
    rows = []
    for case, options in cases.items():
        default = options.pop("default")
        chosen = default["takes"][0].split()[-1] if default["takes"] else "auto"
        rest = ", ".join(f"{option.split()[-1]} {score(row)}" for option, row in options.items())
        rows.append([*case, f"{chosen} {score(default)}", rest or "–"])
    return table(["capture", "with", "method", "default, dB", "other options, dB"], rows)


def _gpu_day(report: Report) -> str:
    """Targets and sections, as the program prints them."""
    sys.path.insert(0, str(RESULTS.parent))
    return importlib.import_module("gpu_day").tables(report)


def _step_operators(report: Report) -> str:
    """Kernels and waits by method and stage."""
    rows = [
        [row["method"], row["stage"], f"{sum(row['kernels'].values()):,}", f"{row['waits']:,}"]
        for row in report["now"]["rows"]
    ]
    return table(["method", "stage", "kernels", "host waits"], rows)


def _poses(report: Report) -> str:
    """Poses beside the given ones."""
    head = ["photos", "mapper", "with a pose", "RRA@5", "RTA@5", "AUC@30", "centres", "reprojection px", "verdict",
            "s"]  # fmt: skip
    rows = [
        [name, row["mapper"], f"{row['registered']} of {row['photos']}",
         *(f"{value:.3f}" for value in (row["rra"]["5"], row["rta"]["5"], row["auc_30"])),
         f"{row['center_error']:.2%} ({row['center_worst']:.2%})", f"{row['reprojection_error_px']:.2f}",
         row["verdict"], f"{row['seconds']:.0f}"]
        for name, some in report["captures"].items() for row in some
    ]  # fmt: skip
    return table(head, rows)


def _pose_verdicts(report: Report) -> str:
    """Verdicts on poses beside the truth."""
    names = [name for name in report["rows"][0] if name not in ("capture", "mapper", "photos")]
    rows = [[*(str(row[name]) for name in ("capture", "mapper", *names, "photos"))] for row in report["rows"]]
    return table(["photos of", "mapper", *names, "photos with a right, trusted pose"], rows)


def _beside_plan(report: Report, name: str, sizes: dict[str, str], step_ms: str) -> str:
    """Memory and time of a training's steps; sizes are formats of a row by heading."""
    head = [name, "device", *sizes, "planned, MiB", "allocated, MiB", "allocated ÷ planned", "s/step"]
    rows = [
        [row["label"], f"{report['device']}, {row['precision']}", *(size.format(**row) for size in sizes.values()),
         f"{row['planned_mib']:,}", f"{row['peak_mib']:,}", f"{row['peak_to_plan']:.2f}", f"{row[step_ms] / 1e3:.2f}"]
        for row in report["rows"]
    ]  # fmt: skip
    return table(head, rows)


def _pose_training(report: Report) -> str:
    return _beside_plan(report, "stage", {"scenes × images": "{batch} × {images}"}, "full_step_ms")


def _moco_training(report: Report) -> str:
    return _beside_plan(report, "preset", {"batch": "{batch} × {accumulation}", "queue": "{queue:,}"}, "step_ms")


def _query_times(report: Report) -> str:
    names = ("lift", "group", "clusters", "first_example", "example", "answer")
    rows = [[row["code"], *(f"{row[name]:.2f}" for name in names)] for row in report["rows"]]
    head = ["code", "features", "groups", "what the scene shows", "first example", "next example", "one view's answer"]
    return table(head, rows)


def _big_capture(report: Report) -> str:
    rows = [
        [
            row["method"],
            f"{row['photos']:,}" + (" with masks" if row["masks"] else ""),
            f"{row['window']} for {row['repeat']} steps" if row["repeat"] else _kept_pixels(row["pixel_stride"]),
            f"{row['first_step_s']:.0f}",
            f"{row['steps_per_s']:.2f}",
            f"{row['peak_mib']:,}",
            f"{row['planned_mib']:,}",
            f"{row['all_images_mib']:,}",
        ]
        for row in report["runs"]
    ]
    head = ["method", "photos", "in memory", "first step, s", "steps/s", "peak, MiB", "planned, MiB"]
    return table([*head, "all pixels alone, MiB"], rows)


def _kept_pixels(stride: int) -> str:
    return f"1 of {stride**2} pixels" if stride > 1 else "all"


def _viewer_time(report: Report) -> str:
    times = ["page_s", "first_s", *(f"rows_{share}_s" for share in ("0.125", "0.25", "0.5", "1"))]
    rows = [
        [row["run"], row["way"], str(row["rows"]), *(f"{row[name]:.1f}" for name in times)] for row in report["rows"]
    ]
    head = ["run", "pictures", "rows", "page, s", "first, s", "⅛ of the rows, s", "¼, s", "½, s", "whole, s"]
    return table(head, rows)


def _memory(report: Report) -> str:
    ways = {"chunked": "`f3rm-ext`", "naive": "features of the whole image"}
    rows = [
        [ways[r["way"]], str(r["dim"]), f"{report['width']} × {r['rows']}", f"{r['peak_mib']:,.0f}", f"{r['s']:.0f}"]
        for r in report["rows"]
    ]
    return table(["", "dimensions", "pixels", "peak MiB", "s"], rows)


TABLES: dict[str, Callable[[Report], str]] = {
    "cpu_training": _training,
    "cpu_speed": _speed,
    "hash_grid": _grids,
    "step_operators": _step_operators,
    "import_time": _starts,
    "query_quality": _answers,
    "query_time": _query_times,
    "query_memory": _memory,
    "big_capture": _big_capture,
    "viewer_time": _viewer_time,
    "rasterize_cpu": _splats,
    "splat_steps": _splat_steps,
    "opensplat": _opensplat,
    "mesh_extraction": mesh_tables.meshes,
    "refinement": mesh_tables.refinement,
    "mesh_queries": mesh_tables.mesh_queries,
    "defaults": _defaults,
    "plan_memory": _plan_memory,
    "plan_process": _plan_process,
    "plan_time": _plan_time,
    "splat_memory": _splat_memory,
    "splat_sizes": _splat_sizes,
    "splat_formats": _splat_formats,
    "splat_precision": _splat_precision,
    "gpu_day": _gpu_day,
    "poses": _poses,
    "pose_verdicts": _pose_verdicts,
    "pose_training": _pose_training,
    "moco_training": _moco_training,
}
MISSING = {"gpu_day": "Not measured yet ([Status](status.md))."}
"""What stands in place of a table whose results are missing."""


def fill(text: str) -> str:
    """The page with every table made anew."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            return f"<!-- table: {name} -->\n\n{MISSING.get(name, 'Not recorded yet.')}\n\n<!-- end -->"
        report = json.loads(path.read_text())
        return f"<!-- table: {name} -->\n\n{TABLES[name](report)}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def main() -> None:
    """Rewrites the pages, or checks them."""
    for page in PAGES:
        text = page.read_text()
        fresh = fill(text)
        if "--check" in sys.argv and fresh != text:
            sys.exit(f"docs/{page.name} is out of date: run python docs/make_benchmarks.py")
        page.write_text(fresh)


if __name__ == "__main__":
    main()
