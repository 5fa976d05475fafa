"""What each lever of queries by example brings on held-out, labelled views, alone and together.

    python benchmarks/query_levers.py --load-config fine/config.yml ... --names stride-14 ...

Each class is asked by several pixels, each the innermost one in another training photo, and every way of asking takes
the same pixels. Settings are chosen on the synthetic room; the tabletop is only judged. Views are rendered at `scale`.
Writes results/query_levers.json; runs that it holds already are replaced, others stay.

Predictions before the first measurement, mIoU at ½ on the tabletop: example read from the scene +.05, negatives from
the whole scene +.05, the rest of the thing +.05, finer 2D features +.04.
"""

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledView
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, find_labelled_cameras
from f3rm_ext.query.exemplar import Example, append_residual, cluster_centres, deepest_pixel, take_example
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.options import Region
from f3rm_ext.query.queryable import QueryHead, get_head, render_map
from f3rm_ext.query.run import Photos, load_run

HERE = Path(__file__).parent
TEMPERATURE = 0.1
OLD_CLUSTERS = 12

Vectors = tuple[np.ndarray, np.ndarray]
"""Positives and negatives, unit rows."""


@dataclass
class QueryLevers:
    """Measures the levers on finished runs."""

    load_config: Annotated[tuple[Path, ...], tyro.conf.arg(aliases=["--load-configs"])]
    """config.yml of runs with lifted or distilled features."""
    names: tuple[str, ...]
    """What the rows of each run are called."""
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
        rows = [row for row in record["rows"] if row["run"] not in self.names]
        for config, name in zip(self.load_config, self.names, strict=True):
            for row in self._measure(load_run(config)):
                rows.append({"run": name, **row})
                print(rows[-1], flush=True)
        record = {"date": datetime.date.today().isoformat(), "scale": self.scale, "rows": rows}
        self.out.write_text(json.dumps(record, indent=1) + "\n")

    def _measure(self, run: Photos) -> list[dict[str, Any]]:
        truth, head = CaptureGroundTruth(run.data), get_head(run.model.query_heads(), "")
        draws = self._draws(run, head, truth)
        ways = list(next(iter(draws[0].values())))
        metrics = {(way, others): QueryMetrics() for way in ways for others in (False, True)}
        for labelled in find_labelled_cameras(run.files("test"), run.cameras("test"), truth):
            camera = labelled.camera
            camera.rescale_output_resolution(self.scale)
            seen = render_map(run.model, head, camera)
            view = truth.view(labelled.file, seen.grid.rows, seen.grid.cols)
            assert view is not None
            features = unit_rows(seen)
            for number, draw in enumerate(draws):
                for way in ways:
                    count(metrics, way, {name: each[way] for name, each in draw.items()}, features, view, number)
        rows = []
        for (way, others), found in metrics.items():
            summary = found.summary()
            kept = ("pairs", "draws", "localisation", "miou", "macc", "boundary_iou", "best_threshold", "best_miou")
            row = {"way": way, "against_others": others, **{key: summary[key] for key in kept}}
            rows.append({**row, "intervals": summary.get("intervals", {})})
        return rows

    def _draws(self, run: Photos, head: QueryHead, truth: CaptureGroundTruth) -> list[dict[str, dict[str, Vectors]]]:
        """The vectors of each draw, class and way of asking."""
        files, cameras = run.files("train"), run.cameras("train")
        views = [truth.view(f, int(cameras.height[i]), int(cameras.width[i])) for i, f in enumerate(files)]
        chances, names = np.random.default_rng(0), [name for name in truth.classes if name not in self.skip]
        draws: list[dict[str, dict[str, Vectors]]] = [{} for _ in range(self.exemplars)]
        places: dict[int, list[tuple[int, str]]] = {}
        for name in names:
            shown = [i for i, view in enumerate(views) if view is not None and _size(view, name) >= MIN_VISIBLE_PX]
            for draw, index in enumerate(chances.permutation(shown)[: self.exemplars].tolist()):
                places.setdefault(index, []).append((draw, name))
        scene = run.scene_clusters(head.name)
        patches = run.scene_clusters(head.name, lambda i: run.feature_map("train", i, head.name))
        for index, asked in places.items():
            flat, deep = run.feature_map("train", index, head.name), run.scene_map("train", index, head.name)
            olds = [cluster_centres(unit_rows(each), OLD_CLUSTERS) for each in (flat, deep)]
            for draw, name in asked:
                view = views[index]
                assert view is not None
                row, col = deepest_pixel(view.masks[name])
                region = Region(files[index].name, col + 0.5, row + 0.5)
                draws[draw][name] = ask(flat, deep, olds, (patches, scene), region)
        return draws


def ask(
    flat: FeatureMap, deep: FeatureMap, olds: list[np.ndarray], scenes: tuple[np.ndarray, np.ndarray], region: Region
) -> dict[str, Vectors]:
    """The vectors of one example in each way of asking."""
    from_photo, from_scene = take_example(flat, region, scenes[0]), take_example(deep, region, scenes[1])
    point = {}
    for name, example, old in (("photo", from_photo, olds[0]), ("scene", from_scene, olds[1])):
        place = example.positives.values[:1].numpy()
        point[name] = (place, np.delete(old, int((old @ place[0]).argmax()), axis=0))
    return {
        "example from the photo, rest of it (before)": point["photo"],
        "example from the scene": point["scene"],
        "example from the photo, whole scene as negatives": pick(from_photo, thing=False, rest=False),
        "example from the photo, thing and rest": pick(from_photo),
        "example from the scene, whole scene as negatives": pick(from_scene, thing=False, rest=False),
        "example from the scene, whole scene and rest as negatives": pick(from_scene, thing=False),
        "all (now)": pick(from_scene),
    }


def pick(example: Example, *, thing: bool = True, rest: bool = True) -> Vectors:
    """The vectors of an example, without the parts of the thing or the rest of the photo."""
    positives, negatives = example.positives.values.numpy(), example.negatives.values.numpy()
    wanted = [rest or not source.startswith("rest of") for source in example.negatives.sources]
    return positives if thing else positives[:1], negatives[wanted]


def count(
    metrics: dict[tuple[str, bool], QueryMetrics],
    way: str,
    asked: dict[str, Vectors],
    features: np.ndarray,
    view: LabelledView,
    draw: int,
) -> None:
    """Adds a view, asked by one draw: each class against the rest, and also against the other classes."""
    hit = {name: (features @ positives.T).max(axis=1) for name, (positives, _) in asked.items()}
    size = next(iter(view.masks.values())).shape
    empty = np.linalg.norm(features, axis=1) < 0.5
    for name, (_, negatives) in asked.items():
        if name not in view.masks or _size(view, name) < MIN_VISIBLE_PX:
            continue
        against = (features @ negatives.T).max(axis=1, initial=-1.0)
        every = np.max([against, *(hit[other] for other in asked if other != name)], axis=0)
        for others, unlike in ((False, against), (True, every)):
            score = torch.sigmoid(torch.from_numpy((hit[name] - unlike) / TEMPERATURE))
            score[torch.from_numpy(empty)] = 0.0
            mask = torch.from_numpy(view.masks[name])
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
