"""Measures a trained run for the report: views, depth, and queries by example. ``f3rm-ext demo`` runs it as a program:

    python -m f3rm_ext.workflow.measure --load-config RUN/config.yml --out FOLDER

writes pictures to the folder and finally, atomically, ``measure.json``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from PIL import Image
from torch import Tensor

from f3rm_ext import events
from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledObject
from f3rm_ext.capture.images import image_size
from f3rm_ext.data.eval_dataloaders import NOTHING_KEPT
from f3rm_ext.errors import CaptureError, ConfigError, install_excepthook
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.model_components.masks import grey_out_bytes
from f3rm_ext.model_components.visualization import display_map
from f3rm_ext.query.builders import query_example
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, only_kept
from f3rm_ext.query.exemplar import deepest_pixel, distinctive_patch, sharpness, take_example
from f3rm_ext.query.metrics import PINNED_THRESHOLD, QueryMetrics
from f3rm_ext.query.options import Region
from f3rm_ext.query.queryable import score_image
from f3rm_ext.query.run import Run, load_run
from f3rm_ext.utils import pictures
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.colormaps import depth_colors_bytes, heat_overlay_bytes

FAVOURITES = ("plant", "lamp", "doughnut", "mug")
"""Objects to show in the report if the capture has them, best first."""
MIN_EXEMPLAR_PX = 60
"""Objects with fewer pixels in every training photo are not queried."""
_SHARPEST_OF = 24


@dataclass
class View:
    """One held-out view."""

    file: Path
    rgb: Float[np.ndarray, "h w 3"]
    scores: Float[Tensor, "h w queries"]
    kept: Bool[np.ndarray, "h w"]
    """Pixels that the photo's mask keeps."""

    def score(self, number: int) -> Float[Tensor, "h w"]:
        """Returns the score of a query, such that a masked pixel is never the best."""
        return only_kept(self.scores[..., number], self.kept)

    def masked(self, picture: np.ndarray) -> np.ndarray:
        """Returns a uint8 picture with masked pixels in grey."""
        return grey_out_bytes(picture, self.kept)


@dataclass
class ExampleQuery:
    """A query by example and its exemplar."""

    query: Query
    index: int
    """Index of the training photo."""
    region: Region
    middle_px: tuple[float, float]
    """Middle of the region, (x, y)."""
    thing: LabelledObject | None
    """The object at the exemplar; None if it is not known."""

    def describe(self) -> dict[str, Any]:
        """The photo and the middle of the exemplar, as JSON."""
        return {"image": Path(self.region.image).name, "x": self.middle_px[0], "y": self.middle_px[1]}


@dataclass
class Measure:
    """Measures a trained run for the report."""

    load_config: Path
    """The config.yml of the run."""
    out: Path
    """Folder for the pictures and measure.json."""
    exemplar: str = ""
    """IMAGE:x,y or IMAGE:x,y,w,h of a training photo, or the name of a labelled object. By default one is chosen."""
    max_views: int = 5
    """Number of views to render, spread evenly over those held out, or over those of training where none is; at least
    1."""

    @torch.no_grad()
    def main(self) -> None:
        """Writes the pictures and measure.json."""
        self.run: Run = load_run(self.load_config)
        self.truth = CaptureGroundTruth(self.run.data)
        self.out.mkdir(parents=True, exist_ok=True)
        model, heads = self.run.model, self.run.model.query_heads()
        self.split = self.run.splits[-1]
        record: dict[str, Any] = {
            "checkpoint": self.run.checkpoint.name,
            "steps": self.run.step + 1,
            "device": _device_name(model.device),
            "heads": {name: head.extractor for name, head in heads.items()},
            "train_images": len(self.run.files("train")),
            "eval_images": 0 if self.split == "train" else len(self.run.files("test")),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        indices = pictures.pick_evenly(len(self.run.files(self.split)), self.max_views)
        record["views"], views = [], []
        masks = {index: self.run.photo_mask(self.split, index) for index in indices}
        indices = [index for index in indices if (mask := masks[index]) is None or mask.any()]
        if not indices:
            raise CaptureError(NOTHING_KEPT)
        self.head = next(iter(heads), "")
        self._rendered: tuple[int, FeatureMap] | None = None
        examples = self._example_queries() if self.head else []
        if examples:
            self._show_exemplar(examples[0])
        for number, index in enumerate(indices):
            events.progress("Views", number, len(indices))
            view, entry = self._view(index, number, [example.query for example in examples], masks[index])
            views.append(view)
            record["views"].append(entry)
        record["depth"] = self._depth_summary(record["views"])
        record["query"] = self._query_record(examples, views, record["views"]) if examples else None
        write_atomic(self.out / "measure.json", json.dumps(record, indent=1).encode())
        print(f"Wrote {self.out}", flush=True)

    # --- views -------------------------------------------------------------------------------------------------------

    def _view(
        self, index: int, number: int, queries: list[Query], mask: Bool[np.ndarray, "h w"] | None
    ) -> tuple[View, dict[str, Any]]:
        """Renders a view with the scores of the queries and saves its pictures.

        Masked pixels are grey in the pictures and do not count.
        """
        camera, file = self.run.cameras(self.split)[index : index + 1], self.run.files(self.split)[index]
        if queries:
            scores, outputs = score_image(self.run.model, camera, queries)
        else:
            outputs = self.run.model.render_camera(camera, {})
            scores = outputs["rgb"][..., :0]
        depth_m = self._depth_m(outputs["depth"], camera).cpu().numpy()
        height, width = depth_m.shape
        kept = np.ones((height, width), dtype=bool) if mask is None else mask
        view = View(file, outputs["rgb"].cpu().numpy(), scores.cpu(), kept)
        true_m = self.truth.depth_m(file, height, width)
        known = kept if true_m is None else kept & (true_m > 0)
        low, high = np.quantile((depth_m if true_m is None else true_m)[known if known.any() else kept], (0.02, 0.98))
        low, high = 0.9 * float(low), float(high)
        shown = {
            "true": self.run.photo(self.split, index, rendered=True),
            "rendered": pictures.to_bytes(view.rgb),
            "depth": depth_colors_bytes(depth_m, low, high),
        }
        entry: dict[str, Any] = {"image": file.name, "width": width, "height": height, "depth_range_m": [low, high]}
        if true_m is not None:
            shown["true_depth"] = depth_colors_bytes(true_m, low, high)
            error = np.abs(depth_m - true_m)[known]
            if len(error):
                entry["depth_error_m"] = {"median": float(np.median(error)), "within_5cm": float((error < 0.05).mean())}
        if "feature_pca" in outputs:
            shown["features"] = pictures.to_bytes(outputs["feature_pca"].cpu().numpy())
            features = self.run.feature_map(self.split, index, self.head)
            flat = display_map(self.run.model, self.head, features, height, width)
            shown["true_features"] = pictures.to_bytes(flat.cpu().numpy())
        entry["files"] = {
            name: self._save(f"view_{number}_{name}", view.masked(image)) for name, image in shown.items()
        }
        return view, entry

    def _depth_m(self, distance: Tensor, camera: Cameras) -> Float[Tensor, "h w"]:
        """Converts distances along rays in scene units to depths along the optical axis in the capture's unit."""
        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        norm = rays.metadata["directions_norm"].to(distance.device)
        return (distance / norm / self.run.manager.train_dataparser_outputs.dataparser_scale)[..., 0]

    def _depth_summary(self, views: list[dict[str, Any]]) -> dict[str, float] | None:
        errors = [view["depth_error_m"] for view in views if "depth_error_m" in view]
        if not errors:
            return None
        return {
            "median_m": float(np.median([error["median"] for error in errors])),
            "within_5cm": float(np.mean([error["within_5cm"] for error in errors])),
            "views": len(errors),
        }

    # --- the query ---------------------------------------------------------------------------------------------------

    def _example_queries(self) -> list[ExampleQuery]:
        """Returns the query that the report shows, followed by one query for each labelled object."""
        regions = self._objects()
        names = [thing.name for thing, _, _ in regions]
        # First, so that what is refused is not waited for.
        chosen = [self._chosen_query(names)] if self.exemplar and self.exemplar not in names else []
        # Photo by photo, so that each is rendered once.
        by_photo = sorted(regions, key=lambda region: region[1])
        objects = [self._example_query(index, region, thing) for thing, index, region in by_photo]
        objects.sort(key=lambda example: names.index(example.query.name))
        if chosen:
            return [*chosen, *objects]
        by_name = {example.query.name: example for example in objects}
        if by_name:
            order = (self.exemplar, *FAVOURITES, *by_name)
            return [next(by_name[name] for name in order if name in by_name), *objects]
        files = self.run.files("train")
        count = len(files)
        index = max(range(0, count, max(1, count // _SHARPEST_OF)), key=lambda i: sharpness(self.run.photo("train", i)))
        maps = [self.run.feature_map("train", i, self.head) for i in range(count)]
        y_px, x_px = distinctive_patch(maps[index], [*maps[:index], *maps[index + 1 :]])
        return [self._example_query(index, Region(files[index].name, x_px, y_px), None)]

    def _example_query(self, index: int, region: Region, thing: LabelledObject | None) -> ExampleQuery:
        if self._rendered is None or self._rendered[0] != index:
            self._rendered = index, self.run.scene_map("train", index, self.head)
        features, scene = self._rendered[1], self.run.scene_clusters(self.head)
        name = str(region) if thing is None else thing.name
        query = query_example(name, self.run.model.query_heads()[self.head], take_example(features, region, scene))
        height_px, width_px = self.run.photo("train", index).shape[:2]
        middle_px = region.middle_px(width_px, height_px)
        return ExampleQuery(query, index, region, middle_px, thing)

    def _chosen_query(self, names: list[str]) -> ExampleQuery:
        """Returns the query for the image and position that the user chose.

        Raises:
            ConfigError: there is no such training photo, or the position is outside it.
        """
        region = Region.parse(self.exemplar)
        split, index = self.run.find_photo(region.image) or ("", 0)
        if split != "train":
            some = ", ".join(file.name for file in self.run.files("train")[:3])
            known = f", or one of the objects {', '.join(names)}" if names else ""
            raise ConfigError(
                f"There is no training image {region.image} for the exemplar: choose one like {some}, with a "
                f"position in it as in {some.split(',')[0]}:120,80{known}."
            )
        height_px, width_px = self.run.photo("train", index).shape[:2]
        region.require_inside(width_px, height_px)
        return self._example_query(index, region, self._object_at(index, region))

    def _train_labels(self, index: int) -> np.ndarray | None:
        cameras = self.run.cameras("train")
        height_px, width_px = int(cameras.height[index].item()), int(cameras.width[index].item())
        return self.truth.labels(self.run.files("train")[index], height_px, width_px)

    def _object_at(self, index: int, region: Region) -> LabelledObject | None:
        labels = self._train_labels(index)
        if labels is None:
            return None
        x_px, y_px = region.middle_px(labels.shape[1], labels.shape[0])
        row, col = min(int(y_px), labels.shape[0] - 1), min(int(x_px), labels.shape[1] - 1)
        return next((thing for thing in self.truth.things if thing.label == labels[row, col]), None)

    def _objects(self) -> list[tuple[LabelledObject, int, Region]]:
        """Finds for each labelled object the training photo that shows most of it, and its innermost pixel there."""
        files = self.run.files("train")
        labels = [self._train_labels(index) for index in range(len(files))]
        exemplars = []
        for thing in self.truth.things:
            sizes = [0 if image is None else int((image == thing.label).sum()) for image in labels]
            index = int(np.argmax(sizes))
            image = labels[index]
            if image is not None and sizes[index] >= MIN_EXEMPLAR_PX:
                row, col = deepest_pixel(image == thing.label)
                exemplars.append((thing, index, Region(files[index].name, col + 0.5, row + 0.5)))
        return exemplars

    def _show_exemplar(self, example: ExampleQuery) -> None:
        photo = self.run.photo("train", example.index)
        height, width = photo.shape[:2]
        left, top, right, bottom = map(round, example.region.box_px(width, height))
        if example.region.is_point:
            side_px = max(16, min(height, width) // 5)
            x_px, y_px = example.middle_px
            top, left, bottom, right = pictures.region_around(y_px, x_px, side_px, height, width)
        # A box can be thinner than a pixel.
        bottom, right = max(bottom, top + 1), max(right, left + 1)
        self._save("exemplar_photo", pictures.mark_box(photo, top, left, bottom, right))
        self._save("exemplar_crop", photo[top:bottom, left:right])

    def _query_record(
        self, examples: list[ExampleQuery], views: list[View], entries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Saves the heat maps of the first query and scores how well every labelled object was found."""
        thing = examples[0].thing
        flat = torch.cat([view.scores[..., 0][torch.from_numpy(view.kept)] for view in views])
        high = float(flat.max())
        low = min(PINNED_THRESHOLD, high)
        shown = []
        for number, view in enumerate(views):
            score = view.score(0)
            row, col = divmod(int(score.argmax()), score.shape[1])
            picture = view.masked(heat_overlay_bytes(pictures.to_bytes(view.rgb), score.numpy(), low, high))
            result = {"view": number, "row": row, "col": col, "score": float(score[row, col])}
            mask = None if thing is None else self._mask(view, thing)
            if mask is not None:
                result["visible"] = int(mask.sum()) >= MIN_VISIBLE_PX
                result["inside"] = bool(mask[row, col])
            result["file"] = self._save(f"heat_{number}", pictures.mark_spot(picture, row, col))
            entries[number]["files"]["heat"] = result["file"]
            shown.append(result)
        objects = [self._score(number, example, views) for number, example in enumerate(examples) if number]
        return {
            "head": self.head,
            **examples[0].describe(),
            "exemplar": str(self._in_file(examples[0].index, examples[0].region)),
            "is_point": examples[0].region.is_point,
            "object": None if thing is None else thing.name,
            "low": low,
            "high": high,
            "views": shown,
            "threshold": PINNED_THRESHOLD,
            "objects": objects,
        }

    def _in_file(self, index: int, region: Region) -> Region:
        """Returns a region of a training photo in pixels of the image file, as commands take it."""
        (width_px, height_px), cameras = image_size(self.run.files("train")[index]), self.run.cameras("train")
        return region.scale(width_px / int(cameras.width[index].item()), height_px / int(cameras.height[index].item()))

    def _mask(self, view: View, thing: LabelledObject) -> Bool[np.ndarray, "h w"] | None:
        labels = self.truth.labels(view.file, *view.rgb.shape[:2])
        return None if labels is None else (labels == thing.label) & view.kept

    def _score(self, number: int, example: ExampleQuery, views: list[View]) -> dict[str, Any]:
        """Counts how often the best pixel lies on the object, and averages the IoU, over the views that show it."""
        assert example.thing is not None
        metrics = QueryMetrics()
        for view in views:
            mask = self._mask(view, example.thing)
            if mask is not None and int(mask.sum()) >= MIN_VISIBLE_PX:
                metrics.add(example.thing.name, view.score(number), torch.from_numpy(mask))
        summary = metrics.summary()
        return {
            "name": example.thing.name,
            **example.describe(),
            "views": len(metrics),
            "hits": round(summary.get("localisation", 0) * len(metrics)),
            "iou": summary.get("miou"),
        }

    def _save(self, name: str, image: np.ndarray) -> str:
        Image.fromarray(np.ascontiguousarray(image)).save(self.out / f"{name}.png", compress_level=3)
        return f"{name}.png"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    install_excepthook()
    tyro.cli(Measure).main()
