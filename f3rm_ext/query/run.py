"""A trained run, opened for queries: its model, its capture, the stored features of its photos, and views of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float32
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.exemplar import scene_clusters
from f3rm_ext.query.queryable import Queryable, QueryHead, get_head, render_map
from f3rm_ext.utils.console import note
from f3rm_ext.utils.pictures import pick_evenly, to_bytes

if TYPE_CHECKING:
    from nerfstudio.data.datasets.base_dataset import InputDataset
    from nerfstudio.engine.trainer import TrainerConfig

    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.data.image_datamanager import ImageDataManager
    from f3rm_ext.features.source import FeatureSource
    from f3rm_ext.features.spec import FeatureSpec

DEFAULT_FPS = 24.0
"""Frames per second of a camera path that names neither a rate nor a duration."""
SCENE_PHOTOS = 8
"""Photos that show what there is in a scene."""
SCENE_MAP_PX = 160
"""Longer side of :meth:`Photos.scene_map`."""
_MAX_TURN = 0.02
"""By how much two PCA bases of the same features may differ, as a cosine: rounding differs between machines."""


@dataclass
class Photos:
    """A model and the capture it was trained on. Splits are ``train`` and ``test``."""

    model: Any
    """The model, a :class:`~f3rm_ext.query.queryable.Queryable`, in evaluation mode."""
    manager: "F3rmDataManager | ImageDataManager"

    def __post_init__(self) -> None:
        self._sources: dict[str, FeatureSource] | None = None
        self._clusters: dict[str, np.ndarray] = {}

    @property
    def data(self) -> Path:
        """The capture: its folder or file."""
        return Path(self.manager.dataparser.config.data)

    @property
    def frame(self) -> CaptureFrame:
        return CaptureFrame.from_outputs(self.manager.train_dataparser_outputs, self.data)

    def describe(self) -> dict[str, object]:
        """Returns where the model comes from, as JSON; nothing while it is trained."""
        return {}

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have photos: ``train``, and ``test`` where some are held out."""
        return ("train",) if self.manager.eval_dataset is None else ("train", "test")

    def dataset(self, split: str) -> "InputDataset":
        """Returns the photos of a split. Raises ConfigError if the capture has no held-out photos."""
        dataset = self.manager.train_dataset if split == "train" else self.manager.eval_dataset
        if dataset is None:
            raise ConfigError("The capture has no held-out photos: choose the views `train` instead.")
        return dataset

    def cameras(self, split: str) -> Cameras:
        return self.dataset(split).cameras

    def files(self, split: str) -> list[Path]:
        return [Path(name) for name in self.dataset(split).image_filenames]

    def find_photo(self, name: str) -> tuple[str, int] | None:
        """Returns split and index of the photo of this name, path or end of a path (``left/001.png``), or None.

        Of several photos of the same name it is the first, a training photo if there is one; a note says which.
        """
        path, resolved = Path(name), Path(name).resolve()
        places: dict[Path, tuple[str, int]] = {}
        for split in self.splits:
            for index, file in enumerate(self.files(split)):
                if file.parts[-len(path.parts) :] == path.parts or file.resolve() == resolved:
                    places.setdefault(file, (split, index))
        if len(places) > 1:
            first, other = list(places)[:2]
            note(f"{len(places)} photos are called {name}: {first} is taken; name another with its folder, as {other}.")
        return next(iter(places.values()), None)

    def photo(self, split: str, index: int, rendered: bool = False) -> np.ndarray:
        """Decodes a photo as the run sees it, uint8, (h, w, 3).

        Args:
            rendered: transparent pixels show what renderings have behind the scene, in place of white.
        """
        from f3rm_ext.features.store.images import WHITE, blend_background

        behind = to_bytes(self.model.background.cpu().numpy()) if rendered else WHITE
        return blend_background(self.dataset(split).get_numpy_image(index), behind)

    def photo_mask(self, split: str, index: int) -> Bool[np.ndarray, "h w"] | None:
        """Returns the pixels of a photo that its mask keeps; None where it has no mask."""
        from f3rm_ext.data.image_reader import read_pixels
        from f3rm_ext.data.pinhole_dataset import PinholeDataset

        dataset = self.dataset(split)
        picture = dataset.picture(index) if isinstance(dataset, PinholeDataset) else read_pixels(dataset, index)
        return None if picture.valid is None else picture.valid.numpy()

    def feature_map(self, split: str, index: int, head: str) -> FeatureMap:
        """Returns the 2D features of a photo, from the feature store.

        The checkpoint's record of its features finds the store. Weights are needed only where it is incomplete.

        Raises:
            UserError: the features are not in the store and cannot be extracted, or others were distilled.
        """
        own = get_head(self.model.query_heads(), head)
        self.dataset(split)
        if self._sources is None:
            self._sources = self._open_sources()
        source = self._sources[split]
        _require_same_space(own, {spec.name: spec for spec in source.specs}.get(own.name))
        return source.load(index)[own.name]

    def scene_map(self, split: str, index: int, head: str) -> FeatureMap:
        """Renders the features of the scene from the camera of a photo, at most 160 pixels wide and high.

        Examples are taken from here: the features in a scene are the means of many photos, and finer than the patches
        of a single one, so that they are compared with their like. Neither feature store nor weights are needed.

        Returns:
            The map, in pixels of the photo as the run sees it; features are 0 where there is nothing.
        """
        return view_map(self.model, get_head(self.model.query_heads(), head), self.cameras(split), index)

    def scene_clusters(self, head: str, load: Callable[[int], FeatureMap] | None = None) -> np.ndarray:
        """Returns the directions that the scene shows, see :func:`~f3rm_ext.query.exemplar.scene_clusters`.

        Args:
            load: returns the features of a training photo; by default :meth:`scene_map`, once for each head.
        """
        if load is not None:
            return scene_clusters([load(index) for index in pick_evenly(len(self.files("train")), SCENE_PHOTOS)])
        own = get_head(self.model.query_heads(), head)
        if own.clusters is not None:
            return own.clusters.cpu().numpy()
        if head not in self._clusters:
            self._clusters[head] = view_clusters(self.model, own, self.cameras("train"))
        return self._clusters[head]

    def _open_sources(self) -> "dict[str, FeatureSource]":
        from f3rm_ext.features.source import open_features, prepare_features

        datasets = [self.dataset(split) for split in self.splits]
        options = self.manager.config.features
        specs = [head.spec for head in self.model.query_heads().values()]
        # Those of the model, which splats may have got after training.
        codes = [0 if spec.code_basis is None else len(spec.code_basis) for spec in specs]
        options = replace(options, extractors=tuple(spec.extractor for spec in specs), codes=max(codes))
        if specs[0].cache_dir and Path(specs[0].cache_dir).is_dir():
            options = replace(options, cache_dir=Path(specs[0].cache_dir))
        sources = open_features(datasets, specs, options.cache_dir)
        if sources is None:
            sources = prepare_features(datasets, options, device=self.model.device)
        return dict(zip(self.splits, sources, strict=True))


def _require_same_space(head: QueryHead, spec: "FeatureSpec | None") -> None:
    """Raises FeatureStoreError unless stored features have the coordinates that the head distils."""
    if spec is None or dict(spec.identity) != dict(head.identity):
        raise FeatureStoreError(
            f"{head.extractor} now gives other 2D features than those {head.name!r} was distilled from, and the "
            "feature store no longer has those: use the weights and options of the training, or query by text."
        )
    mine, theirs = head.basis, spec.code_basis
    if mine is not None and theirs is not None and mine.shape == theirs.shape:
        difference = (mine.cpu() @ theirs.cpu().T - torch.eye(len(mine))).abs().max()
        same = float(difference) < _MAX_TURN
    else:
        same = mine is None and theirs is None
    if not same:
        raise FeatureStoreError(
            f"The PCA codes in the feature store have another basis than those {head.name!r} was distilled from, so "
            "they cannot be compared: query by text, or train again."
        )


@dataclass
class Run(Photos):
    config: "TrainerConfig"
    """Options of the run, as in its config.yml."""
    checkpoint: Path
    step: int
    """Number of the last training step in the checkpoint."""

    def describe(self) -> dict[str, object]:
        return {"checkpoint": str(self.checkpoint.resolve()), "step": self.step, "method": self.config.method_name}


def load_run(load_config: Path) -> Run:
    """Opens a run.

    Raises:
        ConfigError: there is no such file, it cannot be understood, or the run's method has no features.
        CheckpointError: the run has no checkpoint yet, or all are damaged.
    """
    from f3rm_ext.data.datamanager import F3rmDataManager
    from f3rm_ext.data.image_datamanager import ImageDataManager
    from f3rm_ext.engine.opening import open_run

    run = open_run(
        load_config,
        lambda config: issubclass(config.pipeline.datamanager._target, F3rmDataManager | ImageDataManager),
        "which distils no features: give a run of f3rm-ext or sugar-ext",
    )
    model, manager = run.pipeline.model, run.pipeline.datamanager
    assert isinstance(model, Queryable) and isinstance(manager, F3rmDataManager | ImageDataManager)
    return Run(model, manager, run.config, run.checkpoint, run.step)


# --- views -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A view to render."""

    name: str
    """Unique; used in file names."""
    camera: Cameras
    """One camera, scene frame."""
    photo: tuple[str, int] | None = None
    """Split and index of the photo taken there; None where there is none."""


@dataclass(frozen=True)
class CameraPath:
    """A camera path of nerfstudio's viewer."""

    cameras: Cameras
    """Cameras in the order of the path, scene frame."""
    fps: float
    """Frames per second at which it has the duration its author chose."""
    has_crop: bool
    """Whether it has a crop box, which queries ignore."""

    def views(self, scale: float = 1.0) -> list[View]:
        """Returns one view for each frame; ``scale`` is a factor of the image size."""
        return [View(f"frame-{i:05d}", _scaled_camera(self.cameras, i, scale)) for i in range(len(self.cameras))]


def read_camera_path(path: Path) -> CameraPath:
    """Reads a camera path as nerfstudio's viewer saves it.

    Raises:
        ConfigError: there is no such file, or it is not a camera path.
    """
    from nerfstudio.cameras.camera_paths import get_path_from_json

    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no camera path {path}: save one in the viewer's Render tab.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The camera path {path} cannot be read ({error}): save it in the viewer again.") from error
    try:
        if not meta["camera_path"] or min(meta["render_width"], meta["render_height"]) < 1:
            raise ValueError("it has no cameras, or no size")
        cameras = get_path_from_json(meta)
        if not (cameras.camera_to_worlds.isfinite().all() and cameras.fx.isfinite().all() and (cameras.fx > 0).all()):
            raise ValueError("a pose or a focal length is not a usable number")
        seconds = float(meta.get("seconds") or 0.0)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not a camera path of nerfstudio's viewer ({type(error).__name__}: {error}): "
            "save one in the viewer's Render tab."
        ) from error
    fps = len(cameras) / seconds if seconds > 0 else float(meta.get("fps") or DEFAULT_FPS)
    return CameraPath(cameras, fps, bool(meta.get("crop")))


def photo_views(photos: Photos, which: str, scale: float = 1.0) -> list[View]:
    """Returns views of photos: ``train``, ``test``, ``all``, or one by its name; ``auto`` takes the test photos, or
    those of training where none is held out.

    Raises:
        ConfigError: there are no such views.
    """
    if which == "auto":
        which = photos.splits[-1]
    if which in ("train", "test"):
        places = [(which, index) for index in range(len(photos.files(which)))]
    elif which == "all":
        places = [(split, index) for split in photos.splits for index in range(len(photos.files(split)))]
    else:
        place = photos.find_photo(which)
        if place is None:
            raise ConfigError(
                f"There are no views {which!r}: give all, train, test, the name of a photo of the capture, "
                "or a camera path of the viewer (.json)."
            )
        places = [place]
    return [
        View(name, _scaled_camera(photos.cameras(split), index, scale), (split, index))
        for name, (split, index) in zip(_view_names(photos, places), places, strict=True)
    ]


def _view_names(photos: Photos, places: Sequence[tuple[str, int]]) -> list[str]:
    """Names of photos without their suffix; photos of the same name in several folders get numbers."""
    stems = [photos.files(split)[index].stem for split, index in places]
    counts = {stem: stems.count(stem) for stem in set(stems)}
    return [
        stem if counts[stem] == 1 else f"{stem}-{split}-{index:04d}"
        for stem, (split, index) in zip(stems, places, strict=True)
    ]


def view_map(model: Queryable, head: QueryHead, cameras: Cameras, index: int) -> FeatureMap:
    """Renders a feature from a camera, see :meth:`Photos.scene_map`."""
    camera = cameras[index]
    width, height = int(camera.width.item()), int(camera.height.item())
    seen = render_map(model, head, _scaled_camera(cameras, index, min(1.0, SCENE_MAP_PX / max(width, height))))
    return replace(seen, grid=PatchGrid.covering(seen.grid.rows, seen.grid.cols, height, width))


def view_clusters(model: Queryable, head: QueryHead, cameras: Cameras) -> Float32[np.ndarray, "clusters _"]:
    """Returns the directions that a scene shows to cameras, see :func:`~f3rm_ext.query.exemplar.scene_clusters`."""
    chosen = pick_evenly(len(cameras), SCENE_PHOTOS)
    return scene_clusters([view_map(model, head, cameras, index) for index in chosen])


def _scaled_camera(cameras: Cameras, index: int, scale: float) -> Cameras:
    """A copy of one camera, on the CPU and at another image size."""
    camera = cameras[index : index + 1].to(torch.device("cpu"))
    if scale != 1.0:
        if min(int(camera.width.item()), int(camera.height.item())) * scale < 1:
            raise ConfigError(f"The scale {scale} leaves nothing of the images: use a larger one.")
        camera.rescale_output_resolution(scale)
    return camera
