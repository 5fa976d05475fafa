"""nerfstudio's pipeline, whose evaluation also queries the model where the capture has labels."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.pipelines.base_pipeline import Pipeline, VanillaPipeline, VanillaPipelineConfig
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor
from torch.cuda.amp.grad_scaler import GradScaler

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.capture.points import RGB, XYZ
from f3rm_ext.data.datamanager import F3rmDataManager
from f3rm_ext.data.image_datamanager import ImageDataManager
from f3rm_ext.engine import ranks
from f3rm_ext.engine.ns_export import check_image_sizes, check_split
from f3rm_ext.engine.protocols import CountsLossTerms, ShardsParameters
from f3rm_ext.errors import UserError
from f3rm_ext.features.extractors.registry import understands_text
from f3rm_ext.query.builders import draw_places, exemplar_queries, text_queries
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, count_view, split_draws
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.queryable import Queryable, QueryHead, score_image
from f3rm_ext.query.run import Photos

_EXEMPLARS = 3
"""Examples of each class; `f3rm-ext eval query` draws more."""


@dataclass
class FeaturePipelineConfig(VanillaPipelineConfig):
    """Options of :class:`FeaturePipeline`."""

    _target: type = field(default_factory=lambda: FeaturePipeline)


class FeaturePipeline(VanillaPipeline):
    """A datamanager and a model with features. ``ns-eval`` adds the accuracy of queries to the metrics.

    With several processes the model is not wrapped in torch's DDP:
    :class:`~f3rm_ext.engine.synchronization.SynchronizedOptimizers` adds up the gradients. Here every loss gets the
    weight of this process's share of the batch, so that the sum is the gradient of the mean over all of the batch.
    """

    def __init__(
        self,
        config: FeaturePipelineConfig,
        device: str | torch.device,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        """Builds datamanager and model; all processes of a run start with the parameters of rank 0, or with a part.

        Raises:
            UserError: the capture, the features or an option cannot be used, or ns-export or ns-render cannot do what
                it is asked for.
        """
        if world_size == 1:
            super().__init__(config, device, test_mode, world_size, local_rank, grad_scaler)  # type: ignore[arg-type]
            check_image_sizes(sys.argv, self.datamanager.train_dataset.cameras)  # type: ignore[union-attr]
            check_split(sys.argv, holds_out=self.datamanager.eval_dataset is not None)
            return
        Pipeline.__init__(self)
        self.config, self.test_mode, self.world_size = config, test_mode, world_size  # type: ignore[assignment]
        self.datamanager = config.datamanager.setup(
            device=device, test_mode=test_mode, world_size=world_size, local_rank=local_rank
        )
        dataset: Any = self.datamanager.train_dataset
        outputs = getattr(self.datamanager, "train_dataparser_outputs", None)
        points = {} if outputs is None else outputs.metadata
        self._model = config.model.setup(
            scene_box=dataset.scene_box,
            num_train_data=len(dataset),
            metadata=dataset.metadata,
            device=device,
            grad_scaler=grad_scaler,
            seed_points=(points[XYZ], points[RGB]) if XYZ in points else None,
        )
        self.model.to(device)
        is_sharded = isinstance(self.model, ShardsParameters) and self.model.sharded
        if ranks.world_size() > 1 and not is_sharded:
            ranks.send_from_first([*self.model.parameters(), *self.model.buffers()])

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Outputs, losses and metrics of a training step.

        With several processes the values are those of this one, and the gradients have the weight of its share.
        """
        if ranks.world_size() == 1:
            return super().get_train_loss_dict(step)
        inputs, batch = self.datamanager.next_train(step)
        outputs: Any = self.model(inputs)
        metrics = self.model.get_metrics_dict(outputs, batch)
        losses: dict[str, Tensor] = self.model.get_loss_dict(outputs, batch, metrics)  # type: ignore[assignment]
        model = self.model
        terms = model.loss_terms(losses, outputs, batch) if isinstance(model, CountsLossTerms) else {}
        return outputs, weight_losses(losses, terms, self.device), metrics

    def get_average_image_metrics(self, data_loader: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The metrics of nerfstudio's pipeline and, in a test, those of queries, see :meth:`query_metrics`.

        A single photo has no deviations: NaN, which JSON cannot hold, is left out.
        """
        metrics = super().get_average_image_metrics(data_loader, *args, **kwargs)
        metrics = {key: value for key, value in metrics.items() if not (key.endswith("_std") and math.isnan(value))}
        return metrics | (self.query_metrics(data_loader) if self.test_mode == "test" else {})

    def query_metrics(self, views: Iterable[tuple[Cameras, dict[str, Any]]]) -> dict[str, float]:
        """Queries the model in labelled photos.

        Args:
            views: camera and batch (``image_idx``, ``mask`` where there is one) of each held-out photo.

        Returns:
            ``query_localisation_NAME``, ``query_miou_NAME`` and ``query_macc_NAME`` by feature, at the fixed threshold:
            means over all pairs of a photo and a class visible in it. Empty unless every held-out photo has labels,
            the model has features, and there is such a pair.
        """
        manager, model = self.datamanager, self.model
        assert isinstance(manager, F3rmDataManager | ImageDataManager) and isinstance(model, Queryable)
        truth = _labels(manager) if model.query_heads() else None
        if truth is None or manager.eval_dataset is None:
            return {}
        photos = Photos(model, manager)
        was_training = self.training
        self.eval()
        draws = [draw for head in model.query_heads().values() for draw in _class_queries(photos, head, truth)]
        queries = [query for draw in draws for query in draw]
        counts = {query.head: QueryMetrics() for query in queries}
        for camera, batch in views if queries else ():
            file = Path(manager.eval_dataset.image_filenames[int(batch["image_idx"])])
            view = truth.view(file, int(camera.height.item()), int(camera.width.item()))
            if view is None:
                continue
            scores, _ = score_image(model, camera, queries)
            kept = None if batch.get("mask") is None else batch["mask"][..., 0].cpu().numpy()
            for draw, part in zip(draws, split_draws(scores, draws), strict=True):
                count_view(counts[draw[0].head], draw, part, view, kept)
        self.train(was_training)
        return {
            f"query_{key}_{name}": summary[key]
            for name, summary in ((name, count.summary()) for name, count in counts.items() if len(count))
            for key in ("localisation", "miou", "macc")
        }


def weight_losses(
    losses: Mapping[str, Tensor], terms: Mapping[str, int | Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Gives each loss this process's share of the batch of all processes as its weight.

    The values stay as they are, for the log. Only the gradients get the weight.

    Args:
        losses: of this process, each a mean; by name.
        terms: number of terms n that a loss is the mean of, by name, the same names on every rank, also where a loss
            has no terms. The weight is n / Σ n, and 1 / (number of processes) for other losses.
    """
    equal = 1 / ranks.world_size()
    shares: dict[str, Tensor] = {}
    if terms:
        names = sorted(terms)
        # Filled, not copied from the host, which would have to wait; and not read back.
        own = torch.stack([torch.zeros((), dtype=torch.float64, device=device) + terms[name] for name in names])
        total = own.clone()
        ranks.sum_over_ranks(total)
        shares = dict(zip(names, (own / total.clamp(min=1)).float(), strict=True))
    return {name: loss.detach() + shares.get(name, equal) * (loss - loss.detach()) for name, loss in losses.items()}


def _labels(manager: F3rmDataManager | ImageDataManager) -> CaptureGroundTruth | None:
    """The labels of a capture, if all of its held-out photos show labelled objects."""
    files: Sequence[Any] = [] if manager.eval_dataset is None else manager.eval_dataset.image_filenames
    try:
        truth = CaptureGroundTruth(Path(manager.dataparser.config.data))
        if not files or not truth.has_labels:
            return None
        labels = [truth.label_image(Path(file)) for file in files]
    except UserError as error:
        CONSOLE.log(f"Evaluating without queries: {error}", markup=False)
        return None
    return truth if all(label is not None and label.any() for label in labels) else None


def _class_queries(photos: Photos, head: QueryHead, truth: CaptureGroundTruth) -> list[list[Query]]:
    """Queries for each labelled class: by its name if the feature understands text, else by a few examples."""
    try:
        if understands_text(head.extractor):
            how, draws = "text", [text_queries(head, truth.classes, TextEncoder(photos.model.device), "common")]
        else:
            how = "example"
            draws = exemplar_queries(photos, head, draw_places(photos, truth, truth.classes, _EXEMPLARS), "both")
    except (UserError, OSError) as error:
        CONSOLE.log(f"Evaluating {head.name} without queries: {error}", markup=False)
        return []
    if not draws:
        return []
    CONSOLE.log(f"Querying {head.name} for {len(draws[0])} classes by {how} (≥ {MIN_VISIBLE_PX} pixels).")
    return [draw for draw in draws if draw]
