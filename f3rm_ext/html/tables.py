"""The sections of a report with numbers, as HTML: key figures, metrics, coverage, curves, time and commands."""

from html import escape
from typing import Any

from f3rm_ext.html.charts import bar_chart, downsample, line_chart, smooth
from f3rm_ext.html.content import ReportContent, duration, plural

_METRICS: tuple[tuple[str, str, str, str], ...] = (
    ("psnr", "PSNR", "{:.2f} dB", "How close colours are to the photo; 20 is recognisable, 30 is hard to tell apart."),
    ("ssim", "SSIM", "{:.3f}", "How well local structure agrees; 1 is identical."),
    ("lpips", "LPIPS", "{:.3f}", "Difference as a trained network perceives it (AlexNet); 0 is identical."),
    ("l1", "L1", "{:.4f}", "Mean absolute difference of colours from 0 to 1."),
    ("train_peak_memory_mib", "Peak memory, training", "{:.0f} MiB", "Most memory in use while training."),
    ("train_it_per_s", "Training steps", "{:.1f} steps/s", "Including saving and evaluation between steps."),
    ("eval_peak_memory_mib", "Peak memory, evaluation", "{:.0f} MiB", "Most memory in use while rendering one view."),
    (
        "num_rays_per_sec",
        "Rendering speed",
        "{:,.0f} rays/s",
        "Rays rendered and evaluated per second, all outputs.",
    ),
)


def key_figures(content: ReportContent) -> str:
    """The few most important numbers."""
    metrics, measured = content.metrics, content.measured
    keys = []
    if "psnr" in metrics:
        keys.append((f"{metrics['psnr']:.1f} dB", "PSNR on views it has never seen"))
    for name, value in metrics.items():
        if name.startswith("feature_cosine_") and not name.endswith("_std"):
            keys.append(
                (f"{value:.3f}", f"cosine of rendered and true features, {name.removeprefix('feature_cosine_')}")
            )
            break
    depth = measured.get("depth")
    if depth:
        keys.append((f"{100 * depth['median_m']:.1f} cm", "median error of depth, against the exact one"))
    objects = [item for item in (measured.get("query") or {}).get("objects", []) if item["views"]]
    if objects:
        hits, tries = sum(item["hits"] for item in objects), sum(item["views"] for item in objects)
        keys.append((f"{hits} of {tries}", f"queries by example that hit, {len(objects)} objects"))
    if content.stages:
        keys.append((duration(sum(stage.seconds for stage in content.stages)), "from nothing to this page"))
    cards = "".join(
        f'<div class="key"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in keys
    )
    return f'<div class="keys">{cards}</div>'


def metrics_section(content: ReportContent) -> str:
    """A table of all metrics, each with a sentence that explains it."""
    metrics = content.metrics
    rows: list[tuple[str, str, str]] = []
    for key, name, form, meaning in _METRICS[:4]:
        if key in metrics:
            rows.append((name, _with_spread(metrics, key, form), meaning))
        elif key == "lpips":
            rows.append((name, "none", content.lpips_note or "LPIPS was not measured."))
    for key in metrics:
        if key.startswith("feature_cosine_") and not key.endswith("_std"):
            name = key.removeprefix("feature_cosine_")
            meaning = "Similarity of rendered features and those of the photo, at its patches; 1 is the same direction."
            rows.append((f"Feature cosine, {name}", _with_spread(metrics, key, "{:.3f}"), meaning))
            mse = f"feature_mse_{name}"
            if mse in metrics:
                meaning = "Mean squared difference of these features, per dimension."
                rows.append((f"Feature MSE, {name}", _with_spread(metrics, mse, "{:.5f}"), meaning))
    depth = content.measured.get("depth")
    if depth:
        meaning = "Median over pixels of |rendered - exact| along the optical axis, then over views, in metres."
        rows.append(("Depth error", f"{depth['median_m']:.3f} m", meaning))
        rows.append(("Depth within 5 cm", f"{depth['within_5cm']:.0%}", "Share of pixels with a smaller depth error."))
    for key, name, form, meaning in _METRICS[4:]:
        if key in metrics:
            rows.append((name, form.format(metrics[key]), meaning))
    speed = training_speed(content.curves)
    if speed:
        rows.append(("Training speed", f"{speed:,.0f} rays/s", "Median over all steps, with colours and features."))
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n"><b>{escape(value)}</b></td><td class="soft small">{escape(meaning)}'
        "</td></tr>"
        for name, value, meaning in rows
    )
    count = content.measured.get("eval_images", 0)
    return (
        f"<h2>Measured</h2><p>Mean and standard deviation over {plural(count, 'held-out view')}.</p>"
        f'<div class="card scroll"><table class="named"><tr><th>metric</th><th class="n">value</th>'
        f"<th>meaning</th></tr>{body}"
        "</table></div>"
    )


def _with_spread(metrics: dict[str, float], key: str, form: str) -> str:
    text, spread = form.format(metrics[key]), metrics.get(f"{key}_std")
    if spread is None or spread != spread:  # NaN for a single view
        return text
    return f"{text} ± {form.format(spread).removesuffix(' dB')}"


def training_speed(curves: dict[str, list[tuple[float, float]]]) -> float:
    """Median rays per second in training; 0 if it was not recorded."""
    values = sorted(value for _, value in curves.get("Train Rays / Sec", []))
    return values[len(values) // 2] if values else 0.0


def coverage_section(content: ReportContent) -> str:
    """How often training used every photo."""
    coverage = content.coverage
    images: list[dict[str, Any]] = coverage.get("per_image") or []
    if not images:
        return ""
    epochs = [item["rays"] / max(1, item["pixels"]) for item in images]
    chart = bar_chart(epochs, [str(item["image"]) for item in images], label="Rays per pixel", unit="rays per pixel")
    facts = fact_list(
        [
            ("photos seen", f"{coverage['images_seen']:.0f} of {coverage['images']:.0f}"),
            (
                "times in memory",
                f"least {coverage['appearances_min']:.0f}, most {coverage['appearances_max']:.0f} per photo",
            ),
            ("rays", f"{coverage['rays']:,.0f}"),
            ("effective epochs", f"{coverage['effective_epochs']:.2f} rays per pixel of the capture"),
            ("per photo", f"least {min(epochs):.2f}, most {max(epochs):.2f} rays per pixel"),
        ]
    )
    return (
        "<h2>What training has seen</h2><p>All photos are used equally often: the counts of any two "
        f'differ by at most one.</p><div class="two"><div class="card">{chart}<p class="small soft">Rays per pixel, '
        f'one bar per photo.</p></div><div class="card">{facts}</div></div>'
    )


def curves_section(content: ReportContent) -> str:
    """Training curves from TensorBoard's scalars; empty if there are none."""
    wanted = [("Train Metrics Dict/psnr", "PSNR of the training rays, dB", "dB"), ("Train Loss", "Loss", "")]
    wanted[1:1] = [
        (tag, f"Cosine of features, {tag.rpartition('feature_cosine_')[2]}", "")
        for tag in content.curves
        if tag.startswith("Train Metrics Dict/feature_cosine_")
    ]
    charts = []
    for tag, title, unit in wanted[:2]:
        chart = line_chart(downsample(smooth(content.curves.get(tag, []))), label=title, unit=unit)
        if chart:
            charts.append(f'<div class="card"><h3 style="margin-top:0">{escape(title)}</h3>{chart}</div>')
    return f'<h2>How training went</h2><div class="two">{"".join(charts)}</div>' if charts else ""


def time_section(content: ReportContent) -> str:
    """Wall time of each stage, and the exact commands."""
    total = sum(stage.seconds for stage in content.stages) or 1.0
    bars = "".join(
        f'<i style="flex:{stage.seconds / total:.4f}" title="{escape(stage.name, quote=True)}: '
        f'{duration(stage.seconds)}"></i>'
        for stage in content.stages
    )
    rows = "".join(
        f'<tr><td>{escape(stage.name)}</td><td class="n">{duration(stage.seconds)}</td>'
        f'<td class="soft small">{escape(_remarks(stage.note, stage.reused))}</td></tr>'
        for stage in content.stages
    )
    commands = "".join(f"<pre>{escape(stage.command)}</pre>" for stage in content.stages if stage.command)
    further = "".join(f"<h3>{escape(why)}</h3><pre>{escape(command)}</pre>" for why, command in content.next_commands)
    return (
        f'<h2>Time</h2><div class="card"><div class="time" aria-hidden="true">{bars}</div><div class="scroll"><table>'
        f'<tr><th>part</th><th class="n">wall time</th><th></th></tr>{rows}<tr><td><b>all</b></td>'
        f'<td class="n"><b>{duration(total)}</b></td><td></td></tr></table></div></div>'
        "<h2>The commands</h2><p>Exactly these commands were run, in the folder "
        f"<code>{escape(content.folder)}</code>.</p>"
        f'{commands}<div class="card">{further}</div>'
    )


def _remarks(note: str, reused: bool) -> str:
    return "; ".join(part for part in (note, "done before, reused" if reused else "") if part)


def facts_section(content: ReportContent) -> str:
    """Versions, device and similar facts."""
    return f'<h2>Made with</h2><div class="card">{fact_list(content.facts)}</div>'


def fact_list(facts: list[tuple[str, str]]) -> str:
    """Returns facts, (name, value), as an HTML list."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"
