"""The report of `f3rm-ext sfm process`: cameras and points from two sides, matches, and every photo."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from f3rm_ext.capture.images import name_some
from f3rm_ext.html.charts import WARM, svg_chart
from f3rm_ext.html.page import render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.sfm.mapping import photo_up
from f3rm_ext.sfm.quality import reason_kind
from f3rm_ext.sfm.work_folder import REPORT
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.pictures import data_uri, open_photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 3000
_VIEW_PX = 460
_CORNERS = ((-1, -0.7), (1, -0.7), (1, 0.7), (-1, 0.7))
"""Corners of a drawn camera, in half widths."""
_MAX_THUMBNAILS, _THUMBNAIL_PX = 400, 96


def summarize(result: Mapping[str, Any]) -> list[str]:
    """Returns what a user should know about a result of ``f3rm-ext sfm process``, a sentence each."""
    text = [
        f"{result['registered']} of {result['photos']} photos have a pose; {result['points']:,} points, each seen in "
        f"{result['track_length']:.1f} photos; mean reprojection error {result['reprojection_error_px']:.2f} px."
    ]
    alike = defaultdict[str, list[str]](list)
    for name, reason in result["without_pose"].items():
        alike[reason_kind(reason)].append(name)
    for kind, names in alike.items():
        reason = result["without_pose"][names[0]] if len(names) == 1 else kind
        text.append(f"Without a pose: {name_some(names)}: {reason}.")
    if result["blurred"]:
        text.append(f"Blurred: {name_some(result['blurred'])}; sharper photos give a sharper scene.")
    if result["same"]:
        duplicates = [f"{name} ({other})" for name, other in result["same"].items()]
        text.append(f"The same picture as another: {name_some(duplicates)}; it adds nothing.")
    if result.get("z_is_up") and result["gps_error_m"] is None:
        text.append("Photos do not agree on what is up, so the plane of the cameras is taken as level.")
    if result["gps_error_m"] is not None:
        text.append(f"GPS gives metres, north and up: cameras are {result['gps_error_m']:.1f} m off at the median.")
    return text


def write_report(
    out: Path,
    model: Any,
    photos: Mapping[str, Mapping[str, Any]],
    result: Mapping[str, Any],
    num_features: Mapping[str, int],
    num_matches: Mapping[tuple[str, str], int],
) -> None:
    """Writes the page."""
    rows, partners = [], Counter(itertools.chain.from_iterable(num_matches))
    for number, (name, photo) in enumerate(photos.items()):
        reason = result["without_pose"].get(name)
        flags = ["blurred"] * (name in result["blurred"]) + ["turned upright"] * bool(photo["turned"])
        if name in result["same"]:
            flags.append(f"same as {result['same'][name]}")
        counts = f"{num_features.get(name, 0):,}", str(partners[name]), f"{photo['blur']:.2f}"
        pose = Markup('<span class="flag">{}</span>').format(reason) if reason else "yes"
        image = Markup()
        if number < _MAX_THUMBNAILS:
            uri = data_uri(thumbnail(out / "images" / name, _THUMBNAIL_PX))
            image = Markup('<img class="thumbnail" src="{}" alt="">').format(uri)
        rows.append([image, name, photo["source"], *counts, pose, "; ".join(flags)])
    header = ["", "photo", "file", "features", "matched photos", "blur", "pose", ""]
    axes = scene_axes(model, z_is_up=result["z_is_up"])
    page = render_page(
        "sfm.html",
        title=f"Camera poses of {out.resolve().name}",
        doubt=result["doubt"],
        sentences=summarize(result),
        top_view=_view(model, axes, side=False),
        side_view=_view(model, axes, side=True),
        matches=_matrix(list(photos), num_matches),
        photos=Table(header, rows, "llnrrrll"),
    )
    write_atomic(out / REPORT, page.encode(errors="backslashreplace"))


def thumbnail(path: Path, side_px: int) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a photo with sides of at most ``side_px``."""
    with open_photo(path) as image:
        image.draft("RGB", (2 * side_px, 2 * side_px))
        small = image.convert("RGB")
    small.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    return np.asarray(small)


def _matrix(names: list[str], num_matches: Mapping[tuple[str, str], int]) -> Markup:
    """A chart with a pixel for each pair of photos."""
    index = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)))
    for (a, b), number in num_matches.items():
        counts[index[a], index[b]] = counts[index[b], index[a]] = number

    def draw(axes: "Axes") -> None:
        axes.imshow(np.log1p(counts), cmap="gray", interpolation="nearest")
        axes.set_axis_off()

    return svg_chart(draw, "Matches of each pair of photos", width_px=_VIEW_PX, height_px=_VIEW_PX)


def scene_axes(model: Any, *, z_is_up: bool) -> Float[np.ndarray, "3 3"]:
    """Returns right, forward and up of the scene, one per row.

    Args:
        z_is_up: whether they are the axes of the model. Otherwise up is where the cameras' upper edges point on
            average, and forward where the first camera looks.
    """
    if z_is_up:
        return np.eye(3)
    up = photo_up(model)
    up /= max(np.linalg.norm(up), 1e-9)
    first = model.image(next(iter(model.reg_image_ids()))).cam_from_world().rotation.matrix()
    forward = first[2] - up * (first[2] @ up)
    if np.linalg.norm(forward) < 1e-6:  # the first camera looks straight down
        forward = np.cross(up, first[0])
    forward /= np.linalg.norm(forward)
    return np.stack([np.cross(forward, up), forward, up])


def _view(model: Any, axes: Float[np.ndarray, "3 3"], *, side: bool) -> Markup:
    """A parallel projection of cameras and points along an axis of the scene; names of cameras are tooltips."""
    right, forward, up = axes
    plane = np.stack([right, up if side else forward])
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    centres = np.array([image.projection_center() for image in images])
    points = list(model.points3D.values())
    chosen = [points[i] for i in np.random.default_rng(0).permutation(len(points))[:_MAX_POINTS]]
    xy = np.array([point.xyz for point in chosen]).reshape(-1, 3) @ plane.T
    # Far points must not shrink the picture; all cameras are in it.
    low, high = np.percentile(np.concatenate([centres @ plane.T, xy]), [2, 98], axis=0)
    low, high = np.minimum(low, (centres @ plane.T).min(axis=0)), np.maximum(high, (centres @ plane.T).max(axis=0))
    extent = max(float((high - low).max()), 1e-9) / 0.9
    size = 0.045 * extent

    def draw(axes: "Axes") -> None:
        colors = np.array([point.color for point in chosen]).reshape(-1, 3) / 255
        axes.scatter(*xy.T, s=2, c=colors, linewidths=0, rasterized=True)
        for number, (image, centre) in enumerate(zip(images, centres, strict=True)):
            rotation = image.cam_from_world().rotation.matrix()
            corners = [
                centre + size * (rotation[2] + 0.5 * (sx * rotation[0] + sy * rotation[1])) for sx, sy in _CORNERS
            ]
            outline = [point for corner, after in zip(corners, corners[1:] + corners[:1], strict=True)
                       for point in (centre, corner, after)]  # fmt: skip
            axes.plot(*(np.array(outline) @ plane.T).T, color=WARM, linewidth=0.8, gid=f"tip-{number}")
        for limits, middle in zip((axes.set_xlim, axes.set_ylim), (low + high) / 2, strict=True):
            limits(middle - extent / 2, middle + extent / 2)
        axes.set_aspect("equal")
        axes.set_axis_off()

    label = "Cameras and points from the side" if side else "Cameras and points from above"
    tooltips = [image.name for image in images]
    return svg_chart(draw, label, width_px=_VIEW_PX, height_px=_VIEW_PX, tooltips=tooltips)
