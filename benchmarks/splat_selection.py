r"""Selecting objects in runs of splats: outlines and remains in held-out views, beside thresholds on Gaussians' scores.

    ns-train sugar-ext-lite --data CAPTURE --max-num-iterations 1500 --pipeline.model.regularization none \
        --pipeline.datamanager.camera-res-scale-factor 0.5 \
        --pipeline.datamanager.features.extractors labels:data=CAPTURE
    python benchmarks/splat_selection.py --runs tabletop=outputs/.../config.yml

Each class of the capture's label images is selected by text, with the other classes as negatives, as `f3rm-ext splats
select` selects it but without the Gaussians that come to light. The outline is where the selection alone has an
accumulation above ½. Remains are pixels of the class whose colour is nearly the same without the selection; a
background of the same colour counts, too. Features have no part in that. Values are means over pairs of a view and a
class of at least 50 pixels, then over classes. Prints rows and writes results/splat_selection.json, which keeps those
of other runs.
"""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from jaxtyping import Bool
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
from f3rm_ext.splat.rendering import render
from f3rm_ext.splat.selection import lift_masks

RESULT = Path(__file__).parent / "results" / "splat_selection.json"
MIN_PX = 50
SAME = 0.05
"""A pixel remains if no colour changes by more than this, of 1."""
PLAIN = (0.5, 0.7, 0.9)
SHARES = (0.3, 0.4, 0.5, 0.6)


def iou(one: Bool[np.ndarray, "h w"], other: Bool[np.ndarray, "h w"]) -> float:
    """Returns the intersection over union."""
    return float((one & other).sum() / max((one | other).sum(), 1))


@torch.no_grad()
def judge(
    run: SplatRun, truth: CaptureGroundTruth, chosen: Bool[Tensor, "gaussians classes"]
) -> dict[str, list[float]]:
    """Returns IoU, boundary IoU and remains of each class in the held-out views."""
    dataset, splats = run.photos, run.splats()
    views, result = PinholeCameras.of(dataset.cameras), {}
    for column, name in enumerate(truth.classes):
        inside, rows = chosen[:, column], []
        for index, file in enumerate(dataset.image_filenames):
            view = views.take(slice(index, index + 1))
            labels = truth.view(Path(file), int(view.heights[0]), int(view.widths[0]))
            mask = None if labels is None else labels.masks.get(name)
            if mask is None or mask.sum() < MIN_PX:
                continue
            shown = np.zeros_like(mask)
            if inside.any():
                shown = (render(run.scene(splats[inside]), view).rasterization.alpha > 0.5).numpy()
            before, after = (render(run.scene(part), view).rasterization.colors for part in (splats, splats[~inside]))
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
        masks = []
        for index in range(len(train)):
            scores, outputs = score_image(run.model, train.cameras[index : index + 1], queries)
            masks.append((scores >= 0.5) & (outputs["accumulation"] >= 0.5))
        lifted = lift_masks(run.scene(run.splats()), PinholeCameras.of(train.cameras), masks.__getitem__).shares
        plain = torch.from_numpy(np.stack([score_gaussians(run.model, query) for query in queries], axis=1))
        ways = [("score", level, plain >= level) for level in PLAIN] + [("share", s, lifted >= s) for s in SHARES]
        rows = []
        for way, threshold, chosen in ways:
            classes = judge(run, truth, chosen)
            means = dict(zip(("iou", "boundary_iou", "remains"), np.mean(list(classes.values()), axis=0), strict=True))
            means = {key: float(value) for key, value in means.items()}
            rows.append({"capture": capture, "way": way, "threshold": threshold, **means, "classes": classes})
            print(capture, way, threshold, means, flush=True)
        report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept = [row for row in report.get("rows", ()) if row["capture"] != capture]
        report = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "rows": [*kept, *rows]}
        write_report(report, RESULT)


if __name__ == "__main__":
    tyro.cli(Measure).main()
