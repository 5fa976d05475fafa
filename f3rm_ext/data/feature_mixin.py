"""What datamanagers with 2D features share: preparing them for training, and finding them for evaluation."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.data.ray_stream import MapSource
from f3rm_ext.errors import UserError

if TYPE_CHECKING:
    from f3rm_ext.query.during_eval import EvalQueries


class FeaturedDataManager:
    """Mixin in front of one of nerfstudio's datamanagers; its config has ``features``."""

    config: Any
    device: torch.device | str
    test_mode: Literal["test", "val", "inference"]
    train_dataset: Any
    eval_dataset: Any
    local_rank: int
    world_size: int
    _sources: list[MapSource] | None = None
    _sources_failed: bool = False
    _eval_queries: "tuple[EvalQueries | None] | None" = None

    def train_feature_source(self) -> Any:
        """Feature maps of the training images; None where there are none (outside training there are none)."""
        if self.test_mode != "val" or not self.config.features.extractors:
            return None
        if self._sources is None:
            self._sources = self.prepare_features(with_train=True)
        return self._sources[0]

    def eval_feature_source(self) -> MapSource | None:
        """Feature maps of the evaluation images; None where there are none or they cannot be had."""
        if self.test_mode == "inference" or not self.config.features.extractors or self.eval_dataset is None:
            return None
        if self._sources is None and not self._sources_failed:
            try:
                # The basis of PCA codes belongs to the training images.
                self._sources = self.prepare_features(with_train=self.config.features.codes > 0)
            except (UserError, OSError) as error:
                self._sources_failed = True
                CONSOLE.log(f"Evaluating without 2D features: {error}", markup=False)
        return None if self._sources is None else self._sources[-1]

    def eval_queries(self) -> "EvalQueries | None":
        """What ``ns-eval`` asks in held-out photos that have labels; None where they have none."""
        if self.test_mode != "test" or not self.config.features.extractors:
            return None
        if self._eval_queries is None:
            from f3rm_ext.query.during_eval import EvalQueries

            self._eval_queries = (EvalQueries.of(self),)  # type: ignore[arg-type]
        return self._eval_queries[0]

    def prepare_features(self, *, with_train: bool) -> list[MapSource]:
        """Extracts what is missing of the features of the training images (if asked for) and of the evaluation images.

        Returns:
            One source per data set.

        Raises:
            UserError: see :func:`~f3rm_ext.features.store.source.prepare_features`.
        """
        from f3rm_ext.features.store.source import prepare_features

        datasets = [self.train_dataset] if with_train else []
        if self.eval_dataset is not None:
            datasets.append(self.eval_dataset)
        return list(
            prepare_features(
                datasets,
                self.config.features,
                device=self.device,
                local_rank=self.local_rank,
                world_size=self.world_size,
            )
        )
