"""A trained run opened for questions: its model, its capture, and the stored features of its photos."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.queryable import Queryable, QueryHead, checked_head

if TYPE_CHECKING:
    from nerfstudio.data.datasets.base_dataset import InputDataset
    from nerfstudio.engine.trainer import TrainerConfig

    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.data.image_datamanager import ImageDataManager
    from f3rm_ext.features.spec import FeatureSpec
    from f3rm_ext.features.store.source import FeatureSource

_MAX_TURN = 0.02
"""Most that two PCA bases of the same features may differ, as a cosine; other machines round otherwise."""


@dataclass
class Photos:
    """A model and the capture it was trained on. Splits are ``train`` and ``test``."""

    model: Any
    """The model, a :class:`~f3rm_ext.query.queryable.Queryable`, in evaluation mode."""
    manager: "F3rmDataManager | ImageDataManager"
    """The photos and cameras."""

    def __post_init__(self) -> None:
        self._sources: dict[str, FeatureSource] | None = None

    @property
    def data(self) -> Path:
        """The capture."""
        return Path(self.manager.dataparser.config.data)

    def dataset(self, split: str) -> "InputDataset":
        """The photos of a split.

        Raises:
            ConfigError: the capture has no held-out photos.
        """
        dataset = self.manager.train_dataset if split == "train" else self.manager.eval_dataset
        if dataset is None:
            raise ConfigError("The capture has no held-out photos: ask for the views `train` instead.")
        return dataset

    def cameras(self, split: str) -> Cameras:
        """The cameras of a split."""
        return self.dataset(split).cameras

    def files(self, split: str) -> list[Path]:
        """The files of the photos of a split."""
        return [Path(name) for name in self.dataset(split).image_filenames]

    def find_photo(self, name: str) -> tuple[str, int] | None:
        """Split and index of the photo of this name, path or end of a path (``left/001.png``); None where none is.

        A training photo comes before a held-out one of the same name.
        """
        wanted = Path(name)
        for split in ("train", "test") if self.manager.eval_dataset is not None else ("train",):
            for index, file in enumerate(self.files(split)):
                if file.parts[-len(wanted.parts) :] == wanted.parts or file.resolve() == wanted.resolve():
                    return split, index
        return None

    def photo(self, split: str, index: int) -> np.ndarray:
        """A photo as the run sees it, uint8, (h, w, 3)."""
        from f3rm_ext.features.store.images import on_white

        return on_white(self.dataset(split).get_numpy_image(index))

    def kept(self, split: str, index: int) -> Bool[np.ndarray, "h w"] | None:
        """Pixels of a photo that its mask keeps; None where it has none."""
        from f3rm_ext.data.image_reader import read_pixels
        from f3rm_ext.data.pinhole_dataset import PinholeDataset

        dataset = self.dataset(split)
        picture = dataset.picture(index) if isinstance(dataset, PinholeDataset) else read_pixels(dataset, index)
        return None if picture.valid is None else picture.valid.numpy()

    def feature_map(self, split: str, index: int, head: str) -> FeatureMap:
        """The 2D features of a photo, from the feature store.

        The store is found by what the checkpoint says of its features; weights are needed only where it is incomplete.

        Raises:
            UserError: the features are not in the store and cannot be made, or are not those that were distilled.
        """
        found = checked_head(self.model.query_heads(), head)
        self.dataset(split)
        if self._sources is None:
            self._sources = self._open_sources()
        source = self._sources[split]
        _require_same_space(found, {spec.name: spec for spec in source.specs}.get(found.name))
        return source.load(index)[found.name]

    def _open_sources(self) -> "dict[str, FeatureSource]":
        from f3rm_ext.features.store.source import open_features, prepare_features

        splits = ["train"] if self.manager.eval_dataset is None else ["train", "test"]
        datasets = [self.dataset(split) for split in splits]
        options = self.manager.config.features
        specs = [head.spec for head in self.model.query_heads().values()]
        if not options.extractors:  # splats that got their features after the training
            codes = [0 if spec.code_basis is None else len(spec.code_basis) for spec in specs]
            options = replace(options, extractors=tuple(spec.extractor for spec in specs), codes=max(codes))
        sources = open_features(datasets, specs, options.cache_dir)
        if sources is None:
            sources = prepare_features(datasets, options, device=self.model.device)
        return dict(zip(splits, sources, strict=True))


def _require_same_space(head: QueryHead, spec: "FeatureSpec | None") -> None:
    """Raises FeatureStoreError unless the features of this spec have the coordinates that the head distils."""
    if spec is None or dict(spec.identity) != dict(head.identity):
        raise FeatureStoreError(
            f"What {head.extractor} gives now are not the 2D features that {head.name!r} was distilled from, and the "
            "feature store no longer has those: use the weights and options of the training, or ask by text."
        )
    mine, theirs = head.basis, spec.code_basis
    if mine is not None and theirs is not None and mine.shape == theirs.shape:
        turned = (mine.cpu() @ theirs.cpu().T - torch.eye(len(mine))).abs().max()
        same = float(turned) < _MAX_TURN
    else:
        same = mine is None and theirs is None
    if not same:
        raise FeatureStoreError(
            f"The PCA codes in the feature store have another basis than those the feature {head.name!r} was distilled "
            "from, so they cannot be compared: ask by text, or train again."
        )


@dataclass
class Run(Photos):
    """A trained run."""

    config: "TrainerConfig"
    """Its options."""
    checkpoint: Path
    """The file that was loaded."""
    step: int
    """Number of the last training step in it."""

    def describe(self) -> dict[str, object]:
        """Where results come from, for files that hold them."""
        return {"checkpoint": str(self.checkpoint.resolve()), "step": self.step, "method": self.config.method_name}


def load_run(load_config: Path) -> Run:
    """Opens a run.

    Args:
        load_config: its config.yml.

    Raises:
        ConfigError: there is no such file, it cannot be understood, or the run's method has no features.
        CheckpointError: it has no checkpoint yet, or all are damaged.
    """
    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.data.image_datamanager import ImageDataManager
    from f3rm_ext.engine.opening import open_run

    opened = open_run(
        load_config,
        lambda config: issubclass(config.pipeline.datamanager._target, F3rmDataManager | ImageDataManager),
        "which distils no features: give a run of f3rm-ext or sugar-ext",
    )
    model, manager = opened.pipeline.model, opened.pipeline.datamanager
    assert isinstance(model, Queryable) and isinstance(manager, F3rmDataManager | ImageDataManager)
    return Run(model, manager, opened.config, opened.checkpoint, opened.step)
