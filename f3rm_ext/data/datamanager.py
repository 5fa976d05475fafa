"""Rays, colours and 2D features for training and evaluation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.data.pixel_samplers import PixelSamplerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.points import RGB, XYZ
from f3rm_ext.data.cycling_config import CyclingConfig, flag
from f3rm_ext.data.eval_dataloaders import EvalLoader
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.mixin import CyclingDataManager
from f3rm_ext.data.photo_dataset import PhotoDataset
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.ray_generators import make_ray_generator
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.data.stereo.surfaces import RayDepths, measure_ray_depths
from f3rm_ext.data.window_stream import WindowStream
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState, halve
from f3rm_ext.utils.ranges import Count, Range

_FEWEST_RAYS, _SMALLEST_FRACTION = 64, 0.05
"""The fewest rays per batch, and the smallest fraction of them with features, that memory_options suggests."""


@dataclass
class F3rmDataManagerConfig(CyclingConfig, VanillaDataManagerConfig):
    """Options of :class:`F3rmDataManager`."""

    takes_whole_images: ClassVar[bool] = False
    _target: type = field(default_factory=lambda: F3rmDataManager)
    """Class to build."""
    dataparser: AnnotatedDataParserUnion = field(default_factory=CaptureDataParserConfig)
    """Dataparser of the capture."""
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """The 2D features to distil."""
    feature_ray_fraction: Annotated[float, Range(0, 1, above=True)] = 0.5
    """Share of each batch's rays with feature targets, above 0 to 1. All rays train colour."""
    train_num_rays_per_batch: Count = 4096
    """Rays per training step, at least 1. ray-batch-scope tells what this means with several GPUs."""
    eval_num_rays_per_batch: Count = 4096
    """Rays per evaluation step during training, at least 1."""
    eval_num_images_to_sample_from: int | float = -1
    """Number of evaluation images in memory at a time, at least 1. -1 or inf keeps all; if they would take more than an
    eighth of the main memory, some pixels of all."""
    eval_num_times_to_repeat_images: int | float = -1
    """Evaluation steps with a set of images before the next is loaded, at least 1. -1 or inf never loads another."""
    images_on_gpu: bool = True
    """Keep the training images and their features on the GPU if they fit into a quarter of its free memory. Otherwise
    they stay in main memory, and batches are copied ahead. Both train alike."""
    ray_batch_scope: Literal["global", "per-device"] = "global"
    """Meaning of the rays per step with several GPUs: global divides them among the GPUs, per-device gives each GPU
    that many, as nerfstudio does."""

    # Options of nerfstudio's datamanager that have no meaning here.
    masks_on_gpu: tyro.conf.Suppress[bool] = False
    patch_size: tyro.conf.Suppress[Annotated[int, Range(1, 1)]] = 1
    pixel_sampler: tyro.conf.Suppress[PixelSamplerConfig] = field(default_factory=PixelSamplerConfig)
    eval_image_indices: tyro.conf.Suppress[tuple[int, ...] | None] = (0,)

    def __post_init__(self) -> None:
        """Raises ConfigError if an option is out of range."""
        VanillaDataManagerConfig.__post_init__(self)
        super().__post_init__()

    def rays_of_process(self, world_size: int, rank: int) -> int:
        """Returns the rays per training batch of one process. Raises ConfigError if there are fewer rays than
        processes."""
        rays = self.train_num_rays_per_batch
        if self.ray_batch_scope == "per-device":
            return rays
        if rays < world_size:
            raise ConfigError(
                f"--{flag('train_num_rays_per_batch')} is {rays}, too few to be divided over {world_size} GPUs: "
                f"give at least {world_size}, or use --{flag('ray_batch_scope')} per-device."
            )
        return rays // world_size + (1 if rank < rays % world_size else 0)

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        """Returns the options that lower the memory of a training step."""
        on_cpu = state.device_type == "cpu"
        options: list[MemoryOption] = []
        if state.images_on_device:
            options.append(MemoryOption(QualityImpact.NONE, flag("images_on_gpu"), "True", "False"))
        if on_cpu:  # Images are kept there.
            options += self.window_options(state, QualityImpact.NOISE)
        options += halve(
            QualityImpact.NOISE, flag("train_num_rays_per_batch"), self.train_num_rays_per_batch, _FEWEST_RAYS
        )
        if self.features.extractors and self.feature_ray_fraction > _SMALLEST_FRACTION:
            fraction = self.feature_ray_fraction
            options.append(MemoryOption(QualityImpact.NOISE, flag("feature_ray_fraction"), fraction, fraction / 2))
        return [*options, *self.scale_options()] if on_cpu else options


def _reach_factor(views: PinholeCameras, depth: float | None, measure_depths: Callable[[], RayDepths | None]) -> float:
    """Returns the scene's extent in extents of its cameras, 1 or more, and says so if it is more. Its depth is that of
    stereo where none is given."""
    if depth is None:
        depths = measure_depths()
        depth = 0.0 if depths is None else depths.median()
    factor = views.extent(depth) / views.extent()
    if factor > 1:
        CONSOLE.log(
            f"The cameras stand close together: the scene reaches {factor:.2g} times as far as they do, which auto "
            "takes as --pipeline.model.contraction-radius."
        )
    return factor


class F3rmDataManager(CyclingDataManager, VanillaDataManager[PhotoDataset]):
    """Batches of rays with colours and features, and whole images for evaluation.

    Only the present window of images is in memory, and the next one while it is loaded in the background. On a GPU the
    present one is kept there while it fits. Nothing is loaded before the first batch. There are no parameters or
    buffers; :meth:`cycle_state` is all there is to save.
    """

    config: F3rmDataManagerConfig
    eval_dataset: PhotoDataset | None  # type: ignore[assignment]
    train_pixel_sampler: PixelStream | None = None  # type: ignore[assignment]
    eval_pixel_sampler: PixelStream | None = None  # type: ignore[assignment]
    fixed_indices_eval_dataloader: EvalLoader
    eval_dataloader: EvalLoader

    def __init__(
        self,
        config: F3rmDataManagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        """Reads the capture and, in training (``test_mode`` "val"), prepares the features. Raises UserError if the
        capture, the features or an option cannot be used."""
        self.take_place(local_rank)
        if hasattr(config.dataparser, "load_3D_points"):
            # Fields look at no points, but in training at how far they are.
            read = test_mode == "val" and isinstance(config.dataparser, CaptureDataParserConfig)
            config.dataparser.load_3D_points = read  # type: ignore[attr-defined]
        self.eval_dataloader = EvalLoader(None, "cpu", lambda: None, required=test_mode == "test")
        self.fixed_indices_eval_dataloader = self.eval_dataloader
        super().__init__(
            config=config, device=device, test_mode=test_mode, world_size=world_size, local_rank=local_rank, **kwargs
        )

    def create_train_dataset(self) -> PhotoDataset:
        """The training images. Raises CaptureError or ConfigError if they cannot be used."""
        self.check_train_outputs(self.train_dataparser_outputs)
        self.image_scale = self.resolve_scale()
        metadata = self.train_dataparser_outputs.metadata
        points = metadata.pop(XYZ, None)
        metadata.pop(RGB, None)
        dataset = super().create_train_dataset()
        self.note_masked_pixels(dataset)
        self.note_colors(dataset, dataset)
        if self.test_mode == "val":
            dataset.metadata["camera_reach"] = float(dataset.cameras.camera_to_worlds[:, :3, 3].abs().max())
            measure = functools.cache(functools.partial(measure_ray_depths, self.train_dataparser_outputs))
            dataset.metadata["measure_ray_depths"] = measure
            views = PinholeCameras.of(dataset.cameras)
            depth = None if points is None or not len(points) else views.median_depth(points)
            dataset.metadata["measure_reach_factor"] = functools.cache(lambda: _reach_factor(views, depth, measure))
        return dataset

    def create_eval_dataset(self) -> PhotoDataset | None:  # type: ignore[override]
        """The evaluation images, or None if the capture has none."""
        outputs = self.eval_outputs()
        return None if outputs is None else self.dataset_type(outputs, self.image_scale)

    def setup_train(self) -> None:
        """Prepares the image cycle and, in training, the features. Loads no image."""
        config = self.config
        rays = config.rays_of_process(self.world_size, self.rank)
        if self.test_mode == "val":
            features = self.train_feature_source()
            self.train_dataset.metadata["feature_specs"] = () if features is None else tuple(features.specs)
            self.train_dataset.metadata["feature_ray_fraction"] = config.feature_ray_fraction
        source = None if self._sources is None else self._sources[0]
        cycle, stride = self.make_cycle("train", self.train_dataset, source)
        what = "Training images" if self._sources is None else "Training images and their features"
        divided = self.world_size > 1 and config.ray_batch_scope == "global"
        self.train_pixel_sampler = PixelStream(
            self.train_dataset,
            cycle,
            num_rays=rays,
            split="train",
            device=self.device,
            placement=self.make_placement("images_on_gpu", wanted=config.images_on_gpu, off="False", what=what),
            source=source,
            feature_ray_fraction=config.feature_ray_fraction,
            masked=self.masked_pixels,
            stride=stride,
            divided_rays=config.train_num_rays_per_batch if divided else None,
        )
        self.train_ray_generator = make_ray_generator(self.train_dataset.cameras, self.device)
        if self.test_mode == "val":
            self._log_setup(cycle, stride, rays)

    def setup_eval(self) -> None:
        """Sets up evaluation. Loads no image."""
        dataset = self.eval_dataset
        assert dataset is not None
        source = None if self._sources is None else self._sources[-1]
        cycle, stride = self.make_cycle("eval", dataset, source)
        self.eval_pixel_sampler = PixelStream(
            dataset,
            cycle,
            num_rays=self.config.eval_num_rays_per_batch,  # undivided, as one process evaluates
            split="eval",
            device=self.device,
            source=source,
            feature_ray_fraction=self.config.feature_ray_fraction,
            stride=stride,
            placement=self.make_placement("images_on_gpu", wanted=False, off="False", log=False),
        )
        self.eval_ray_generator = make_ray_generator(dataset.cameras, self.device)
        self.eval_dataloader = EvalLoader(dataset, self.device, self.eval_feature_source)
        self.fixed_indices_eval_dataloader = self.eval_dataloader

    def next_train(self, step: int) -> tuple[RayBundle, dict[str, Any]]:
        """Returns rays, and ``image``, ``indices`` and (in training) ``features``, see :meth:`PixelStream.next`."""
        assert self.train_pixel_sampler is not None
        self.train_count += 1
        batch = self.train_pixel_sampler.next()
        return self.train_ray_generator(batch["indices"]), batch

    def next_eval(self, step: int) -> tuple[RayBundle, dict[str, Any]]:
        """Returns rays and a batch of the evaluation images, see :meth:`next_train`."""
        assert self.eval_pixel_sampler is not None
        self.eval_count += 1
        batch = self.eval_pixel_sampler.next()
        return self.eval_ray_generator(batch["indices"]), batch

    def get_train_rays_per_batch(self) -> int:
        """Number of rays per training step of this process."""
        stream = self.train_pixel_sampler
        return self.config.train_num_rays_per_batch if stream is None else stream.num_rays_per_batch

    def get_eval_rays_per_batch(self) -> int:
        """Number of rays per evaluation step of this process."""
        stream = self.eval_pixel_sampler
        return self.config.eval_num_rays_per_batch if stream is None else stream.num_rays_per_batch

    def streams(self) -> dict[str, WindowStream]:
        """The streams that are set up, by split."""
        both = {"train": self.train_pixel_sampler, "eval": self.eval_pixel_sampler}
        return {split: stream for split, stream in both.items() if stream is not None}

    def _log_setup(self, cycle: ImageCycle, stride: int, rays: int) -> None:
        if self.rank != 0:
            return
        given = self.config.train_num_rays_per_batch
        if self.world_size > 1 and self.config.ray_batch_scope == "per-device":
            CONSOLE.log(
                f"Global batch: {given * self.world_size} rays ({self.world_size} GPUs x {given}); with Adam, consider "
                f"learning rates {self.world_size**0.5:.2f} times as large as for one GPU."
            )
        elif self.world_size > 1:
            CONSOLE.log(
                f"Global batch: {given} rays (about {rays} on each of {self.world_size} GPUs); "
                "learning rates stay as for one GPU."
            )
        self.log_window(cycle, stride)
