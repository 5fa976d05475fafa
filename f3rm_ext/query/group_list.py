"""Lists the groups of a scene: a picture of each view with the groups in colours and numbered, and a table of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.errors import UserError
from f3rm_ext.features.extractors.registry import understands_text
from f3rm_ext.html.tables import Table
from f3rm_ext.query import visualization
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.exemplar import deepest_pixel
from f3rm_ext.query.queryable import GroupedPoints, HasGroups, QueryHead
from f3rm_ext.query.run import Photos, View
from f3rm_ext.query.writer import provenance
from f3rm_ext.utils.colormaps import label_overlay_bytes
from f3rm_ext.utils.console import note
from f3rm_ext.utils.output_folder import OutputFolder
from f3rm_ext.utils.pictures import pick_evenly

COMMAND = "query --list"
PICTURE = "groups.png"
VIEWS = 6
"""Views in the picture, at most."""
COMMON_NAMES = tuple(
    "person bicycle car motorcycle bus truck boat bench bird cat dog horse sheep cow backpack umbrella handbag tie "
    "suitcase ball kite bottle glass cup fork knife spoon bowl banana apple sandwich orange carrot pizza cake chair "
    "sofa plant bed table toilet television laptop mouse remote keyboard telephone oven toaster sink refrigerator book "
    "clock vase scissors toy lamp curtain rug cushion picture mirror shelf cupboard box basket plate door window wall "
    "floor ceiling stairs tree grass flower rock road building fence sky water".split()
)
"""What groups are named after unless other texts are given."""
_NAMES = 2
"""Nearest texts of a group."""
_EXTENT = (0.05, 0.95)
"""Quantiles of the positions between which a group extends."""
_LEAST_PX = 60
"""A group with fewer pixels in a view has no number there."""


@dataclass
class Group:
    number: int
    """From 0, the one that photos see most of first."""
    points: int
    """Gaussians, vertices or points on surfaces in it."""
    share: float
    """Share of the pixels of the views shown, 0 to 1."""
    centre: list[float]
    """Median position, capture frame."""
    size: list[float]
    """Extent along the axes of the capture frame, from the 5 % to the 95 % quantile."""
    names: list[tuple[str, float]] = field(default_factory=list)
    """Nearest texts with their cosines, best first; none where the feature understands no text."""


def list_groups(
    run: Photos, grouped: HasGroups, views: Sequence[View], head: QueryHead, texts: Sequence[str], folder: Path
) -> list[Group]:
    """Describes the groups of a run, and writes a picture of them (groups.png) and summary.json.

    Args:
        grouped: has groups by the feature.
        views: some of them, evenly spread, are shown.
        texts: to name groups after; by default :data:`COMMON_NAMES`.

    Raises:
        ConfigError: the folder cannot be used.
    """
    points = grouped.grouped_points(head.name)
    assert points is not None
    record = {**provenance(COMMAND, run, [], 0.0), "feature": head.name, "extractor": head.extractor}
    out = OutputFolder(folder, record)
    out.plan([PICTURE])
    count = int(points.groups.max()) + 1
    shown = [views[index] for index in pick_evenly(len(views), VIEWS)]
    maps = [grouped.group_map(view.camera, head.name) for view in shown]
    pixels = np.bincount(np.concatenate([each[each >= 0] for each in maps]), minlength=count)
    frame, total = run.frame, sum(each.size for each in maps)
    groups = [_describe(number, points, frame, pixels[number] / total) for number in range(count)]
    embeddings = _encode_texts(head, texts or COMMON_NAMES, run.model.device)
    if embeddings is not None:
        for group, cosines in zip(groups, _group_features(points) @ embeddings.values.T, strict=True):
            best = cosines.topk(min(_NAMES, len(embeddings)))
            nearest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            group.names = [(embeddings.sources[index], cosine) for index, cosine in nearest]
    sheet = visualization.Overview(["photo", "groups"], [None, None], len(shown))
    for number, (view, labels) in enumerate(zip(shown, maps, strict=True)):
        assert view.photo is not None
        photo = visualization.resize(run.photo(*view.photo), *labels.shape)
        sheet.add(number, view.name, [photo, draw_groups(photo, labels, count)])
    out.png(PICTURE, sheet.draw([f"{count} groups of {head.extractor}; numbers as in the table"]))
    out.summary({"frame": frame.describe(), "groups": [vars(group) for group in groups]})
    return groups


def draw_groups(
    picture: UInt8[np.ndarray, "h w 3"], labels: Int64[np.ndarray, "h w"], count: int
) -> UInt8[np.ndarray, "h w 3"]:
    """Lays the colours of groups over a picture, with the number of each in its middle."""
    drawn = label_overlay_bytes(picture, labels, count)
    places = {
        str(number): deepest_pixel(labels == number)
        for number in range(count)
        if int((labels == number).sum()) >= _LEAST_PX
    }
    return visualization.write_at(drawn, places)


def tabulate(groups: Sequence[Group]) -> Table:
    has_names = any(group.names for group in groups)
    rows = [
        [
            str(group.number),
            *([", ".join(f"{name} {cosine:.2f}" for name, cosine in group.names)] if has_names else []),
            f"{group.share:.1%}",
            f"{group.points:,}",
            " × ".join(f"{value:.2f}" for value in group.size),
            ", ".join(f"{value:.2f}" for value in group.centre),
        ]
        for group in groups
    ]
    header = ["group", *(["nearest texts"] if has_names else []), "of the views", "points", "size", "place"]
    return Table(header, rows, "rl" if has_names else "r")


def _describe(number: int, points: GroupedPoints, frame: CaptureFrame, share: float) -> Group:
    own = frame.to_capture(points.positions[points.groups == number].cpu().numpy().astype(np.float64))
    low, high = np.quantile(own, _EXTENT, axis=0)
    return Group(number, len(own), float(share), np.median(own, axis=0).tolist(), (high - low).tolist())


def _group_features(points: GroupedPoints) -> torch.Tensor:
    """Mean direction of each group, (groups, feat), norm 1."""
    known = torch.nonzero(points.groups >= 0)[:, 0]
    sums = torch.zeros(int(points.groups.max()) + 1, points.codes.shape[1], device=points.codes.device)
    for part in known.split(1 << 14):
        rows = torch.nn.functional.normalize(points.codes[part].float(), dim=1)
        sums.index_add_(0, points.groups[part].long(), rows)
    return torch.nn.functional.normalize(sums, dim=1).cpu()


def _encode_texts(head: QueryHead, texts: Sequence[str], device: torch.device) -> Embeddings | None:
    try:
        return TextEncoder(device).encode(head, texts) if understands_text(head.extractor) else None
    except (UserError, OSError) as error:
        note(f"Groups have no names: {error}")
        return None
