"""``f3rm-ext eval query``: how well queries find the labelled objects of a capture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.query.options import QueryTarget
from f3rm_ext.scripts.common import OutArg, require_own_file, write_json
from f3rm_ext.utils.console import note, say
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.capture.ground_truth import LabelSource
    from f3rm_ext.query.builders import Negatives
    from f3rm_ext.query.embeddings import Query
    from f3rm_ext.query.metrics import QueryMetrics
    from f3rm_ext.query.queryable import QueryHead
    from f3rm_ext.query.run import Photos

COMMAND = "f3rm-ext eval query"
Protocol = Literal["rendered", "image-features", "direct-3d"]
TITLES: dict[Protocol, str] = {
    "rendered": "Rendered held-out views",
    "image-features": "2D features of the same views",
    "direct-3d": "Points in 3D",
}


@dataclass
class EvalQuery(QueryTarget):
    """Queries a run, or a mesh with features, for every labelled class, and compares the results with the labels.

    Rendered held-out views and points in space are two protocols with figures of their own; the 2D features that the
    field was distilled from are scored in the same way, for comparison. Localisation: the best pixel lies in a box of
    the object. mIoU and mAcc: means over all pairs of view and class, at a threshold fixed beforehand and, separately,
    at the best one.

    Labels come from the capture (label images named in transforms.json), or from a folder of polygons in the format of
    LERF-OVS.

    --predictions judges scores or masks of any program by the same protocols: one file per photo and class,
    PHOTO/CLASS.npy or PHOTO/CLASS.png, scores/PHOTO.npz as `f3rm-ext query` writes them, and points.ply or points.npz
    with scores of points or Gaussians in the frame of the capture. Photos that were trained on are left out.

    Typical calls:
      f3rm-ext eval query --load-config outputs/tabletop/f3rm-ext/.../config.yml
      f3rm-ext eval query --load-config .../config.yml --by example --example-photo 007.jpg
      f3rm-ext eval query --load-config .../config.yml --labels lerf_ovs/label/figurines
      f3rm-ext eval query --mesh tabletop.ply
      f3rm-ext eval query --predictions results/ --data tabletop
    """

    data: Path | None = None
    """Folder of the capture of a mesh or of predictions; by default that of the mesh when features were lifted."""
    predictions: Path | None = None
    """Folder of another program's scores or masks to judge instead of a run; needs --data or --labels."""
    training_photos: Path | None = None
    """With --predictions: text file that names the photos that the other program was trained on, one per line; by
    default the training photos of the capture."""
    labels: Path | None = None
    """Folder of LERF-OVS labels (JSON); by default the label images of the capture."""
    feature: str = ""
    """The distilled feature to query; by default the first."""
    by: Literal["auto", "text", "example"] = "auto"
    """How to query: text takes the names of the classes, example takes one pixel of each class in a training photo.
    auto takes text where the feature understands it."""
    example_photo: str = ""
    """Training photo to take one example of each class from; by default the examples come from any photos."""
    exemplars: Annotated[int, Range(1, 1000)] = 10
    """Number of examples of each class, 1 to 1000, each from a training photo drawn at random, but always the same
    ones. Every example is a query of its own; with several, the figures are means with their 95 % intervals."""
    negatives: Literal["auto", "common", "others", "both", "none"] = "auto"
    """What each class is compared with: common phrases (by example, the rest of the photo), the other classes, both, or
    none, which scores plain cosines. auto takes common by text, as LERF does, and both by example."""
    threshold: Annotated[float, Range(-1, 1)] = 0.5
    """Fixed threshold: lowest score that counts as found, -1 to 1."""
    temperature: Positive = 0.1
    """Temperature of the relevancy, above 0."""
    skip: tuple[str, ...] = ()
    """Classes to leave out, also as negatives of others."""
    out: Annotated[Path | None, OutArg] = None
    """File for all figures (JSON); by default query.json, beside the config or the mesh."""

    def __post_init__(self) -> None:
        """Raises ConfigError unless there is one thing to judge."""
        check_ranges(self)
        if self.predictions is None:
            super().__post_init__()
            if self.training_photos is not None:
                raise ConfigError("--training-photos only works with --predictions: leave it out.")
        elif self.load_config is not None or self.mesh is not None:
            raise ConfigError("--predictions are judged without a run or a mesh: leave out --load-config and --mesh.")
        elif self.data is None and self.labels is None:
            raise ConfigError(
                "--predictions need labels: give the capture with --data, or LERF-OVS labels with --labels."
            )

    def main(self) -> int:
        if self.predictions is not None:
            return self._judge(self.predictions)
        from f3rm_ext.features.extractors.registry import understands_text
        from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
        from f3rm_ext.query.queryable import get_head

        run = open_run_or_mesh(self.load_config, self.mesh, self.data)
        out = self.out or self.target_folder() / "query.json"
        require_own_file(out, COMMAND)
        head = get_head(run.model.query_heads(), self.feature)
        truth = self._truth(run.data)
        by = self.by
        if by == "auto":
            by = "text" if understands_text(head.extractor) else "example"
        negatives = self.negatives
        if negatives == "auto":
            negatives = "common" if by == "text" else "both"
        draws, map_draws = self._queries(run, head, truth, by, negatives)
        results = self._evaluate(run, head, truth, draws, map_draws)
        record = {
            **run.describe(),
            "feature": head.name,
            "extractor": head.extractor,
            "by": by,
            "negatives": negatives,
            "temperature": self.temperature,
            "queries": {
                query.name: [each.positives.sources[0] for draw in draws for each in draw if each.name == query.name]
                for query in draws[0]
            },
        }
        return self._report(out, record, results)

    def _report(self, out: Path, record: dict[str, object], results: "dict[Protocol, QueryMetrics]") -> int:
        from nerfstudio.utils.rich_utils import CONSOLE

        CONSOLE.print(self._table(results))
        CONSOLE.print(self._class_table(results))
        figures = {
            name: {**metrics.summary(), "classes": metrics.summarize_classes()} for name, metrics in results.items()
        }
        write_json(out, {"made_by": COMMAND, **record, "protocols": figures})
        say(f"The figures are in {out}.")
        return 0

    def _judge(self, folder: Path) -> int:
        """Judges the predictions of another program."""
        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.capture.ground_truth import CaptureGroundTruth, PolygonLabels
        from f3rm_ext.mesh.texture.photos import open_capture
        from f3rm_ext.query import evaluation
        from f3rm_ext.query.predictions import PredictionFolder, TrainingPhotos, judge_points, judge_views

        predictions = PredictionFolder(folder)
        out = self.out or folder / "query.json"
        require_own_file(out, COMMAND)
        source = None if self.data is None else open_capture(self.data)
        truth = self._truth(self.data)
        outputs = None if source is None else source.parser.get_dataparser_outputs("test")
        if outputs is not None:
            photos = list(outputs.image_filenames)
        else:
            assert isinstance(truth, PolygonLabels)
            photos = truth.images
        if self.training_photos is not None:
            trained = TrainingPhotos.read(self.training_photos)
        else:
            trained = TrainingPhotos(
                [] if source is None else source.parser.get_dataparser_outputs("train").image_filenames
            )
        classes = self._classes(truth)
        judgement = judge_views(predictions, truth, photos, trained, classes, self.threshold)
        results: dict[Protocol, QueryMetrics] = {"rendered": judgement.rendered}
        if outputs is not None and source is not None and isinstance(truth, CaptureGroundTruth):
            surface = evaluation.surface_points(photos, outputs.cameras, truth, outputs.dataparser_scale)
            if surface is not None:
                frame = CaptureFrame.from_outputs(outputs, source.data)
                surface = replace(surface, points=frame.to_capture(surface.points))
                if (direct := judge_points(predictions, surface, truth, classes, self.threshold)) is not None:
                    results["direct-3d"] = direct
        note(*judgement.notices())
        record = {"predictions": str(folder.resolve()), "protocol": judgement.protocol()}
        return self._report(out, record, results)

    def _truth(self, data: Path | None) -> "LabelSource":
        from f3rm_ext.capture.ground_truth import CaptureGroundTruth, PolygonLabels

        if self.labels is not None:
            return PolygonLabels(self.labels)
        assert data is not None
        truth = CaptureGroundTruth(data)
        if not truth.has_labels:
            raise CaptureError(
                f"The capture {data} has no labels: name `classes` and a `label_file_path` for each frame in its "
                "transforms.json, or give a folder of LERF-OVS labels with --labels."
            )
        return truth

    def _queries(
        self,
        run: "Photos",
        head: "QueryHead",
        truth: "LabelSource",
        by: str,
        negatives: "Negatives",
    ) -> "tuple[list[list[Query]], list[list[Query]]]":
        """Returns the queries of each draw, for the scene and for the 2D features; texts are one draw, and the same."""
        from f3rm_ext.query.builders import draw_places, exemplar_queries, text_queries
        from f3rm_ext.query.encoders import TextEncoder

        names = self._classes(truth)
        if by == "text":
            texts = [text_queries(head, names, TextEncoder(run.model.device), negatives, self.temperature)]
            return texts, texts
        places = draw_places(run, truth, names, self.exemplars, self.example_photo)
        if not places:
            raise ConfigError(
                "The photo to take examples from shows none of the classes: name another --example-photo."
            )
        by_scene, by_photo = (
            exemplar_queries(run, head, places, negatives, self.temperature, load)
            for load in (None, lambda index: run.feature_map("train", index, head.name))
        )
        return by_scene, by_photo

    def _classes(self, truth: "LabelSource") -> list[str]:
        unknown = [name for name in self.skip if name not in truth.classes]
        if unknown:
            raise ConfigError(f"There is no class {unknown[0]!r} to skip: the labels have {', '.join(truth.classes)}.")
        names = [name for name in truth.classes if name not in self.skip]
        if not names:
            raise ConfigError(
                "All classes are skipped, so there is nothing to query: leave some of them out of --skip."
            )
        return names

    def _evaluate(
        self,
        run: "Photos",
        head: "QueryHead",
        truth: "LabelSource",
        draws: "list[list[Query]]",
        map_draws: "list[list[Query]]",
    ) -> "dict[Protocol, QueryMetrics]":
        from rich.progress import track

        from f3rm_ext.capture.ground_truth import CaptureGroundTruth
        from f3rm_ext.query import evaluation
        from f3rm_ext.query.metrics import QueryMetrics
        from f3rm_ext.query.queryable import score_image

        files, cameras = run.files("test"), run.cameras("test")
        views = list(evaluation.find_labelled_cameras(files, cameras, truth))
        if not views:
            raise CaptureError("None of the held-out photos has labels, so there is nothing to compare with.")
        rendered, image_features = QueryMetrics(self.threshold), QueryMetrics(self.threshold)
        for file, camera, labels in track(views, "Held-out views"):
            index = files.index(file)
            kept, feature_map = run.photo_mask("test", index), run.feature_map("test", index, head.name)
            height, width = int(camera.height.item()), int(camera.width.item())
            score_map = partial(evaluation.score_feature_map, feature_map, height_px=height, width_px=width)
            evaluation.count_draws(image_features, map_draws, score_map, labels, kept)
            evaluation.count_draws(
                rendered,
                draws,
                lambda queries, camera=camera: score_image(run.model, camera, queries)[0],
                labels,
                kept,
            )
        results: dict[Protocol, QueryMetrics] = {"rendered": rendered, "image-features": image_features}
        if isinstance(truth, CaptureGroundTruth):
            scale = run.manager.train_dataparser_outputs.dataparser_scale
            surface = evaluation.surface_points(files, cameras, truth, scale, kept=lambda i: run.photo_mask("test", i))
            if surface is not None:
                results["direct-3d"] = evaluation.evaluate_points(run.model, draws, surface, truth, self.threshold)
        return results

    def _table(self, results: "dict[Protocol, QueryMetrics]") -> Any:
        from rich.table import Table

        table = Table(title=f"Queries against labels, at a threshold of {self.threshold:g}, and at the best one")
        columns = {
            "localisation": "localisation",
            "mIoU": "miou",
            "> .25": "iou_above_25",
            "> .5": "iou_above_50",
            "boundary IoU": "boundary_iou",
            "mAcc": "macc",
            "best at": "best_threshold",
            "mIoU there": "best_miou",
        }
        for column in ("", "pairs", *columns):
            table.add_column(column, justify="right" if column else "left")
        for name, metrics in results.items():
            summary = metrics.summary()
            table.add_row(TITLES[name], str(summary["pairs"]), *(_cell(summary, key) for key in columns.values()))
        return table

    def _class_table(self, results: "dict[Protocol, QueryMetrics]") -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Localisation and IoU at the fixed threshold, by class")
        table.add_column("")
        for name in results:
            table.add_column(TITLES[name], justify="right")
        classes = {name: metrics.summarize_classes() for name, metrics in results.items()}
        for thing in classes["rendered"]:
            cells = [results.get(thing) for results in classes.values()]
            table.add_row(
                Text(thing), *("-" if c is None else f"{c['localisation']:.2f}  {c['miou']:.3f}" for c in cells)
            )
        return table


def _cell(summary: "Mapping[str, Any]", key: str) -> str:
    """A figure and, below it, its 95 % interval where there are several draws."""
    if key not in summary:
        return "-"
    low_high = summary.get("intervals", {}).get(key)
    return f"{summary[key]:.3f}" + ("" if low_high is None else f"\n{low_high[0]:.3f}-{low_high[1]:.3f}")
