"""The report of `f3rm-ext sugar run`: the mesh to turn, held-out views, figures, stages and commands."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.errors import CaptureError, MeshError
from f3rm_ext.html.content import capture_name, machine_facts
from f3rm_ext.html.page import Picture, duration, plural, render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.utils.pictures import read_picture
from f3rm_ext.workflow.chain_stages import MESH, PAGE, REFINED_MESH, TEXTURED
from f3rm_ext.workflow.manifest import Record
from f3rm_ext.workflow.options import ChainOptions
from f3rm_ext.workflow.records import read_json
from f3rm_ext.workflow.stages import PICTURES, hide_home, scores_file

MAX_TEXTURE_PX = 2048
"""Side of the texture in the page; larger ones are reduced."""
MAX_MIB = 64
"""Largest mesh that is put into a page."""
_MAX_VIEWS = 6
_LOW_COVERAGE = 0.9
"""Share of the pixels of held-out photos below which the report says how the mesh may cover more."""
_SPLATS = {"eval-coarse": "coarse splats", "eval-refined": "refined splats"}
_SHOWN = (("eval-texture", TEXTURED), ("texture", TEXTURED), ("refined-mesh", REFINED_MESH), ("mesh", MESH))


def write_page(
    options: ChainOptions,
    folder: Path,
    capture: Mapping[str, Any],
    records: Mapping[str, Record],
    kept: set[str],
) -> str:
    """Returns the page."""
    scores = {name: _scores(folder, name) for name in records if name.startswith("eval-")}
    last = next((records[name] for name in ("refine", "clean", "coarse") if name in records), None)
    return render_page(
        "sugar_run.html",
        title=f"{capture_name(options.images or Path(capture['path']))}: a mesh to carry away",
        lead=_lead(options, capture, records),
        keys=_key_figures(scores, records),
        mesh=_mesh(options, folder, records),
        splats_page=PAGE if "page" in records else None,
        views=_views(folder, scores),
        figures=_figures(options, scores, capture["has_masks"]),
        stages=_stages(records, kept),
        commands=[shorten(record.command, folder) for record in records.values()],
        config=last and last.outputs["config"].path,
        facts=machine_facts(next((str(one["device"]) for one in scores.values() if "device" in one), "")),
    )


def _scores(folder: Path, name: str) -> dict[str, Any]:
    scores = read_json(scores_file(folder, name))
    return {key: value for key, value in scores.get("results", scores).items() if value is not None}


def _lead(options: ChainOptions, capture: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    titles = [record.title.lower() for name, record in records.items() if not name.startswith("eval-")]
    if options.images is not None:
        photo_count = _poses(options).get("photos", capture["photos"])
        return f"From {plural(photo_count, 'photo')} without poses in {len(titles)} stages: {', '.join(titles)}."
    start = f" Coarse splats came from {options.coarse_checkpoint}." if options.coarse_checkpoint else ""
    return f"From {plural(capture['photos'], 'photo')} in {len(titles)} stages: {', '.join(titles)}.{start}"


def _poses(options: ChainOptions) -> dict[str, Any]:
    """The result of the stage sfm; empty without it."""
    return read_json(options.capture / "sfm.json").get("result", {}) if options.images is not None else {}


def _key_figures(scores: Mapping[str, Mapping[str, Any]], records: Mapping[str, Record]) -> list[tuple[str, str]]:
    keys = []
    for name, label in (("eval-refined", "refined splats"), ("eval-texture", "textured mesh")):
        result = scores.get(name, {})
        if "psnr" in result:
            inside = result.get("psnr_covered")  # None where the mesh covers no pixel
            where = f"; {inside:.1f} dB on the {result['coverage']:.0%} that it covers" if inside else ""
            keys.append((f"{result['psnr']:.1f} dB", f"PSNR on held-out views, {label}{where}"))
    best = (scores.get("eval-mesh", {}).get("scores") or [None])[-1]
    if best:
        keys.append((f"{best['f_score']:.2f}", f"F-score of the mesh at {best['threshold']:.3g}"))
    keys.append((duration(sum(record.seconds for record in records.values())), "all stages"))
    keys.append((f"{max(record.peak_mib for record in records.values()):,.0f} MiB", "peak memory of a stage"))
    return keys


def _mesh(options: ChainOptions, folder: Path, records: Mapping[str, Record]) -> dict[str, Any] | None:
    """The mesh to turn, or why it cannot be shown; None without a mesh."""
    path = next((folder / file for stage, file in _SHOWN if stage in records), None)
    if path is None:
        return None
    try:
        return {"file": path.name, "data": page_mesh(path), "view": first_photo_view(options.capture)}
    except MeshError as error:
        return {"error": str(error)}


def page_mesh(path: Path) -> str:
    """Returns a mesh for a page: GLB as base64, y up, with a texture of at most :data:`MAX_TEXTURE_PX` as JPEG.

    Raises:
        MeshError: it cannot be read, or is too large for a page.
    """
    from f3rm_ext.capture.frame import Y_UP
    from f3rm_ext.mesh.glb_file import encode_glb
    from f3rm_ext.mesh.mesh_files import read_mesh

    content = encode_glb(read_mesh(path), MAX_TEXTURE_PX, rotation=Y_UP)
    if len(content) > MAX_MIB * 2**20:
        raise MeshError(f"{path.name} is too large for a page ({len(content) / 2**20:.0f} MiB): open the file itself.")
    return base64.b64encode(content).decode("ascii")


def first_photo_view(data: Path) -> dict[str, Any]:
    """Returns the view of the first photo of a capture, in the frame of the capture turned so that y is up.

    Returns:
        ``position``, ``ahead`` (viewing direction), ``up`` (axis about which dragging turns) and ``fov_deg`` (vertical
        field of view); empty where poses or intrinsics of the capture do not tell.
    """
    try:
        meta, _ = read_transforms(data)
        poses = np.array([frame["transform_matrix"] for frame in meta["frames"]], dtype=float)
        lens: dict[str, Any] = {**meta, **meta["frames"][0]}
        focal_px = lens["fl_y"] if "fl_y" in lens else lens["fl_x"]
        fov_deg = float(np.degrees(2 * np.arctan2(lens["h"] / 2, focal_px)))
        up = poses[:, :3, 1].mean(axis=0)
        up /= max(float(np.linalg.norm(up)), 1e-9)
    except (CaptureError, KeyError, IndexError, ValueError, TypeError):
        return {}
    up = np.array([0.0, 0.0, 1.0]) if up[2] > 0.8 else up  # photos are seldom taken quite level
    vectors = {"position": poses[0, :3, 3], "ahead": -poses[0, :3, 2], "up": up}
    turned = {name: np.round([x, z, -y], 6).tolist() for name, (x, y, z) in vectors.items()}
    return {**turned, "fov_deg": fov_deg}


def _views(folder: Path, scores: Mapping[str, Any]) -> list[list[tuple[str, Picture]]]:
    """Held-out photos beside what was rendered for them: for each view, pictures with their labels."""
    columns: dict[str, list[np.ndarray]] = {}
    for name, label in {**_SPLATS, "eval-texture": "textured mesh"}.items():
        pairs = list(_pairs(folder, name)) if name in scores else []
        if pairs:
            columns.setdefault("photo", [photo for photo, _ in pairs])
            columns[label] = [rendering for _, rendering in pairs]
    views = zip(*columns.values(), strict=False)
    return [[(label, Picture.from_array(image)) for label, image in zip(columns, view, strict=True)] for view in views]


def _pairs(folder: Path, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Photo and rendering of each picture of an evaluation, which shows both side by side."""
    pattern = "*_img_*.png" if name in _SPLATS else "test-*.png"
    for path in sorted((scores_file(folder, name).parent / PICTURES).glob(pattern))[:_MAX_VIEWS]:
        left, right = np.array_split(read_picture(path), 2, axis=1)
        yield (left, right) if name in _SPLATS else (right, left)


def _figures(options: ChainOptions, scores: Mapping[str, Mapping[str, Any]], has_masks: bool) -> Table:
    rows, poses = list[tuple[str, str, str]](), _poses(options)
    views = "mean of the held-out photos"
    if has_masks:
        views += ", within their masks, whose edges can cost several dB"
    if poses:
        posed, photo_count = poses["registered"], poses["photos"]
        note = "reasons in sfm_report.html" if posed < photo_count else "all of them"
        rows.append(("Photos with a pose", f"{posed} of {photo_count}", note))
        error = f"mean of {poses['points']:,} points"
        rows.append(("Reprojection error", f"{poses['reprojection_error_px']:.2f} px", error))
    for name, label in _SPLATS.items():
        for key, form in (("psnr", "{:.2f} dB"), ("ssim", "{:.3f}"), ("lpips", "{:.3f}")):
            if key in scores.get(name, {}):
                rows.append((f"{key.upper()}, {label}", form.format(scores[name][key]), views))
    texture, mesh = scores.get("eval-texture", {}), scores.get("eval-mesh", {})
    if "psnr" in texture:
        rows.append(("PSNR, textured mesh", f"{texture['psnr']:.2f} dB", "pixels without mesh are black and count"))
    if "psnr_covered" in texture:
        covered = f"of the {texture['coverage']:.0%} of the pixels that the mesh covers"
        if texture["coverage"] < _LOW_COVERAGE and "min-views" not in options.passed_on.get("mesh", {}):
            covered += "; --mesh.min-views 1 adds what a single photo shows, which may be wrong"
        rows.append(("PSNR, textured mesh", f"{texture['psnr_covered']:.2f} dB", covered))
    for key, meaning in (
        ("accuracy", "mean distance from the mesh to the truth"),
        ("completeness", "mean distance from the truth to the mesh"),
        ("chamfer", "mean of both"),
    ):
        if key in mesh:
            rows.append((f"{key.capitalize()} of the mesh", f"{mesh[key]:.4g}", f"{meaning}, units of the truth"))
    for one in mesh.get("scores", []):
        share = f"precision {one['precision']:.3f}, recall {one['recall']:.3f}"
        rows.append((f"F-score at {one['threshold']:.4g}", f"{one['f_score']:.3f}", share))
    return Table(["figure", "value", "meaning"], rows, "lrn")


def _stages(records: Mapping[str, Record], kept: set[str]) -> Table:
    rows, sentences = [], set[str]()
    for name, record in records.items():
        size = sum(output.size for output in record.outputs.values())
        notes = [note.rstrip(".") for note in record.notes if note not in sentences]
        sentences.update(record.notes)
        notes += [plural(record.runs, "run")] if record.runs > 1 else []
        notes += ["done before"] if name in kept else []
        bytes_text = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        cells = (duration(record.seconds), f"{record.peak_mib:,.0f} MiB", bytes_text, "; ".join(notes))
        rows.append([record.title, *cells])
    return Table(["stage", "time", "peak memory", "files", ""], rows, "lrrrn")


def shorten(command: str, folder: Path) -> str:
    """Returns a command with paths relative to a folder, and without that of the home folder."""
    return hide_home(command.replace(f"{folder}/", ""))
