"""Queries asked while ``ns-eval`` goes through the held-out photos of a capture with labels."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Bool
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.capture.ground_truth import Truth
from f3rm_ext.errors import UserError
from f3rm_ext.features.extractors.registry import understands_text
from f3rm_ext.query.builders import exemplar_queries, text_queries
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, count_view
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.queryable import Queryable, QueryHead, score_image
from f3rm_ext.query.run import Photos

if TYPE_CHECKING:
    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.data.image_datamanager import ImageDataManager


class EvalQueries:
    """A query for every labelled class and feature: by its name where texts are understood, else by example.

    Args:
        manager: whose held-out photos are evaluated.
        truth: labels of all of them.
    """

    def __init__(self, manager: "F3rmDataManager | ImageDataManager", truth: Truth) -> None:
        self._manager, self._truth = manager, truth
        self._queries: list[Query] | None = None

    @classmethod
    def of(cls, manager: "F3rmDataManager | ImageDataManager") -> "EvalQueries | None":
        """For a capture whose held-out photos all show labelled objects; None for any other."""
        dataset = manager.eval_dataset
        try:
            truth = Truth(Path(manager.dataparser.config.data))
            if dataset is None or not truth.has_labels:
                return None
            for file in map(Path, dataset.image_filenames):
                labels = truth.label_image(file)
                if labels is None or not labels.any():
                    return None
        except UserError as error:
            CONSOLE.log(f"Evaluating without queries: {error}", markup=False)
            return None
        return cls(manager, truth)

    def metrics(
        self, model: Queryable, camera: Cameras, file: Path, mask: Bool[Tensor, "h w 1"] | None = None
    ) -> dict[str, float]:
        """Accuracy in one held-out photo, means over the classes seen in it.

        Args:
            model: the model.
            camera: of the photo.
            file: the photo.
            mask: what it leaves out is neither looked for nor found.

        Returns:
            ``query_localisation_NAME``, ``query_miou_NAME`` and ``query_macc_NAME`` by feature, at the fixed threshold;
            0 where no class is seen well enough.
        """
        if self._queries is None:
            self._queries = [query for head in model.query_heads().values() for query in self._ask(model, head)]
        view = self._truth.view(file, int(camera.height.item()), int(camera.width.item()))
        if not self._queries or view is None:
            return {}
        scores, _ = score_image(model, camera, self._queries)
        kept = None if mask is None else mask[..., 0].cpu().numpy()
        result: dict[str, float] = {}
        for name in dict.fromkeys(query.head for query in self._queries):
            mine = [index for index, query in enumerate(self._queries) if query.head == name]
            metrics = QueryMetrics()
            count_view(metrics, [self._queries[index] for index in mine], scores[..., mine], view, kept)
            summary = metrics.summary()
            for key in ("localisation", "miou", "macc"):
                result[f"query_{key}_{name}"] = float(summary.get(key, 0.0))
        return result

    def _ask(self, model: Queryable, head: QueryHead) -> list[Query]:
        try:
            if understands_text(head.extractor):
                how, queries = "text", text_queries(head, self._truth.classes, TextEncoder(model.device), "common")
            else:
                photos, classes = Photos(model, self._manager), self._truth.classes
                how, queries = "example", exemplar_queries(photos, head, self._truth, classes, "both")
        except (UserError, OSError) as error:
            CONSOLE.log(f"Evaluating {head.name} without queries: {error}", markup=False)
            return []
        CONSOLE.log(f"Asking {head.name} for {len(queries)} classes by {how} (≥ {MIN_VISIBLE_PX} pixels).")
        return queries
