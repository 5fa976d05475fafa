"""Looks at a trained run for the report: views, depth, and an exemplar query. Run as a program by ``f3rm-ext demo``.

    python -m f3rm_ext.report.measure --load-config RUN/config.yml --out FOLDER

writes pictures and ``measure.json`` to the folder, the latter last and whole or not at all.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tyro
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils.eval_utils import eval_setup
from PIL import Image
from torch import Tensor

from f3rm_ext import pictures
from f3rm_ext.capture.ground_truth import Thing, Truth
from f3rm_ext.errors import ConfigError, install_excepthook
from f3rm_ext.features.atomic import write_atomic
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.nerf.evaluation import display_map
from f3rm_ext.nerf.model import F3rmModel
from f3rm_ext.query.choice import deepest_pixel, sharpness, telling_patch
from f3rm_ext.query.exemplar import Exemplar, best_pixel, exemplar_at, intersection_over_union, render_with_similarity

if TYPE_CHECKING:
    from f3rm_ext.data.datamanager import F3rmDataManager

MASK_COSINE = 0.93
"""Pixels at least this similar to the exemplar count as found. The same for all objects and scenes: the value at which
the 2D dense-daisy features of another room (seed 7) overlap best with its objects."""
FAVOURITES = ("plant", "lamp", "doughnut", "mug")
"""Objects shown first where the capture has them."""
MIN_EXEMPLAR_PX, MIN_VISIBLE_PX = 60, 25
"""Objects with fewer pixels in every training photo are not tried; views with fewer do not count."""
HEAT_FROM = 0.8
"""Share of all pixels that get no heat."""
_SHARPEST_OF = 24


@dataclass
class View:
    """One held-out view."""

    file: Path
    camera: Cameras
    maps: dict[str, FeatureMap]
    rgb: Float[np.ndarray, "h w 3"]
    photo: Float[np.ndarray, "h w 3"]


@dataclass
class Measure:
    """Looks at a trained run for the report."""

    load_config: Path
    """config.yml of the run."""
    out: Path
    """Folder for the pictures and measure.json."""
    exemplar: str = ""
    """IMAGE:x,y of a training photo, or the name of a labelled object; by default something suitable."""
    max_views: int = 5
    """Held-out views looked at, spread evenly over all, ≥ 1."""

    @torch.inference_mode()
    def main(self) -> None:
        """Writes everything."""
        config, pipeline, checkpoint, step = eval_setup(self.load_config)
        model, manager = pipeline.model, pipeline.datamanager
        assert isinstance(model, F3rmModel)
        self.model, self.manager = model, _as_ours(manager)
        self.truth = Truth(Path(config.data or config.pipeline.datamanager.data or "."))
        self.out.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "checkpoint": checkpoint.name,
            "steps": step + 1,
            "device": _device_name(model.device),
            "heads": {name: model.feature_field.head(name).extractor for name in model.feature_field.names},
            "train_images": len(self.manager.train_dataset),
            "eval_images": len(self._eval_dataset()),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        head = next(iter(model.feature_field.names), "")
        train_source = self._train_features() if head else None
        queries: list[tuple[Exemplar, Thing | None]] = []
        if head and train_source is not None:
            queries = self._queries(head, train_source)
            self._show_exemplar(queries[0][0])
        count = len(self._eval_dataset())
        indices = np.unique(np.linspace(0, count - 1, min(self.max_views, count)).round().astype(int)).tolist()
        record["views"], scores = [], []
        for number, index in enumerate(indices):
            print(f"View {number + 1} of {len(indices)}", flush=True)
            view, similarity, entry = self._view(index, number, head, [exemplar for exemplar, _ in queries])
            if queries:
                scores.append((view, similarity))
            record["views"].append(entry)
        record["depth"] = self._depth_summary(record["views"])
        record["query"] = self._query_record(queries, scores, record["views"]) if queries else None
        write_atomic(self.out / "measure.json", json.dumps(record, indent=1).encode())
        print(f"Wrote {self.out}", flush=True)

    # --- views -------------------------------------------------------------------------------------------------------

    def _eval_dataset(self) -> Any:
        dataset = self.manager.eval_dataset
        assert dataset is not None  # ns-eval, which ran before, refuses captures without
        return dataset

    def _view(
        self, index: int, number: int, head: str, asked: list[Exemplar]
    ) -> tuple[View, Float[Tensor, "h w queries"], dict[str, Any]]:
        """Renders a held-out view together with its likeness to the exemplars, and saves its pictures."""
        camera, batch = self.manager.fixed_indices_eval_dataloader.get_camera(index)
        vectors = torch.stack([exemplar.vector for exemplar in asked]) if asked else torch.zeros(0, 1)
        outputs = render_with_similarity(self.model, camera, head if asked else "", vectors)
        photo = self.model.renderer_rgb.blend_background(batch["image"].to(self.model.device))
        file = Path(self._eval_dataset().image_filenames[index])
        maps = batch.get("feature_maps") or {}
        view = View(file, camera, maps, outputs["rgb"].cpu().numpy(), photo.cpu().numpy())
        depth_m = self._depth_m(outputs["depth"], camera).cpu().numpy()
        height, width = depth_m.shape
        true_m = self.truth.depth_m(file, height, width)
        low, high = np.quantile(depth_m if true_m is None else true_m[true_m > 0], (0.02, 0.98))
        low, high = 0.9 * float(low), float(high)
        shown = {
            "true": pictures.to_bytes(view.photo),
            "rendered": pictures.to_bytes(view.rgb),
            "depth": pictures.colour_map(depth_m, low, high, pictures.DEPTH_MAP),
        }
        entry: dict[str, Any] = {"image": file.name, "width": width, "height": height, "depth_range_m": [low, high]}
        if true_m is not None:
            shown["true_depth"] = pictures.colour_map(true_m, low, high, pictures.DEPTH_MAP)
            error = np.abs(depth_m - true_m)[true_m > 0]
            entry["depth_error_m"] = {"median": float(np.median(error)), "within_5cm": float((error < 0.05).mean())}
        if "feature_pca" in outputs:
            shown["features"] = pictures.to_bytes(outputs["feature_pca"].cpu().numpy())
            if head in maps:
                flat = display_map(self.model, head, maps[head], height, width)
                shown["true_features"] = pictures.to_bytes(flat.cpu().numpy())
        entry["files"] = {name: self._save(f"view_{number}_{name}", image) for name, image in shown.items()}
        return view, outputs["similarity"].cpu(), entry

    def _depth_m(self, distance: Tensor, camera: Cameras) -> Float[Tensor, "h w"]:
        """Depth along the optical axis in the capture's unit, from distances along rays in scene units."""
        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        norm = rays.metadata["directions_norm"].to(distance.device)
        return (distance / norm / self.manager.train_dataparser_outputs.dataparser_scale)[..., 0]

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

    def _train_features(self) -> Any:
        from f3rm_ext.features.source import prepare_features

        options = self.manager.config.features
        return prepare_features([self.manager.train_dataset], options, device=self.model.device)[0]

    def _queries(self, head: str, source: Any) -> list[tuple[Exemplar, Thing | None]]:
        """What to ask for: first what the report shows, then every labelled object."""
        dataset = self.manager.train_dataset
        names = [Path(name).name for name in dataset.image_filenames]

        def take(index: int, yx_px: tuple[float, float]) -> Exemplar:
            return exemplar_at(head, source.load(index)[head], yx_px, image=names[index])

        objects = [(take(index, yx_px), thing) for thing, index, yx_px in self._objects()]
        by_name = {thing.name: (exemplar, thing) for exemplar, thing in objects}
        if self.exemplar and self.exemplar not in by_name:
            image, yx_px = parse_exemplar(self.exemplar, list(by_name))
            if image not in names:
                some = ", ".join(names[:3])
                raise ConfigError(f"There is no training image {image} for the exemplar: choose one like {some}.")
            index = names.index(image)
            height, width = dataset.get_numpy_image(index).shape[:2]
            if not (0 <= yx_px[0] <= height and 0 <= yx_px[1] <= width):
                raise ConfigError(
                    f"The exemplar x = {yx_px[1]:g}, y = {yx_px[0]:g} lies outside {image}, which has {width} x "
                    f"{height} pixels at the scale used here: choose a place inside."
                )
            return [(take(index, yx_px), self._thing_at(index, yx_px)), *objects]
        if by_name:
            order = (self.exemplar, *FAVOURITES, *by_name)
            first = next(by_name[name] for name in order if name in by_name)
            return [first, *objects]
        index = max(range(0, len(names), max(1, len(names) // _SHARPEST_OF)), key=self._sharpness)
        others = [source.load(i)[head] for i in range(len(names)) if i != index]
        return [(take(index, telling_patch(source.load(index)[head], others)), None)]

    def _sharpness(self, index: int) -> float:
        return sharpness(self.manager.train_dataset.get_numpy_image(index))

    def _train_labels(self, index: int) -> np.ndarray | None:
        camera = self.manager.train_dataset.cameras[index]
        file = Path(self.manager.train_dataset.image_filenames[index])
        return self.truth.labels(file, int(camera.height), int(camera.width))

    def _thing_at(self, index: int, yx_px: tuple[float, float]) -> Thing | None:
        labels = self._train_labels(index)
        if labels is None:
            return None
        row, col = (min(int(value), size - 1) for value, size in zip(yx_px, labels.shape, strict=True))
        return next((thing for thing in self.truth.things if thing.label == labels[row, col]), None)

    def _objects(self) -> list[tuple[Thing, int, tuple[float, float]]]:
        """Each labelled object with the training photo that shows most of it, and its innermost pixel there."""
        labels = [self._train_labels(index) for index in range(len(self.manager.train_dataset))]
        found = []
        for thing in self.truth.things:
            sizes = [0 if image is None else int((image == thing.label).sum()) for image in labels]
            index = int(np.argmax(sizes)) if sizes else 0
            image = labels[index] if sizes else None
            if image is not None and sizes[index] >= MIN_EXEMPLAR_PX:
                row, col = deepest_pixel(image == thing.label)
                found.append((thing, index, (row + 0.5, col + 0.5)))
        return found

    def _show_exemplar(self, exemplar: Exemplar) -> None:
        dataset = self.manager.train_dataset
        index = [Path(name).name for name in dataset.image_filenames].index(exemplar.image)
        photo = np.ascontiguousarray(dataset.get_numpy_image(index)[..., :3])
        height, width = photo.shape[:2]
        region = pictures.region_around(*exemplar.yx_px, max(16, min(height, width) // 5), height, width)
        self._save("exemplar_photo", pictures.mark_box(photo, *region))
        self._save("exemplar_crop", photo[region[0] : region[2], region[1] : region[3]])

    def _query_record(
        self,
        queries: list[tuple[Exemplar, Thing | None]],
        scores: list[tuple[View, Float[Tensor, "h w queries"]]],
        entries: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """The pictures of the first query, and how well every labelled object was found."""
        exemplar, thing = queries[0]
        first = [similarity[..., 0] for _, similarity in scores]
        flat = torch.cat([similarity.flatten() for similarity in first])
        low, high = float(np.quantile(flat.numpy(), HEAT_FROM)), float(flat.max())
        shown = []
        for number, (view, _) in enumerate(scores):
            row, col = best_pixel(first[number])
            picture = pictures.heat_overlay(pictures.to_bytes(view.rgb), first[number].numpy(), low, high)
            result = {"view": number, "row": row, "col": col, "cosine": float(first[number][row, col])}
            mask = None if thing is None else self._mask(view, thing)
            if mask is not None:
                result["visible"] = int(mask.sum()) >= MIN_VISIBLE_PX
                result["inside"] = bool(mask[row, col])
            result["file"] = self._save(f"heat_{number}", pictures.mark_spot(picture, row, col))
            entries[number]["files"]["heat"] = result["file"]
            shown.append(result)
        objects = []
        for number, (asked, other) in enumerate(queries):
            if number and other is not None:
                objects.append(self._score(asked, other, [(view, all_[..., number]) for view, all_ in scores]))
        return {
            "head": exemplar.head,
            "image": exemplar.image,
            "x": exemplar.yx_px[1],
            "y": exemplar.yx_px[0],
            "object": None if thing is None else thing.name,
            "low": low,
            "high": high,
            "views": shown,
            "mask_cosine": MASK_COSINE,
            "objects": objects,
        }

    def _mask(self, view: View, thing: Thing) -> Bool[np.ndarray, "h w"] | None:
        labels = self.truth.labels(view.file, *view.rgb.shape[:2])
        return None if labels is None else labels == thing.label

    def _score(
        self, exemplar: Exemplar, thing: Thing, scores: list[tuple[View, Float[Tensor, "h w"]]]
    ) -> dict[str, Any]:
        """Over the views that show the object: how often the best pixel lies on it, and the mean IoU."""
        hits, overlaps = [], []
        for view, similarity in scores:
            mask = self._mask(view, thing)
            if mask is not None and int(mask.sum()) >= MIN_VISIBLE_PX:
                row, col = best_pixel(similarity)
                hits.append(bool(mask[row, col]))
                overlaps.append(intersection_over_union(similarity >= MASK_COSINE, torch.from_numpy(mask)))
        return {
            "name": thing.name,
            "image": exemplar.image,
            "x": exemplar.yx_px[1],
            "y": exemplar.yx_px[0],
            "views": len(hits),
            "hits": sum(hits),
            "iou": float(np.mean(overlaps)) if overlaps else None,
        }

    def _save(self, name: str, image: np.ndarray) -> str:
        Image.fromarray(np.ascontiguousarray(image)).save(self.out / f"{name}.png", compress_level=3)
        return f"{name}.png"


def parse_exemplar(text: str, names: list[str]) -> tuple[str, tuple[float, float]]:
    """IMAGE:x,y as the image's file name and (y, x).

    Raises:
        ConfigError: it is not of that form.
    """
    image, _, position = text.rpartition(":")
    try:
        x, y = (float(part) for part in position.split(","))
    except ValueError:
        known = f", or one of the objects {', '.join(names)}" if names else ""
        raise ConfigError(
            f"The exemplar {text!r} is not understood: give a training image and a place in it like "
            f"frame_00001.png:120,80 (x to the right, y down, in pixels){known}."
        ) from None
    return Path(image).name, (y, x)


def _as_ours(manager: Any) -> "F3rmDataManager":
    from f3rm_ext.data.datamanager import F3rmDataManager

    assert isinstance(manager, F3rmDataManager)
    return manager


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    install_excepthook()
    tyro.cli(Measure).main()
