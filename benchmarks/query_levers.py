"""What each lever of queries by example brings on held-out, labelled views, alone and together.

    python benchmarks/query_levers.py --load-config fine/config.yml ... --names stride-14 ...

The features are lifted with --no-per-group. Each class is asked by several pixels, each the innermost one in another
training photo, and every way of asking takes the same pixels. Settings are chosen on the synthetic room; the tabletop
is only judged. Views are rendered at `scale`. Writes results/query_levers.json; runs that it holds already are
replaced, others stay.

Predictions before the first measurement, mIoU at ½ on the tabletop: example read from the scene +.05, negatives from
the whole scene +.05, the rest of the thing +.05, finer 2D features +.04, answers per group +.02 and boundary IoU +.03.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from processes import write_report

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledView
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.mesh.semantics.mesh_run import open_mesh_run
from f3rm_ext.query.builders import draw_places
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, find_labelled_cameras
from f3rm_ext.query.exemplar import append_residual, cluster_centres, take_example
from f3rm_ext.query.groups import average_groups
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.options import Region
from f3rm_ext.query.queryable import QueryHead, get_head, render_map
from f3rm_ext.query.run import Photos, load_run

HERE = Path(__file__).parent
TEMPERATURE = 0.1
OLD_CLUSTERS = 12

WAYS = {
    "example from the photo, rest of it (before)": ("photo", False, ("before",)),
    "example from the scene, rest of the photo": ("scene", False, ("before",)),
    "example from the photo, thing, scene and rest": ("photo", True, ("scene", "rest")),
    "example from the scene, whole scene": ("scene", False, ("scene",)),
    "example from the scene, whole scene and rest": ("scene", False, ("scene", "rest")),
    "all, one answer per Gaussian": ("scene", True, ("scene", "rest")),
}
"""Where the features of the example are from, whether the thing around it is found, and what is negative."""
NOW, GROUPS = "all, one answer per Gaussian", "all, drawn towards the group (now)"
"""Groups: the feature of every Gaussian is drawn towards the mean of its group, for the example as for the answer."""


@dataclass
class Vectors:
    """Unit vectors of one example."""

    positives: np.ndarray
    """The place, then the parts of the thing."""
    negatives: np.ndarray
    kinds: np.ndarray
    """Where each negative is from."""


@dataclass
class QueryLevers:
    """Measures the levers on finished runs."""

    load_config: Annotated[tuple[Path, ...], tyro.conf.arg(aliases=["--load-configs"])]
    """config.yml of runs with lifted or distilled features, and meshes with features."""
    names: tuple[str, ...]
    """What the rows of each run are called."""
    ways: tuple[str, ...] = (*WAYS, GROUPS)
    """Ways of asking to measure; rows of others stay."""
    skip: tuple[str, ...] = ("table",)
    """Classes that are not asked for."""
    exemplars: int = 10
    """Examples of each class."""
    scale: float = 0.5
    """Factor on the size of the held-out views."""
    out: Path = HERE / "results" / "query_levers.json"
    """Where the figures are written."""

    @torch.inference_mode()
    def main(self) -> None:
        """Measures all runs."""
        record = json.loads(self.out.read_text()) if self.out.is_file() else {"rows": []}
        old = [row for row in record["rows"] if row["run"] not in self.names or row["way"] not in self.ways]
        rows = []
        for config, name in zip(self.load_config, self.names, strict=True):
            run = load_run(config) if config.suffix == ".yml" else open_mesh_run(config)
            found = self._measure(run, [way for way in self.ways if way != GROUPS])
            if GROUPS in self.ways:
                points = run.model.grouped_points(get_head(run.model.query_heads(), "").name)
                assert points is not None, "lift the features again"
                average_groups(points.codes, points.groups)
                run._clusters.clear()
                found += [{**row, "way": GROUPS} for row in self._measure(run, [NOW])]
            for row in found:
                rows.append({"run": name, **row})
                print(rows[-1], flush=True)
        write_report({"scale": self.scale, "rows": order_rows(old + rows)}, self.out)

    def _measure(self, run: Photos, ways: Sequence[str]) -> list[dict[str, Any]]:
        if not ways:
            return []
        truth, head = CaptureGroundTruth(run.data), get_head(run.model.query_heads(), "")
        draws = self._draws(run, head, truth)
        metrics = {(way, others): QueryMetrics() for way in ways for others in (False, True)}
        for labelled in find_labelled_cameras(run.files("test"), run.cameras("test"), truth):
            camera = labelled.camera
            camera.rescale_output_resolution(self.scale)
            seen = render_map(run.model, head, camera)
            view = truth.view(labelled.file, seen.grid.rows, seen.grid.cols)
            assert view is not None
            features = unit_rows(seen)
            for number, draw in enumerate(draws):
                count(metrics, draw, features, view, number)
        rows = []
        for (way, others), found in metrics.items():
            summary = found.summary()
            kept = ("pairs", "draws", "localisation", "miou", "macc", "boundary_iou", "best_threshold", "best_miou")
            row = {"way": way, "against_others": others, **{key: summary[key] for key in kept}}
            rows.append({**row, "intervals": summary.get("intervals", {})})
        return rows

    def _draws(self, run: Photos, head: QueryHead, truth: CaptureGroundTruth) -> list[dict[str, dict[str, Vectors]]]:
        """The vectors of each draw, class and way of asking."""
        draws: list[dict[str, dict[str, Vectors]]] = [{} for _ in range(self.exemplars)]
        names = [name for name in truth.classes if name not in self.skip]
        places = draw_places(run, truth, names, self.exemplars)
        scene = run.scene_clusters(head.name)
        patches = run.scene_clusters(head.name, lambda i: run.feature_map("train", i, head.name))
        for index in sorted({place.photo for place in places}):
            flat, deep = run.feature_map("train", index, head.name), run.scene_map("train", index, head.name)
            olds = [cluster_centres(unit_rows(each), OLD_CLUSTERS) for each in (flat, deep)]
            for place in places:
                if place.photo == index:
                    draws[place.draw][place.name] = ask(flat, deep, olds, (patches, scene), place.region)
        return draws


def order_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts rows by run and way; those of lifting_levers.py come last."""
    order = {way: number for number, way in enumerate([*WAYS, GROUPS])}
    return sorted(rows, key=lambda row: (row["run"] != "tabletop", row["run"], order.get(row["way"], len(order))))


def ask(
    flat: FeatureMap, deep: FeatureMap, olds: list[np.ndarray], scenes: tuple[np.ndarray, np.ndarray], region: Region
) -> dict[str, Vectors]:
    """The vectors of one example, taken from the photo and from the scene."""
    found = {}
    for name, seen, old, scene in zip(("photo", "scene"), (flat, deep), olds, scenes, strict=True):
        example = take_example(seen, region, scene)
        positives = example.positives.values.numpy()
        before = np.delete(old, int((old @ positives[0]).argmax()), axis=0)
        kinds = ["rest" if source.startswith("rest of") else "scene" for source in example.negatives.sources]
        negatives = np.concatenate([example.negatives.values.numpy(), before])
        found[name] = Vectors(positives, negatives, np.asarray(kinds + ["before"] * len(before)))
    return found


def count(
    metrics: dict[tuple[str, bool], QueryMetrics],
    asked: dict[str, dict[str, Vectors]],
    features: np.ndarray,
    view: LabelledView,
    draw: int,
) -> None:
    """Adds a view, asked by one draw: each class against the rest, and also against the other classes."""
    size, empty = next(iter(view.masks.values())).shape, np.linalg.norm(features, axis=1) < 0.5
    likes = {
        (name, source): features @ vectors.positives.T
        for name, sources in asked.items()
        for source, vectors in sources.items()
    }
    for name, sources in asked.items():
        if name not in view.masks or _size(view, name) < MIN_VISIBLE_PX:
            continue
        mask = torch.from_numpy(view.masks[name])
        unlikes = {source: features @ vectors.negatives.T for source, vectors in sources.items()}
        for way in {way for way, _ in metrics}:
            source, thing, kinds = WAYS[way]
            hit = {each: likes[each, source][:, : None if thing else 1].max(axis=1) for each in asked}
            negative = unlikes[source][:, np.isin(sources[source].kinds, kinds)].max(axis=1, initial=-1.0)
            every = np.max([negative, *(hit[other] for other in asked if other != name)], axis=0)
            for others, unlike in ((False, negative), (True, every)):
                score = torch.sigmoid(torch.from_numpy((hit[name] - unlike) / TEMPERATURE))
                score[torch.from_numpy(empty)] = 0.0
                metrics[way, others].add(name, score.view(size), mask, view.boxes[name], draw=draw)


def unit_rows(feature_map: FeatureMap) -> np.ndarray:
    """Unit features, (patches, feat); 0 where there is none."""
    values = append_residual(feature_map).values.astype(np.float32)
    rows = values.reshape(-1, values.shape[-1])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-8)


def _size(view: LabelledView, name: str) -> int:
    mask = view.masks.get(name)
    return 0 if mask is None else int(mask.sum())


if __name__ == "__main__":
    tyro.cli(QueryLevers).main()
