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

import learning_tables
import mesh_tables
from markdown_table import Report, quality, table

PAGES = [Path(__file__).with_name(name) for name in ("benchmarks.md", "coming-from.md", "page.md")]
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
            *(f"{m:.1f} ({a:.1f}–{b:.1f})" for a, m, b in (row["forward_ms"], row["forward_backward_ms"])),
            f"{row['kept_bytes_per_point']:,}",
            f"{row['forward_operators']} + {row['backward_operators']}",
        ]
        for row in report["rows"]
    ]
    head = ["grid", "backend", "forward ms (quartiles)", "forward + backward ms (quartiles)"]
    return table([*head, "kept, bytes per point", "operators"], rows)


def _starts(report: Report) -> str:
    rows = [
        [name, *(f"{m:.2f} ({a:.2f}–{b:.2f})" for a, m, b in (clocks["wall_s"], clocks["cpu_s"]))]
        for name, clocks in report["quartiles"].items()
    ]
    return table(["", "wall s (quartiles)", "CPU s (quartiles)"], rows)


def _answers(report: Report) -> str:
    asked = {"labels": "one-hot labels, by name", "example": "DINOv2, by one pixel", "text": "conse, by name"}
    where = {"rendered": "rendered views", "image-features": "2D features", "direct-3d": "points in 3D"}
    head = ["features, asked", "protocol", "pairs", "localisation", "mIoU", "mAcc", "best threshold", "mIoU there"]
    rows = [
        [
            f"{asked[row['run']]}, {row['classes']} classes",
            where[row["protocol"]],
            str(row["pairs"]),
            *(f"{row[key]:.3f}" for key in ("localisation", "miou", "macc", "best_threshold", "best_miou")),
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


def _memory(report: Report) -> str:
    ways = {"chunked": "`f3rm-ext`", "naive": "features of the whole image"}
    rows = [
        [ways[r["way"]], str(r["dim"]), f"{report['width']} × {r['rows']}", f"{r['peak_mib']:,.0f}", f"{r['s']:.0f}"]
        for r in report["rows"]
    ]
    return table(["", "dimensions", "pixels", "peak MiB", "s"], rows)


def _plan_memory(report: Report) -> str:
    """Planned bytes beside measured ones, and their ratio, for each run and phase."""
    head = ["run", "phase", "planned, MiB", "allocated", "ratio", "with arrays, planned", "process", "ratio", "plan, s"]
    phases = {"train": "step", "evaluation": "picture"}
    rows = []
    for row in report["rows"]:
        for phase, said in phases.items():
            cells: list[str] = []
            for planned, measured in (("planned", "allocated"), ("planned_process", "process")):
                one, other = row[planned][phase], row[measured][phase]
                cells += [f"{one / 2**20:,.0f}", f"{other / 2**20:,.0f}", f"{one / other:.2f}"]
            rows.append([row["run"], said, *cells, f"{row['plan_cpu_s']:.1f}"])
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


def _codes(report: Report) -> str:
    ways = {"residual": "per patch", "constant": "their mean"}
    head = ["features, asked", "K", "energy kept", "what codes leave out", "cosine off by", "99 %", "relevancy off by"]
    rows = [
        [
            f"{r['features']}, by {r['by']}",
            str(r["codes"]),
            f"{100 * r['energy']:.1f} %",
            ways[r["cosines"]],
            *(f"{r[key]:.4f}" for key in ("mean", "p99", "relevancy")),
            f"{100 * r['best']:.0f} %",
            f"{r['ms']:.2f}",
        ]
        for r in report["rows"]
        if r["cosines"] in ("residual", "constant")
    ]
    return table([*head, "best patch kept", "ms"], rows)


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


def _shared(report: Report) -> str:
    def cell(method: str, waiting: str, company: str, figure: str, digits: int) -> tuple[float, str]:
        (row,) = [row for row in report["rows"] if (row["method"], row["waiting"]) == (method, waiting)]
        found = sorted(figures[figure] for figures in row["companies"][company])
        median = statistics.median(found)
        return median, f"{median:.{digits}f} ({found[0]:.{digits}f}–{found[-1]:.{digits}f})"

    kinds = ("sleeping", "spinning")
    head = ["method", "beside a busy program", *(f"{kind}, steps/s" for kind in kinds), "ratio"]
    body = []
    for method in dict.fromkeys(row["method"] for row in report["rows"]):
        for company in report["rows"][0]["companies"]:
            speeds = [cell(method, kind, company, "steps_per_s", 2) for kind in kinds]
            cpu = [cell(method, kind, company, "cpu_ms_per_step", 0)[1] for kind in kinds]
            ratio = f"{speeds[0][0] / speeds[1][0]:.1f}"
            body.append([method, company, *(text for _, text in speeds), ratio, *cpu])
    return table([*head, *(f"{kind}, CPU ms/step" for kind in kinds)], body)


def _masked_pixels(report: Report) -> str:
    rows = [
        [
            row["method"],
            row["masked_pixels"],
            *quality(row),
            f"{row['fog']:.3f}",
        ]
        for row in report["rows"]
    ]
    return table(["method", "masked-pixels", "PSNR", "SSIM", "LPIPS", "fog"], rows)


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
        best = max(options, key=lambda option: options[option]["psnr"])
        default = options["default"]
        taken = ", ".join(default["takes"]) or "auto"
        rest = ", ".join(f"{name} {score(row)}" for name, row in options.items() if name not in ("default", best))
        rows.append(
            [
                *case,
                score(default),
                taken,
                score(options[best]),
                taken if best == "default" else best,
                rest or "–",
            ]
        )
    head = ["capture", "with", "method", "default, dB", "it took", "best, dB", "which is", "others, dB"]
    return table(head, rows)


def _gpu_day(report: Report) -> str:
    """Targets and sections, as the program prints them."""
    sys.path.insert(0, str(RESULTS.parent))
    return importlib.import_module("gpu_day").tables(report)


def _step_operators(report: Report) -> str:
    """Kernels and waits by method and stage, before and now; one column where only one is recorded."""
    columns = [column for column in ("before", "now") if column in report]
    found = {column: {(row["method"], row["stage"]): row for row in report[column]["rows"]} for column in columns}
    phases = {"batch": "batch", "forward": "forward", "backward": "backward", "optimizer": "optimiser"}
    phases |= {"picture": "picture"}

    def kernels(row: Report | None) -> str:
        if row is None:
            return "–"
        parts = [f"{label} {row['kernels'][phase]:,}" for phase, label in phases.items() if phase in row["kernels"]]
        return f"{sum(row['kernels'].values()):,}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")

    def waits(row: Report | None) -> str:
        return "–" if row is None else f"{row['waits']:,}"

    keys = dict.fromkeys(key for column in columns for key in found[column])
    rows = [[*key, *(cell(found[column].get(key)) for cell in (kernels, waits) for column in columns)] for key in keys]
    head = [f"{what}, {column}" for what in ("kernels", "host waits") for column in columns]
    return table(["method", "stage", *head], rows)


def _splat_budget(report: Report) -> str:
    body = [
        [
            f"{row['capture']}: {row['gaussians']:,} Gaussians, {row['mb']:.2f} MB",
            f"{row['whole_psnr']:.2f}",
            f"{row['share']:.0%}",
            f"{row['kept']:,}, SH {row['kept_degree']}",
            f"{row['kept_mb'] / row['mb']:.0%}",
            f"**{row['psnr']:.2f}**",
            f"{row['opacity_psnr']:.2f}",
        ]
        for row in report["rows"]
    ]
    head = ["capture", "whole, dB", "limit", "kept", "size", "by contribution, dB", "by opacity, dB"]
    pages = [
        [
            f"{row['gaussians']:,}",
            str(row["questions"]),
            f"`--max-mb {row['max_mb']:g}`",
            f"{row['mb']:.1f}",
            f"{row['cpu_s']:.0f}",
            f"{row['peak_mb'] / 1000:.1f}",
        ]
        for row in report.get("pages", ())
    ]
    costs = table(["Gaussians", "questions", "limit", "MB", "CPU s", "peak, GB"], pages)
    return f"{table(head, body)}\n\n{costs}"


TABLES: dict[str, Callable[[Report], str]] = {
    "cpu_training": _training,
    "cpu_speed": _speed,
    "hash_grid": _grids,
    "step_operators": _step_operators,
    "import_time": _starts,
    "query_quality": _answers,
    "rasterize_cpu": _splats,
    "splat_surfaces": mesh_tables.surfaces,
    "mesh_extraction": mesh_tables.meshes,
    "refinement": mesh_tables.refinement,
    "mesh_queries": mesh_tables.mesh_queries,
    "masked_pixels": _masked_pixels,
    "defaults": _defaults,
    "query_memory": _memory,
    "plan_memory": _plan_memory,
    "plan_process": _plan_process,
    "plan_time": _plan_time,
    "code_queries": _codes,
    "splat_memory": _splat_memory,
    "splat_sizes": _splat_sizes,
    "splat_precision": _splat_precision,
    "splat_budget": _splat_budget,
    "shared_cores": _shared,
    "gpu_day": _gpu_day,
    "poses": learning_tables.poses,
    "pose_verdicts": learning_tables.pose_verdicts,
    "pose_training": learning_tables.pose_training,
    "moco_training": learning_tables.moco_training,
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
