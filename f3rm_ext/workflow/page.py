"""The report of a chain as a single HTML file: the mesh to turn, held-out views, figures, stages and commands."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.errors import MeshError
from f3rm_ext.html.content import capture_name, duration, machine_facts, plural
from f3rm_ext.html.page import html_page
from f3rm_ext.html.tables import fact_list
from f3rm_ext.utils.pictures import data_uri, read_picture
from f3rm_ext.workflow.chain_stages import MESH, REFINED_MESH, TEXTURED
from f3rm_ext.workflow.manifest import Record
from f3rm_ext.workflow.mesh_viewer import STYLE, first_photo_view, mesh_viewer, page_mesh, viewer_script
from f3rm_ext.workflow.options import ChainOptions
from f3rm_ext.workflow.records import read_json
from f3rm_ext.workflow.stages import PICTURES, scores_file

_VIEWS = 6
_SPLATS = {"eval-coarse": "coarse splats", "eval-refined": "refined splats"}
_SHOWN = (("eval-texture", TEXTURED), ("texture", TEXTURED), ("refined-mesh", REFINED_MESH), ("mesh", MESH))


def write_page(
    options: ChainOptions,
    folder: Path,
    capture: Mapping[str, Any],
    records: Mapping[str, Record],
    kept: set[str],
) -> str:
    """Returns the page.

    Args:
        options: of the chain.
        folder: its output.
        capture: of :func:`f3rm_ext.workflow.manifest.identify`.
        records: of finished stages, in order.
        kept: stages that an earlier call has finished.
    """
    scores = {name: _scores(folder, name) for name in records if name.startswith("eval-")}
    shown, script = _mesh(options, folder, records)
    body = "".join(
        [
            f'<p class="lead">{escape(_lead(options, capture, records))}</p>{_keys(scores, records)}',
            shown,
            _views(folder, scores),
            _figures(_poses(options), scores),
            _stages(records, kept),
            _commands(folder, records),
            f'<h2>Made with</h2><div class="card">{fact_list(machine_facts(_device(scores)))}</div>',
        ]
    )
    name = capture_name(options.images or Path(capture["path"]))
    return html_page(
        f"{name}: a mesh to carry away",
        "f3rm-ext sugar run",
        body,
        "This page is a single file and loads nothing from elsewhere. Held-out photos took no part in training. "
        "The mesh is shown by three.js (MIT licence, in the source of this page).",
        script,
        STYLE,
    )


def _scores(folder: Path, name: str) -> dict[str, Any]:
    found = read_json(scores_file(folder, name))
    return found.get("results", found)


def _device(scores: Mapping[str, Mapping[str, Any]]) -> str:
    return next((str(one["device"]) for one in scores.values() if "device" in one), "")


def _lead(options: ChainOptions, capture: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    done = [record.title.lower() for name, record in records.items() if not name.startswith("eval-")]
    if options.images is not None:
        given = _poses(options).get("photos", capture["photos"])
        return f"From {plural(given, 'photo')} without poses in {len(done)} stages: {', '.join(done)}."
    start = f" Coarse splats came from {options.coarse_checkpoint}." if options.coarse_checkpoint else ""
    return f"From {plural(capture['photos'], 'photo')} in {len(done)} stages: {', '.join(done)}.{start}"


def _poses(options: ChainOptions) -> dict[str, Any]:
    """What the stage sfm found out; empty without it."""
    return read_json(options.capture / "sfm.json").get("result", {}) if options.images is not None else {}


def _keys(scores: Mapping[str, Mapping[str, Any]], records: Mapping[str, Record]) -> str:
    keys = []
    for name, label in (("eval-refined", "refined splats"), ("eval-texture", "textured mesh")):
        if "psnr" in scores.get(name, {}):
            keys.append((f"{scores[name]['psnr']:.1f} dB", f"PSNR on views it has never seen, {label}"))
    best = (scores.get("eval-mesh", {}).get("scores") or [None])[-1]
    if best:
        keys.append((f"{best['f_score']:.2f}", f"F-score of the mesh at {best['threshold']:.3g}"))
    keys.append((duration(sum(record.seconds for record in records.values())), "all stages together"))
    keys.append((f"{max(record.peak_mib for record in records.values()):,.0f} MiB", "most memory of a stage"))
    cards = "".join(f'<div class="key"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in keys)
    return f'<div class="keys">{cards}</div>'


def _mesh(options: ChainOptions, folder: Path, records: Mapping[str, Record]) -> tuple[str, str]:
    """The mesh to turn, and the script that shows it."""
    path = next((folder / file for stage, file in _SHOWN if stage in records), None)
    if path is None:
        return "", ""
    words = "Drag to turn it, scroll to zoom, drag with the right button to move."
    try:
        viewer = mesh_viewer(page_mesh(path), first_photo_view(options.capture))
    except MeshError as error:
        return f"<h2>The mesh</h2><p>{escape(str(error))}</p>", ""
    return (
        f"<h2>The mesh</h2><p>{words} At first it is seen from where the first photo was taken. The file is "
        f"<code>{path.name}</code>.</p>{viewer}",
        viewer_script(),
    )


def _views(folder: Path, scores: Mapping[str, Any]) -> str:
    """Held-out photos beside what was rendered for them."""
    columns: dict[str, list[np.ndarray]] = {}
    for name, label in _SPLATS.items():
        halves = list(_halves(folder, name, "*_img_*.png")) if name in scores else []
        if halves:
            columns.setdefault("photo", [photo for photo, _ in halves])
            columns[label] = [made for _, made in halves]
    halves = list(_halves(folder, "eval-texture", "test-*.png")) if "eval-texture" in scores else []
    if halves:
        columns.setdefault("photo", [photo for _, photo in halves])
        columns["textured mesh"] = [made for made, _ in halves]
    if not columns:
        return ""
    count = min(_VIEWS, *map(len, columns.values()))
    strips = []
    for number in range(count):
        tiles = "".join(
            f'<figure><img src="{data_uri(pictures[number])}" alt="{escape(label)}, view {number + 1}">'
            f"<figcaption>{escape(label)}</figcaption></figure>"
            for label, pictures in columns.items()
        )
        strips.append(f'<div class="strip" style="grid-template-columns:repeat({len(columns)},1fr)">{tiles}</div>')
    return (
        f"<h2>Views it has never seen</h2><p>{plural(count, 'photo')} held out of training, beside what each stage "
        f'renders from the same place.</p><div class="card">{"".join(strips)}</div>'
    )


def _halves(folder: Path, name: str, pattern: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Left and right half of each picture of an evaluation."""
    for path in sorted((scores_file(folder, name).parent / PICTURES).glob(pattern))[:_VIEWS]:
        picture = read_picture(path)
        middle = picture.shape[1] // 2
        yield picture[:, :middle], picture[:, middle:]


def _figures(poses: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[tuple[str, str, str]] = []
    if poses:
        posed, given = poses["registered"], poses["photos"]
        note = "reasons in the table below" if posed < given else "all of them"
        rows.append(("Photos with a pose", f"{posed} of {given}", note))
        error = f"mean of {poses['points']:,} points"
        rows.append(("Reprojection error", f"{poses['reprojection_error_px']:.2f} px", error))
    for name, label in _SPLATS.items():
        for key, form in (("psnr", "{:.2f} dB"), ("ssim", "{:.3f}"), ("lpips", "{:.3f}")):
            if key in scores.get(name, {}):
                rows.append((f"{key.upper()}, {label}", form.format(scores[name][key]), "mean of the held-out photos"))
    texture, mesh = scores.get("eval-texture", {}), scores.get("eval-mesh", {})
    if texture:
        rows.append(("PSNR, textured mesh", f"{texture['psnr']:.2f} dB", "pixels without mesh are black and count"))
        covered = f"of the {texture['coverage']:.0%} of the pixels that the mesh covers"
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
    if not rows:
        return ""
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n"><b>{escape(value)}</b></td><td class="soft small">{escape(note)}'
        "</td></tr>"
        for name, value, note in rows
    )
    return f'<h2>Measured</h2><div class="card scroll"><table class="named">{body}</table></div>'


def _stages(records: Mapping[str, Record], kept: set[str]) -> str:
    rows, shown = [], set[str]()
    for name, record in records.items():
        size = sum(output.size for output in record.outputs.values())
        notes = [
            *(note.rstrip(".") for note in record.notes if note not in shown),
            *([plural(record.runs, "run")] if record.runs > 1 else []),
        ]
        shown.update(record.notes)
        notes += ["done before"] if name in kept else []
        cells = (
            duration(record.seconds),
            f"{record.peak_mib:,.0f} MiB",
            f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB",
        )
        rows.append(
            f"<tr><td>{escape(record.title)}</td>"
            + "".join(f'<td class="n">{cell}</td>' for cell in cells)
            + f'<td class="soft small">{escape("; ".join(notes))}</td></tr>'
        )
    return (
        "<h2>Stages</h2><p>Wall time, the most resident memory of each stage's process, and the size of its files. "
        'Memory of a graphics card is not in it.</p><div class="card scroll"><table><tr><th>stage</th>'
        f'<th class="n">time</th><th class="n">peak memory</th><th class="n">files</th><th></th></tr>'
        f"{''.join(rows)}</table></div>"
    )


def _commands(folder: Path, records: Mapping[str, Record]) -> str:
    typed = "".join(f"<pre>{escape(shorten(record.command, folder))}</pre>" for record in records.values())
    last = next((records[name] for name in ("refine", "coarse") if name in records), None)
    further = ""
    if last is not None:
        config = last.outputs["config"].path
        further = (
            "<h3>Go on</h3>"
            f"<pre>ns-viewer --load-config {escape(config)}</pre>"
            f"<pre>f3rm-ext export splats --load-config {escape(config)} --out splats.ply</pre>"
        )
    return (
        "<h2>The commands</h2><p>Exactly these commands were run. Paths are relative to the folder of this page.</p>"
        f"{typed}{further}"
    )


def shorten(command: str, folder: Path) -> str:
    """Returns a command with paths relative to a folder, and without that of the home folder."""
    return command.replace(f"{folder}/", "").replace(str(Path.home()), "~")
