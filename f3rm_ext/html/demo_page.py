"""The report of `f3rm-ext demo`."""

import math
import statistics
from typing import Any

from f3rm_ext.html.charts import Points, bar_chart, line_chart, smooth
from f3rm_ext.html.content import ReportContent
from f3rm_ext.html.page import Picture, duration, plural, render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.utils.colormaps import heat_stops

_PICTURES = ("true", "rendered", "depth", "features", "true_depth", "true_features")
_THUMBNAIL_PX = 160
_COSINE = "feature_cosine_"
_QUALITY = {
    "psnr": ("PSNR", "{:.2f} dB", "How close colours are to the photo; 20 is recognisable, 30 is hard to tell apart."),
    "ssim": ("SSIM", "{:.3f}", "How well local structure agrees; 1 is identical."),
    "lpips": ("LPIPS", "{:.3f}", "Difference as a trained network perceives it (AlexNet); 0 is identical."),
    "l1": ("L1", "{:.4f}", "Mean absolute difference of colours from 0 to 1."),
}
"""Name, format and meaning of metrics of colours."""
_COST = {
    "train_peak_memory_mib": ("Peak memory, training", "{:.0f} MiB", "Most memory in use while training."),
    "train_it_per_s": ("Training steps", "{:.1f} steps/s", "Including saving and evaluation between steps."),
    "eval_peak_memory_mib": ("Peak memory, evaluation", "{:.0f} MiB", "Most memory in use while rendering one view."),
    "num_rays_per_sec": ("Rendering speed", "{:,.0f} rays/s", "Rays rendered and evaluated per second, all outputs."),
}


def build_page(content: ReportContent) -> str:
    """Returns the page. Missing pictures and figures are left out."""
    measured = content.measured
    views = [_view(content, view) for view in measured.get("views") or []]
    files = measured["views"][0]["files"] if views else {}
    query = measured.get("query")
    return render_page(
        "demo.html",
        title=content.title,
        lead=lead(content),
        keys=_key_figures(content),
        views=views,
        modes=_modes(files),
        exact_depth="true_depth" in files,
        query=query and _query(content, query),
        objects=query and _objects(query["objects"]),
        heat_stops=heat_stops(),
        eval_images=measured.get("eval_images", 0),
        metrics=_metrics(content),
        coverage=_coverage(content.coverage),
        curves=_curves(content.curves),
        times=_times(content),
        content=content,
    )


def lead(content: ReportContent) -> str:
    """Returns the opening paragraph: what was trained and what the page shows."""
    measured = content.measured
    train, held = measured.get("train_images", 0), measured.get("eval_images", 0)
    scene = "a synthetic, ray-traced room" if content.synthetic else content.data_name
    extractors = ", ".join(measured.get("heads", {}).values())
    trained = "A radiance field was" if content.is_field else "Gaussian splats were"
    text = f"{trained} trained on {plural(train, 'photo')} of {scene} in {measured.get('steps', 0)} steps"
    if held:
        text += f"; {plural(held, 'other photo')} {'was' if held == 1 else 'were'} held out to evaluate it."
    else:
        text += ", all there are: without a held-out photo, its quality is not measured."
    if extractors:
        learned = "it has learned the" if content.is_field else "they carry the"
        text += (
            f" Beside colour and depth {learned} 2D features of {extractors}, which can be queried: "
            "a piece of one photo shows what to look for, and the same 3D scene finds it in every view."
        )
    return text


def _view(content: ReportContent, view: dict[str, Any]) -> dict[str, Any]:
    files = view["files"]
    pictures = {
        name: Picture.from_file(content.pictures / files[name]) if files.get(name) else None for name in _PICTURES
    }
    thumbnail = Picture.from_file(content.pictures / files["true"], _THUMBNAIL_PX)
    return {"image": view["image"], "pictures": pictures, "thumbnail": thumbnail}


def _modes(files: dict[str, str]) -> list[tuple[str, str, str]]:
    """Comparisons: the picture on the left, that on the right, and the button's label."""
    modes = [("true", "rendered", "Colour")]
    if "features" in files:
        modes.append(("true_features" if "true_features" in files else "rendered", "features", "Features"))
    return [*modes, ("true_depth" if "true_depth" in files else "rendered", "depth", "Depth")]


def _query(content: ReportContent, query: dict[str, Any]) -> dict[str, Any]:
    return {
        **query,
        "photo": Picture.from_file(content.pictures / "exemplar_photo.png"),
        "crop": Picture.from_file(content.pictures / "exemplar_crop.png"),
        "views": [{**view, "picture": Picture.from_file(content.pictures / view["file"])} for view in query["views"]],
    }


def _judged_objects(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["views"]]


def _objects(objects: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Hits of each object, the best first."""
    judged = sorted(_judged_objects(objects), key=lambda item: (-item["hits"] / item["views"], -item["iou"]))
    if not judged:
        return None
    rows = [
        [
            item["name"],
            f"{item['hits']} / {item['views']}",
            f"{item['iou']:.2f}",
            f"{item['image']} at {item['x']:.0f}, {item['y']:.0f}",
        ]
        for item in judged
    ]
    return {
        "hits": sum(item["hits"] for item in judged),
        "views": sum(item["views"] for item in judged),
        "iou": statistics.mean(item["iou"] for item in judged),
        "unseen": len(objects) - len(judged),
        "table": Table(["object", "found", "IoU", "exemplar"], rows, "lrrn"),
    }


def _key_figures(content: ReportContent) -> list[tuple[str, str]]:
    """The few most important numbers: (value, label)."""
    metrics, measured = content.metrics, content.measured
    keys = []
    if "psnr" in metrics:
        keys.append((f"{metrics['psnr']:.1f} dB", "PSNR on held-out views"))
    head = next(iter(_heads(metrics)), None)
    if head is not None:
        keys.append((f"{metrics[_COSINE + head]:.3f}", f"cosine of rendered and true features, {head}"))
    depth = measured.get("depth")
    if depth:
        keys.append((f"{100 * depth['median_m']:.1f} cm", "median error of depth, against the exact one"))
    judged = _judged_objects((measured.get("query") or {}).get("objects", []))
    if judged:
        hits, views = (sum(item[key] for item in judged) for key in ("hits", "views"))
        keys.append((f"{hits} of {views}", f"queries by example that hit, {plural(len(judged), 'object')}"))
    if content.stages:
        keys.append((duration(math.fsum(stage.seconds for stage in content.stages)), "from nothing to this page"))
    return keys


def _heads(metrics: dict[str, float]) -> list[str]:
    """Names of the features that were evaluated."""
    return [key.removeprefix(_COSINE) for key in metrics if key.startswith(_COSINE) and not key.endswith("_std")]


def _metrics(content: ReportContent) -> Table:
    """All metrics, each with a sentence that explains it."""
    metrics = content.metrics

    def value(key: str, form: str) -> str:
        text, spread = form.format(metrics[key]), metrics.get(f"{key}_std", math.nan)
        return text if math.isnan(spread) else f"{text} ± {form.format(spread).removesuffix(' dB')}"  # NaN: one view

    rows = []
    for key, (name, form, meaning) in _QUALITY.items():
        if key in metrics:
            rows.append([name, value(key, form), meaning])
        elif key == "lpips" and metrics:
            rows.append([name, "none", content.lpips_note or "LPIPS was not measured."])
    for head in _heads(metrics):
        meaning = "Similarity of rendered features and those of the photo, at its patches; 1 is the same direction."
        rows.append([f"Feature cosine, {head}", value(_COSINE + head, "{:.3f}"), meaning])
        if f"feature_mse_{head}" in metrics:
            meaning = "Mean squared difference of these features, per dimension."
            rows.append([f"Feature MSE, {head}", value(f"feature_mse_{head}", "{:.5f}"), meaning])
    depth = content.measured.get("depth")
    if depth:
        meaning = "Median over pixels of |rendered - exact| along the optical axis, then over views, in metres."
        rows.append(["Depth error", f"{depth['median_m']:.3f} m", meaning])
        rows.append(["Depth within 5 cm", f"{depth['within_5cm']:.0%}", "Share of pixels with a smaller depth error."])
    rows += [[name, form.format(metrics[key]), text] for key, (name, form, text) in _COST.items() if key in metrics]
    speeds = [value for _, value in content.curves.get("Train Rays / Sec", [])]
    if speeds:
        meaning = "Median over all steps, with colours and features."
        rows.append(["Training speed", f"{statistics.median(speeds):,.0f} rays/s", meaning])
    return Table(["metric", "value", "meaning"], rows, "lrn")


def _coverage(coverage: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a chart and facts of how often training used each photo; None if that was not recorded."""
    images: list[dict[str, Any]] = coverage.get("per_image") or []
    if not images:
        return None
    epochs = [item["rays"] / max(1, item["pixels"]) for item in images]
    names = [str(item["image"]) for item in images]
    least, most = (coverage[f"appearances_{key}"] for key in ("min", "max"))
    return {
        "chart": bar_chart(epochs, names, label="Rays per pixel", unit="rays per pixel"),
        "facts": [
            ("photos seen", f"{coverage['images_seen']:.0f} of {coverage['images']:.0f}"),
            ("times in memory", f"least {least:.0f}, most {most:.0f} per photo"),
            ("rays", f"{coverage['rays']:,.0f}"),
            ("effective epochs", f"{coverage['effective_epochs']:.2f} rays per pixel of the capture"),
            ("per photo", f"least {min(epochs):.2f}, most {max(epochs):.2f} rays per pixel"),
        ],
    }


def _curves(curves: dict[str, list[tuple[float, float]]]) -> list[tuple[str, str]]:
    """Charts of two training curves from TensorBoard's scalars."""
    titles = {"Train Metrics Dict/psnr": ("PSNR of the training rays, dB", "dB")}
    for tag in curves:
        if tag.startswith(f"Train Metrics Dict/{_COSINE}"):
            titles[tag] = (f"Cosine of features, {tag.rpartition(_COSINE)[2]}", "")
    titles["Train Loss"] = ("Loss", "")
    charts = []
    for tag, (title, unit) in list(titles.items())[:2]:
        points: Points = curves.get(tag, [])
        charts.append((title, line_chart(smooth(points), label=title, unit=unit)))
    return [(title, svg) for title, svg in charts if svg]


def _times(content: ReportContent) -> Table:
    """Wall time of each stage."""
    rows = [
        [
            stage.name,
            duration(stage.seconds),
            "; ".join(filter(None, (stage.note, "done before, reused" if stage.reused else ""))),
        ]
        for stage in content.stages
    ]
    total = duration(math.fsum(stage.seconds for stage in content.stages))
    return Table(["part", "wall time", ""], [*rows, ["all", total, ""]], "lrn")
