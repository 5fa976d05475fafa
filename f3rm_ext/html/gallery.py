"""The sections of a report with pictures, as HTML: held-out views and the query by example."""

from html import escape
from typing import Any

from f3rm_ext.html.content import ReportContent, plural
from f3rm_ext.utils.colormaps import heat_stops
from f3rm_ext.utils.pictures import data_uri, read_picture

_SHOWN = ("true", "rendered", "depth", "features")
_CAPTIONS = {
    "true": "photo",
    "rendered": "rendered",
    "depth": "depth",
    "features": "features",
    "true_depth": "exact depth",
    "true_features": "features of the photo",
}


def picture(content: ReportContent, file: str, alt: str, attributes: str = "") -> str:
    """Returns an ``<img>`` with a picture of the report; an empty string if the file is missing."""
    path = content.pictures / file
    if not path.is_file():
        return ""
    image = read_picture(path)
    size = f'width="{image.shape[1]}" height="{image.shape[0]}"'
    return f'<img src="{data_uri(image)}" alt="{escape(alt, quote=True)}" {size} {attributes}>'


def _figure(content: ReportContent, number: int, view: dict[str, Any], name: str) -> str:
    file = view["files"].get(name)
    if not file:
        return ""
    caption = _CAPTIONS[name]
    image = picture(content, file, f"{caption} of {view['image']}", f'data-picture="{number}-{name}"')
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def views_section(content: ReportContent) -> str:
    """A comparison with a slider, then every held-out view as photo, rendering, depth and features."""
    views = content.measured.get("views") or []
    if not views:
        return ""
    files = views[0]["files"]
    modes = [("true", "rendered", "Colour")]
    if "features" in files:
        modes.append(("true_features" if "true_features" in files else "rendered", "features", "Features"))
    modes.append(("true_depth" if "true_depth" in files else "rendered", "depth", "Depth"))
    buttons = "".join(
        f'<button type="button" data-left="{left}" data-right="{right}" data-left-name="{_CAPTIONS[left]}" '
        f'data-right-name="{_CAPTIONS[right]}" aria-pressed="{str(not index).lower()}">{label}</button>'
        for index, (left, right, label) in enumerate(modes)
    )
    thumbs = "".join(
        f'<button type="button" data-view="{number}" aria-pressed="{str(not number).lower()}" '
        f'aria-label="View {number + 1}">{_thumb(content, view)}</button>'
        for number, view in enumerate(views)
    )
    hero = (
        f'<div class="card hero"><div class="modes" role="group" aria-label="What to compare">{buttons}</div>'
        '<div class="stage"><div class="compare">'
        f"{picture(content, files['rendered'], 'right side', 'class=under')}"
        f'<div class="over">{picture(content, files["true"], "left side")}</div>'
        '<span class="tag l">photo</span><span class="tag r">rendered</span>'
        '<input type="range" min="0" max="100" value="50" aria-label="Move the divider"></div>'
        f'<div class="thumbs" role="group" aria-label="Views">{thumbs}</div></div></div>'
    )
    # Pictures that only the comparison shows are hidden beside the strip.
    strips = []
    for number, view in enumerate(views):
        tiles = [_figure(content, number, view, name) for name in _SHOWN]
        hidden = "".join(_figure(content, number, view, name) for name in ("true_depth", "true_features"))
        narrow = "" if all(tiles) else " three"
        strips.append(f'<div class="strip{narrow}">{"".join(tiles)}</div><div hidden>{hidden}</div>')
    exact = " Rendered and exact depth share one colour range." if "true_depth" in files else ""
    return (
        "<h2>Views it has never seen</h2>"
        "<p>These photos were held out of training. Move across the picture to compare; choose what to compare above "
        f"it and the view beside it. Features are projected to three fixed colours. In depth maps, near is blue.{exact}"
        f'</p>{hero}<div class="card">{"".join(strips)}</div>'
    )


def _thumb(content: ReportContent, view: dict[str, Any]) -> str:
    path = content.pictures / view["files"]["true"]
    return f'<img src="{data_uri(read_picture(path), 160)}" alt="">' if path.is_file() else ""


def query_section(content: ReportContent) -> str:
    """The exemplar, where it was found, and how often each object was found."""
    query = content.measured.get("query")
    if not query:
        return ""
    place = f"the feature at x = {query['x']:.0f}, y = {query['y']:.0f}, the middle of the frame"
    if not query.get("is_point", True):
        place = "the mean feature of the frame"
    name = escape(query["object"] or "a patch")
    crop = picture(content, "exemplar_crop.png", f"the exemplar, {name}")
    exemplar = (
        f'<div class="ask"><figure>{picture(content, "exemplar_photo.png", "training photo with the exemplar framed")}'
        f"<figcaption>training photo {escape(query['image'])}; the query is {place}</figcaption></figure>"
        f'<figure class="crop">{crop}<figcaption>the exemplar: {name}</figcaption></figure></div>'
    )
    stops = ",".join(heat_stops())
    legend = (
        f'<div class="legend"><span>cosine {query["low"]:.3f} (upper fifth)</span>'
        f'<i style="background:linear-gradient(90deg,{stops})"></i><span>{query["high"]:.3f} (best)</span>'
        "<span>ring: the best pixel of the view</span></div>"
    )
    tiles = "".join(_found_view(content, view) for view in query["views"])
    return (
        f"<h2>Where is this? A query by example</h2><p>One feature vector, taken from one training photo, is compared "
        f"with the <em>rendered</em> features ({escape(query['head'])}) of views that no training saw. Bright "
        f'means similar.</p><div class="card">{exemplar}<h3>Found in held-out views</h3>{legend}'
        f'<div class="strip">{tiles}</div></div>{_objects_table(content, query)}'
    )


def _found_view(content: ReportContent, view: dict[str, Any]) -> str:
    name = f"view {view['view'] + 1}"
    image = picture(content, view["file"], f"heat map of {name}")
    return f"<figure>{image}<figcaption>{name}: best {view['cosine']:.3f}{_verdict(view)}</figcaption></figure>"


def _verdict(view: dict[str, Any]) -> str:
    if "inside" not in view:
        return ""
    if not view["visible"]:
        return ", object not visible here"
    return ", on the object" if view["inside"] else ", <b>not</b> on the object"


def _objects_table(content: ReportContent, query: dict[str, Any]) -> str:
    objects = [item for item in query["objects"] if item["views"]]
    if not objects:
        return ""
    hits, tries = sum(item["hits"] for item in objects), sum(item["views"] for item in objects)
    overlaps = [item["iou"] for item in objects if item["iou"] is not None]
    rows = "".join(
        f'<tr><td>{escape(item["name"])}</td><td class="n">{item["hits"]} / {item["views"]}</td>'
        f'<td class="n">{item["iou"]:.2f}</td><td class="hide soft">{escape(item["image"])} at '
        f"{item['x']:.0f}, {item['y']:.0f}</td></tr>"
        for item in sorted(objects, key=lambda item: (-item["hits"] / item["views"], -(item["iou"] or 0)))
    )
    unseen = len(query["objects"]) - len(objects)
    them = "it" if unseen == 1 else "them"
    left_out = f" {plural(unseen, 'more object')} could not be judged: no held-out view shows {them}." if unseen else ""
    return (
        f'<div class="card"><h3 style="margin-top:0">All objects, not only the one above</h3><p class="small">The same '
        f"was done for all {len(query['objects'])} labelled objects. The exemplar of each is its innermost pixel in "
        "the training photo that shows most of it. "
        f"<b>Found in {hits} of {tries} tries ({hits / tries:.0%})</b>: the best pixel of the whole view lies on the "
        f"object. Mean IoU {sum(overlaps) / len(overlaps):.2f} at a cosine of {query['mask_cosine']:g}, a threshold "
        f"chosen on another room and the same for all objects.{left_out}</p>"
        f"<details><summary>All {len(objects)} objects</summary>"
        '<div class="scroll"><table><tr><th>object</th><th class="n">found</th><th class="n">IoU</th>'
        f'<th class="hide">exemplar</th></tr>{rows}</table></div></details></div>'
    )
