r"""Selecting objects in runs of splats: outlines and remains in held-out views, beside thresholds on Gaussians' scores.

    ns-train sugar-ext-lite --data CAPTURE --max-num-iterations 1500 --pipeline.model.regularization none \
        --pipeline.datamanager.camera-res-scale-factor 0.5 \
        --pipeline.datamanager.features.extractors labels:data=CAPTURE
    python benchmarks/splat_selection.py --runs tabletop=outputs/.../config.yml

Each class of the capture's label images is selected by text, with the other classes as negatives, as `f3rm-ext splats
select` selects it but without the Gaussians that come to light. The outline is where the selection alone has an
accumulation above ½. Remains are pixels of the class whose colour is nearly the same without the selection; a
background of the same colour counts, too. Features have no part in that. Values are means over pairs of a view and a
class of at least 50 pixels, then over classes. Beside it, Gaussians on the outline (a share of 0.1 to 0.9) are weighed,
which lowers their opacities in both parts by their shares, or divided: those that show at least 30 pixels become three
along their longest axis, which are lifted again. Prints rows and writes results/splat_selection.json, which keeps those
of other runs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from jaxtyping import Bool, Float
from processes import write_report
from torch import Tensor

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.questions import score_gaussians
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.query.builders import text_queries
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.metrics import boundary_iou
from f3rm_ext.query.queryable import get_head, score_image
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rendering import render
from f3rm_ext.splat.selection import MIN_SHARE, MaskShares, lift_masks

RESULT = Path(__file__).parent / "results" / "splat_selection.json"
MIN_PX = 50
SAME = 0.05
"""A pixel remains if no colour changes by more than this, of 1."""
PLAIN = (0.5, 0.7, 0.9)
SHARES = (0.3, 0.4, 0.5, 0.6)
OUTLINE = (0.1, 0.9)
"""Shares of Gaussians on the outline."""
LARGE_PX = 30.0
"""Those that show more are divided."""
CHILDREN = (-0.9, 0.0, 0.9)
"""Where the parts of a divided Gaussian lie along its longest axis, in its standard deviations."""
CHILD_SIZE = 0.56
"""Their standard deviation there, in that of the whole."""
_STEPS = 60
"""Steps in which their opacities are found."""

Parts = tuple[Gaussians, Gaussians]
"""An object, and the scene without it."""


def cut(splats: Gaussians, inside: Bool[Tensor, " gaussians"]) -> Parts:
    """Returns the Gaussians inside and the others."""
    return splats[inside], splats[~inside]


def weigh(splats: Gaussians, shares: Float[Tensor, " gaussians"]) -> Parts:
    """Gives Gaussians on the outline to both parts, with opacities by their shares."""
    parts, (low, high) = [], OUTLINE
    for share in (shares, 1 - shares):
        alphas = splats.alphas() * torch.where((share > low) & (share < high), share, 1)
        lowered = replace(splats, opacities=torch.logit(alphas, 1e-6).view(-1, 1))
        parts.append(lowered[share > low])
    return parts[0], parts[1]


def divide(splats: Gaussians, rows: Bool[Tensor, " gaussians"]) -> Gaussians:
    """Divides some Gaussians into three along their longest axis; the opacity along the axis stays about the same."""
    whole = splats[rows]
    axis, at = whole.sizes().argmax(dim=1), torch.tensor(CHILDREN)
    longest = whole.sizes().gather(1, axis[:, None])
    along = longest * whole.rotations()[torch.arange(len(whole)), :, axis]
    overlap = (-0.5 * ((at[:, None] - at) / CHILD_SIZE).square()).exp()
    wanted = -(whole.alphas().view(-1, 1) * (-0.5 * at.square()).exp()).clamp_max(0.9999).neg().log1p()
    alphas = wanted.neg().expm1().neg()
    for _ in range(_STEPS):  # the optical depth at each centre is that of the whole
        there = -(1 - alphas[:, None] * overlap).log().sum(dim=-1)
        alphas = (alphas * (wanted / there.clamp_min(1e-9)).sqrt()).clamp(1e-6, 0.9999)
    scales = whole.scales.scatter(1, axis[:, None], (longest * CHILD_SIZE).log())
    parts = [
        replace(whole, means=whole.means + offset * along, scales=scales, opacities=torch.logit(alphas[:, k, None]))
        for k, offset in enumerate(CHILDREN)
    ]
    columns = [part.tensors() for part in (splats[~rows], *parts)]
    return Gaussians.from_tensors({name: torch.cat([column[name] for column in columns]) for name in columns[0]})


def iou(one: Bool[np.ndarray, "h w"], other: Bool[np.ndarray, "h w"]) -> float:
    """Returns the intersection over union."""
    return float((one & other).sum() / max((one | other).sum(), 1))


@torch.no_grad()
def judge(run: SplatRun, truth: CaptureGroundTruth, part: Callable[[int], Parts]) -> dict[str, list[float]]:
    """Returns IoU, boundary IoU and remains of each class in the held-out views."""
    dataset, splats = run.photos, run.splats()
    views, result = PinholeCameras.of(dataset.cameras), {}
    for column, name in enumerate(truth.classes):
        (alone, rest), rows = part(column), []
        for index, file in enumerate(dataset.image_filenames):
            view = views.take(slice(index, index + 1))
            labels = truth.view(Path(file), int(view.heights[0]), int(view.widths[0]))
            mask = None if labels is None else labels.masks.get(name)
            if mask is None or mask.sum() < MIN_PX:
                continue
            shown = np.zeros_like(mask)
            if len(alone):
                shown = (render(run.scene(alone), view).rasterization.alpha > 0.5).numpy()
            before, after = (render(run.scene(each), view).rasterization.colors for each in (splats, rest))
            still = ((after - before).abs().amax(dim=-1) <= SAME).numpy() & mask
            rows.append([iou(shown, mask), boundary_iou(shown, mask), float(still.sum() / mask.sum())])
        if rows:
            result[name] = np.mean(rows, axis=0).tolist()
    return result


@dataclass(kw_only=True)
class Measure:
    """Measures selections."""

    runs: tuple[str, ...]
    """Runs of sugar-ext with labels as features, as NAME=config.yml."""

    def main(self) -> None:
        """Measures all runs."""
        for given in self.runs:
            name, _, config = given.partition("=")
            self.measure(name, load_splat_run(Path(config)))

    @torch.no_grad()
    def measure(self, capture: str, run: SplatRun) -> None:
        """Measures one run, and writes its rows."""
        truth, train = CaptureGroundTruth(Path(run.manager.dataparser.config.data)), run.manager.train_dataset
        head = get_head(run.model.query_heads(), "")
        queries = text_queries(head, truth.classes, TextEncoder("cpu"), "others")
        splats, views = run.splats(), PinholeCameras.of(train.cameras)
        masks = []
        for index in range(len(train)):
            scores, outputs = score_image(run.model, train.cameras[index : index + 1], queries)
            masks.append((scores >= 0.5) & (outputs["accumulation"] >= 0.5))

        def lift(gaussians: Gaussians, classes: slice = slice(None)) -> MaskShares:
            return lift_masks(run.scene(gaussians), views, lambda index: masks[index][..., classes])

        shares, weights_px = lift(splats)
        plain = torch.from_numpy(np.stack([score_gaussians(run.model, query) for query in queries], axis=1))

        def divided(column: int) -> Parts:
            on_outline = (shares[:, column] > OUTLINE[0]) & (shares[:, column] < OUTLINE[1])
            parts = divide(splats, on_outline & (weights_px > LARGE_PX))
            return cut(parts, lift(parts, slice(column, column + 1)).shares[:, 0] >= MIN_SHARE)

        ways: list[tuple[str, float, Callable[[int], Parts]]] = [
            *(("score", level, lambda c, t=level: cut(splats, plain[:, c] >= t)) for level in PLAIN),
            *(("share", level, lambda c, t=level: cut(splats, shares[:, c] >= t)) for level in SHARES),
            ("weigh", MIN_SHARE, lambda c: weigh(splats, shares[:, c])),
            ("divide", MIN_SHARE, divided),
        ]
        rows = []
        for way, threshold, part in ways:
            classes = judge(run, truth, part)
            means = dict(zip(("iou", "boundary_iou", "remains"), np.mean(list(classes.values()), axis=0), strict=True))
            means = {key: float(value) for key, value in means.items()}
            rows.append({"capture": capture, "way": way, "threshold": threshold, **means, "classes": classes})
            print(capture, way, threshold, means, flush=True)
        report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept = [row for row in report.get("rows", ()) if row["capture"] != capture]
        write_report({"rows": [*kept, *rows]}, RESULT)


if __name__ == "__main__":
    tyro.cli(Measure).main()
