"""A trained run opened for questions: its model, its capture, and the stored features of its photos."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.scorer import Queryable, checked_head

if TYPE_CHECKING:
    from nerfstudio.data.datasets.base_dataset import InputDataset
    from nerfstudio.engine.trainer import TrainerConfig

    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.features.source import FeatureSource


@dataclass
class Photos:
    """A model and the capture it was trained on. Splits are ``train`` and ``test``."""

    model: Any
    """The model, a :class:`~f3rm_ext.query.scorer.Queryable`, in evaluation mode."""
    manager: "F3rmDataManager"
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
        """Split and index of the photo of this name or path; None where the capture has none."""
        for split in ("train", "test") if self.manager.eval_dataset is not None else ("train",):
            for index, file in enumerate(self.files(split)):
                if file.name == name or file.resolve() == Path(name).resolve():
                    return split, index
        return None

    def photo(self, split: str, index: int) -> np.ndarray:
        """A photo as the run sees it, uint8, (h, w, 3)."""
        from f3rm_ext.features.images import on_white

        return on_white(self.dataset(split).get_numpy_image(index))

    def feature_map(self, split: str, index: int, head: str) -> FeatureMap:
        """The 2D features of a photo, from the feature store.

        The store is found by what the checkpoint says of its features; weights are needed only where it is incomplete.

        Raises:
            UserError: the features are not in the store and cannot be made.
        """
        if self._sources is None:
            self._sources = self._open_sources()
        return self._sources[split].load(index)[checked_head(self.model.query_heads(), head).name]

    def _open_sources(self) -> "dict[str, FeatureSource]":
        from f3rm_ext.features.source import open_features, prepare_features

        splits = ["train"] if self.manager.eval_dataset is None else ["train", "test"]
        datasets = [self.dataset(split) for split in splits]
        options = self.manager.config.features
        specs = [head.spec for head in self.model.query_heads().values()]
        sources = open_features(datasets, specs, options.cache_dir)
        if sources is None:
            sources = prepare_features(datasets, options, device=self.model.device)
        return dict(zip(splits, sources, strict=True))


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
        ConfigError: there is no such file, or the run's method has no features.
        CheckpointError: it has no checkpoint yet.
    """
    from nerfstudio.utils.eval_utils import eval_setup

    from f3rm_ext.data.datamanager import F3rmDataManager

    if not load_config.is_file():
        raise ConfigError(f"There is no file {load_config}: give the config.yml of a run, which ns-train has written.")
    folder = load_config.parent / "nerfstudio_models"
    if not any(folder.glob("step-*.ckpt")):
        raise CheckpointError(f"There is no checkpoint in {folder}: train until the first one is saved.")

    def stay(config: "TrainerConfig") -> "TrainerConfig":
        """Checkpoints lie beside the config, wherever the run was moved to."""
        base = load_config.resolve().parent
        if base.parts[-3:] == (config.experiment_name, config.method_name, config.timestamp):
            config.output_dir = base.parent.parent.parent
        return config

    config, pipeline, checkpoint, step = eval_setup(load_config, test_mode="test", update_config_callback=stay)
    model, manager = pipeline.model, pipeline.datamanager
    if not isinstance(model, Queryable) or not isinstance(manager, F3rmDataManager):
        raise ConfigError(
            f"The run {load_config} is of the method {config.method_name}, which distils no features: "
            "give a run of f3rm-ext."
        )
    return Run(model, manager, config, checkpoint, step)
