"""The report of a capture: a page with its cameras and points from above, its matches, and every photo."""

import html
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from f3rm_ext.capture.images import name_some
from f3rm_ext.sfm.work_folder import REPORT
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.pictures import data_uri

_MOST_POINTS = 3000
_VIEW_PX = 460
_CORNERS = ((-1, -0.7), (1, -0.7), (1, 0.7), (-1, 0.7))
"""Corners of a drawn camera, in half widths."""
_MOST_THUMBNAILS, _THUMBNAIL_PX = 400, 96
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top }
figcaption { color: #666; font-size: .85rem }
svg, img.matrix { background: #f6f6f6; border: 1px solid #ddd }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .5rem; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.lost { background: #fff0ee } .flag { color: #a33 } img.matrix { image-rendering: pixelated }
"""


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Returns what a user should know about a result of ``f3rm-ext sfm process``, a sentence each."""
    said = [
        f"{result['registered']} of {result['photos']} photos have a pose; {result['points']:,} points, each seen in "
        f"{result['track_length']:.1f} photos; mean reprojection error {result['reprojection_error_px']:.2f} px."
    ]
    by_reason = sorted(result["without_pose"].items(), key=lambda item: item[1])
    for reason, pairs in itertools.groupby(by_reason, key=lambda item: item[1]):
        said.append(f"Without a pose: {name_some([name for name, _ in pairs])}: {reason}.")
    if result["blurred"]:
        said.append(f"Blurred: {name_some(result['blurred'])}; sharper photos give a sharper scene.")
    if result["same"]:
        shown = [f"{name} ({other})" for name, other in result["same"].items()]
        said.append(f"The same picture as another: {name_some(shown)}; it adds nothing.")
    if result["gps_error_m"] is not None:
        said.append(f"GPS gives metres, north and up: cameras are {result['gps_error_m']:.1f} m off at the median.")
    return said


def write_report(
    out: Path,
    model: Any,
    photos: Mapping[str, Mapping[str, Any]],
    result: Mapping[str, Any],
    num_features: Mapping[str, int],
    num_matches: Mapping[tuple[str, str], int],
) -> None:
    """Writes the page, one file that needs no network.

    Args:
        out: folder of the capture, with its photos in ``images/``.
        model: a ``pycolmap.Reconstruction``.
        photos: what is known about each photo, by name.
        result: figures.
        num_features: by photo.
        num_matches: verified matches by pair of photos.
    """
    summary = "".join(f"<p>{html.escape(text)}</p>" for text in sentences(result))
    if result["doubt"]:
        summary = f'<p class="flag">These poses are doubtful: {html.escape(result["doubt"])}.</p>{summary}'
    names = list(photos)
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Camera poses</title><style>{_STYLE}</style>
<h1>Camera poses of {html.escape(out.resolve().name)}</h1>{summary}
<h2>Cameras and points</h2>
<figure>{_view(model, side=False)}<figcaption>from above</figcaption></figure>
<figure>{_view(model, side=True)}<figcaption>from the side</figcaption></figure>
<h2>Matches</h2>
<figure><img class="matrix" width="{_VIEW_PX}" src="{_matrix(names, num_matches)}" alt="matches of each pair of photos">
<figcaption>bright: many matches between two photos, in the order of the table</figcaption></figure>
<h2>Photos</h2>
<table><tr><th></th><th>photo</th><th>features</th><th>matched photos</th><th>blur</th><th>pose</th></tr>
{"".join(_row(out, number, name, photos[name], result, num_features, num_matches) for number, name in enumerate(names))}
</table></html>
"""
    write_atomic(out / REPORT, page.encode(errors="backslashreplace"))


def _row(
    out: Path,
    number: int,
    name: str,
    photo: Mapping[str, Any],
    result: Mapping[str, Any],
    num_features: Mapping[str, int],
    num_matches: Mapping[tuple[str, str], int],
) -> str:
    reason = result["without_pose"].get(name, "")
    flags = ["blurred"] * (name in result["blurred"]) + ["turned upright"] * bool(photo["turned"])
    if name in result["same"]:
        flags.append(f"same as {result['same'][name]}")
    picture = ""
    if number < _MOST_THUMBNAILS:
        with Image.open(out / "images" / name) as image:
            image.draft("RGB", (2 * _THUMBNAIL_PX, 2 * _THUMBNAIL_PX))
            thumbnail = image.convert("RGB")
        thumbnail.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
        picture = f'<img src="{data_uri(np.asarray(thumbnail))}" alt="">'
    partners = sum(name in pair for pair in num_matches)
    flagged = f' <span class="flag">{html.escape("; ".join(flags))}</span>' if flags else ""
    return (
        f'<tr class="{"lost" if reason else "found"}"><td>{picture}</td>'
        f"<td>{html.escape(name)}<br><small>{html.escape(photo['source'])}</small>{flagged}</td>"
        f'<td class="number">{num_features.get(name, 0):,}</td><td class="number">{partners}</td>'
        f'<td class="number">{photo["blur"]:.2f}</td><td>{html.escape(reason) or "yes"}</td></tr>\n'
    )


def _matrix(names: list[str], num_matches: Mapping[tuple[str, str], int]) -> str:
    """A picture with a pixel for each pair of photos, as a data address."""
    place = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)))
    for (a, b), number in num_matches.items():
        counts[place[a], place[b]] = counts[place[b], place[a]] = number
    scaled = np.log1p(counts) / max(1.0, float(np.log1p(counts.max())))
    levels: UInt8[np.ndarray, "n n"] = np.rint(255 * scaled).astype(np.uint8)
    factor = max(1, _VIEW_PX // len(names))
    return data_uri(levels.repeat(factor, axis=0).repeat(factor, axis=1)[..., None].repeat(3, axis=2))


def axes_of(model: Any) -> tuple[Float[np.ndarray, "3"], Float[np.ndarray, "3"], Float[np.ndarray, "3"]]:
    """Returns right, forward and up of the scene: up is where the cameras' upper edges point on average."""
    views = np.array([model.image(number).cam_from_world().rotation.matrix() for number in model.reg_image_ids()])
    up = -views[:, 1].mean(axis=0)
    up /= max(np.linalg.norm(up), 1e-9)
    forward = views[0, 2] - up * (views[0, 2] @ up)
    if np.linalg.norm(forward) < 1e-6:  # the first camera looks straight down
        forward = np.cross(up, views[0, 0])
    forward /= np.linalg.norm(forward)
    return np.cross(forward, up), forward, up


def _view(model: Any, *, side: bool) -> str:
    """A parallel projection of cameras and points as SVG; the names of cameras show under the pointer."""
    right, forward, up = axes_of(model)
    plane = np.stack([right, up if side else forward])
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    centres = np.array([image.projection_center() for image in images])
    points = list(model.points3D.values())
    chosen = np.random.default_rng(0).permutation(len(points))[:_MOST_POINTS]
    xyz = np.array([points[i].xyz for i in chosen]).reshape(-1, 3)
    flat, flat_centres = xyz @ plane.T, centres @ plane.T
    core = np.concatenate([flat_centres, flat])  # far points must not shrink the picture
    low, high = np.percentile(core, [2, 98], axis=0)
    low, high = np.minimum(low, flat_centres.min(axis=0)), np.maximum(high, flat_centres.max(axis=0))
    scale = 0.9 * _VIEW_PX / max(float((high - low).max()), 1e-9)

    def place(values: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        return (values - (low + high) / 2) * scale * np.array([1.0, -1.0]) + _VIEW_PX / 2

    dots = []
    for (x, y), i in zip(place(flat), chosen, strict=True):
        if 0 <= x < _VIEW_PX and 0 <= y < _VIEW_PX:
            r, g, b = points[i].color
            dots.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="1.6" height="1.6" fill="#{r:02x}{g:02x}{b:02x}"/>')
    frusta = []
    size = 0.045 * _VIEW_PX / scale
    for image, centre in zip(images, centres, strict=True):
        rotation = image.cam_from_world().rotation.matrix()
        tip = centre + size * rotation[2]
        corners = [centre, *(tip + size * 0.5 * (sx * rotation[0] + sy * rotation[1]) for sx, sy in _CORNERS)]
        a, *base = place(np.array(corners) @ plane.T)
        lines = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for b in base)
        lines += "M" + "L".join(f"{b[0]:.1f} {b[1]:.1f}" for b in base) + "Z"
        frusta.append(f'<path d="{lines}"><title>{html.escape(image.name)}</title></path>')
    return (
        f'<svg width="{_VIEW_PX}" height="{_VIEW_PX}" xmlns="http://www.w3.org/2000/svg">{"".join(dots)}'
        f'<g fill="none" stroke="#c02" stroke-width="1" pointer-events="all">{"".join(frusta)}</g></svg>'
    )
