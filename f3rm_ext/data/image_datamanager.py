"""Whole images for training splats, and for evaluating them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.base_datamanager import DataManager
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE
from torch.nn import Parameter

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.points import drop_unusable_points, tolerate_unreadable_points
from f3rm_ext.data.cycling_config import CyclingConfig, flag
from f3rm_ext.data.eval_dataloaders import EvalLoader
from f3rm_ext.data.image_stream import ImageStream, picture_batch
from f3rm_ext.data.mixin import CyclingDataManager
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.data.stereo.points import add_dense_points
from f3rm_ext.data.window_stream import WindowStream
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.store.feature_store import cache_root
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState
from f3rm_ext.utils.ranges import Count, Range

SMALL_SIDE_PX = 64
"""Longer side of the images with which a run that knows no surface begins, at most."""
SMALL_STEPS = 200
"""Steps of each of its sizes, at most."""
SMALL_SHARE = 0.6
"""Share of the run after which its images are of full size, at most."""
FULL_SIZE = (0, 1)
"""Start of a run that does not begin with tiny images: halvings of image sides, and steps until the sides double."""


@dataclass
class LiftedFeatureOptions(FeatureOptions):
    """Options of the 2D features that are lifted onto the splats."""

    extractors: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--pipeline.model.features"])] = ()
    """Extractors whose features are lifted onto the splats when training ends, each as NAME or
    NAME:key=value,key=value; none by default. `f3rm-ext doctor` lists the names."""


@dataclass
class ImageDataManagerConfig(CyclingConfig, FullImageDatamanagerConfig):
    """Options of :class:`ImageDataManager`."""

    _target: type = field(default_factory=lambda: ImageDataManager)
    """Class to build."""
    dataparser: AnnotatedDataParserUnion = field(default_factory=lambda: CaptureDataParserConfig(load_3D_points=True))
    """Dataparser of the capture, whose 3D points are the initial points of splats."""
    features: LiftedFeatureOptions = field(default_factory=LiftedFeatureOptions)
    """The 2D features to lift onto the splats when training ends."""
    stereo_points: Annotated[DenseMode, tyro.conf.arg(aliases=["--dense-points"])] = "auto"
    """Initial points of splats from stereo between the photos. auto fills a capture with fewer than 20,000 points up to
    that number, and adds 10,000 at least; always adds 20,000 to the capture's own; never adds none. They are computed
    once per capture and kept in the cache."""
    num_downscales: Annotated[int, Range(0, 8)] = 2
    """Number of times that image sides are halved at the start of training, 0 to 8; 0 trains at full size from the
    start. Splats with random initial points start with sides of at most 64 px, except with 0. Evaluation always uses
    the full size."""
    resolution_schedule: Count = 3000
    """Training steps after which image sides are doubled, up to full size, at least 1; in short runs a fifth of the run
    at most."""
    cache_images: Literal["cpu", "gpu"] = "gpu"
    """Memory that holds the training images. gpu keeps them on the GPU if they fit into a quarter of its free memory.
    cpu keeps them in main memory and copies the next image ahead. Both train alike."""

    # Options of nerfstudio's datamanagers that have no effect here: images are kept as bytes, and evaluation reads one
    # image at a time. The commands of nerfstudio set some of them.
    masks_on_gpu: tyro.conf.Suppress[bool] = False
    images_on_gpu: tyro.conf.Suppress[bool] = False
    eval_num_images_to_sample_from: tyro.conf.Suppress[int] = -1
    eval_num_times_to_repeat_images: tyro.conf.Suppress[int] = -1
    eval_image_indices: tyro.conf.Suppress[tuple[int, ...] | None] = (0,)
    cache_images_type: tyro.conf.Suppress[Literal["uint8", "float32"]] = "uint8"
    max_thread_workers: tyro.conf.Suppress[int | None] = None
    train_cameras_sampling_strategy: tyro.conf.Suppress[Literal["random", "fps"]] = "random"
    train_cameras_sampling_seed: tyro.conf.Suppress[int] = 42
    fps_reset_every: tyro.conf.Suppress[int] = 100

    def fit(self, num_steps: int) -> None:
        """Has short runs, too, see the photos at full size."""
        self.resolution_schedule = max(1, min(self.resolution_schedule, num_steps // 5))

    def small_start(self, longest_px: int, num_steps: int) -> tuple[int, int]:
        """Returns the number of halvings with which a run that knows no surface begins, and the steps after which the
        sides double; see :meth:`ImageDataManager.begin_small`.

        Args:
            longest_px: longest side of all images.
        """
        if not self.num_downscales:
            return FULL_SIZE
        levels = max(0, math.ceil(math.log2(longest_px / SMALL_SIDE_PX)))
        return levels, max(1, min(SMALL_STEPS, int(SMALL_SHARE * num_steps / max(levels, 1))))

    def halvings(self, step: int, small: tuple[int, int] = FULL_SIZE) -> int:
        """Number of times that image sides are halved at a step of the whole run, counted from 0.

        Args:
            small: what :meth:`small_start` returned for the run, if it began so.
        """
        levels, steps = small
        return max(0, self.num_downscales - step // self.resolution_schedule, levels - step // steps)

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        """Returns the options that lower the memory of a training step."""
        options: list[MemoryOption] = []
        if state.images_on_device:
            options.append(MemoryOption(QualityImpact.NONE, flag("cache_images"), "gpu", "cpu"))
        if state.device_type == "cpu":  # Images are kept there.
            options += self.window_options(state, QualityImpact.NONE)
        return [*options, *self.scale_options()]


class ImageEvalLoader(EvalLoader):
    """Evaluation images in order, or one by index. Each is read when needed and not kept."""

    def read(self, image_idx: int) -> dict[str, Any]:
        """See :func:`~f3rm_ext.data.image_stream.picture_batch`."""
        assert isinstance(self.input_dataset, PinholeDataset)
        return picture_batch(self.input_dataset.picture(image_idx), image_idx, self.device)


class ImageDataManager(CyclingDataManager, DataManager):
    """A pinhole camera and its whole image at every step, in training and evaluation.

    Only the present window of images is in memory, as bytes, and the next one while it is loaded in the background. On
    a GPU the images of the present one are kept there while they fit. Nothing is loaded before the first step. There
    are no parameters or buffers; :meth:`cycle_state` is all there is to save.
    """

    config: ImageDataManagerConfig
    train_dataset: PinholeDataset
    eval_dataset: PinholeDataset | None
    train_stream: ImageStream | None = None
    small_start: tuple[int, int] = FULL_SIZE
    """Number of halvings of image sides at the first step, and steps after which the sides double."""
    fixed_indices_eval_dataloader: ImageEvalLoader
    eval_dataloader: ImageEvalLoader
    """The same loader; nerfstudio's renderer takes its first camera from it."""

    def __init__(
        self,
        config: ImageDataManagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        """Reads the capture. Opens no image beyond those the dataparser opens. Raises UserError if the capture or an
        option cannot be used."""
        self.config = config
        self.device = device
        self.world_size, self.local_rank = world_size, local_rank
        self.take_place(local_rank)
        self.test_mode = test_mode
        self.test_split = "test" if test_mode in ("test", "inference") else "val"
        if config.data is not None:
            config.dataparser.data = Path(config.data)
        else:
            config.data = config.dataparser.data
        self.dataparser = config.dataparser.setup()
        tolerate_unreadable_points(self.dataparser)
        if test_mode == "inference":
            self.dataparser.downscale_factor = 1  # type: ignore[attr-defined]  # images may be absent
        self.includes_time = self.dataparser.includes_time
        self.train_dataparser_outputs: DataparserOutputs = self.dataparser.get_dataparser_outputs(split="train")
        self.check_train_outputs(self.train_dataparser_outputs)
        self.image_scale = self.resolve_scale()
        drop_unusable_points(self.train_dataparser_outputs.metadata)
        if test_mode == "val":
            cache = cache_root(config.features.cache_dir, "points")
            add_dense_points(self.train_dataparser_outputs, cache, config.stereo_points)
        self.train_dataset = PinholeDataset(self.train_dataparser_outputs, self.image_scale)
        # Models start here if the capture has no 3D points.
        self.train_dataset.metadata["cameras"] = self.train_dataset.cameras
        self.note_masked_pixels(self.train_dataset)
        self.note_colors(self.train_dataset, self.train_dataset.photos)
        outputs = self.eval_outputs()
        self.eval_dataset = None if outputs is None else PinholeDataset(outputs, self.image_scale)
        self.fixed_indices_eval_dataloader = self.eval_dataloader = ImageEvalLoader(
            self.eval_dataset,
            device,
            self.eval_feature_source,
            required=test_mode == "test",
        )
        super().__init__()

    def setup_train(self) -> None:
        """Prepares the image cycle and, in training, the features. Loads no image."""
        self.train_feature_source()
        cycle, _ = self.make_cycle("train", self.train_dataset)
        self.train_stream = ImageStream(
            self.train_dataset,
            cycle,
            device=self.device,
            masked=self.masked_pixels,
            placement=self.make_placement("cache_images", wanted=self.config.cache_images == "gpu", off="cpu"),
        )
        if self.test_mode == "val":
            self.log_window(cycle)
            self._log_size()

    def begin_small(self, steps: int) -> None:
        """Begins with tiny images, whose sides double every few steps; not with num-downscales 0.

        Gaussians at random places turn to fog before the cameras, from which runs at larger sizes do not recover: a
        pixel of a tiny image sees enough of the scene to tell on which side of a Gaussian its surface is.
        """
        cameras = self.train_dataset.cameras
        self.small_start = self.config.small_start(int(torch.maximum(cameras.width, cameras.height).max()), steps)

    def cycle_state(self) -> dict[str, Any]:
        """See the base; also the sizes with which the run began."""
        return {**super().cycle_state(), "small_start": list(self.small_start)}

    def load_cycle_state(self, state: Mapping[str, Any]) -> None:
        """See the base."""
        levels, steps = state.get("small_start", self.small_start)
        self.small_start = int(levels), int(steps)
        super().load_cycle_state(state)

    def setup_eval(self) -> None:
        """Does nothing: images are read when they are needed."""

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Returns the camera (shape 1) and the batch of the next image, at the resolution of the step of the whole run.

        The batch is that of :func:`~f3rm_ext.data.image_stream.picture_batch`, on the device. The camera's metadata has
        ``cam_idx``, the index of the image.
        """
        assert self.train_stream is not None
        self.train_count += 1
        return self.train_stream.next(self.config.halvings(step, self.small_start))

    def train_photo(self, image_idx: int) -> dict[str, Any] | None:
        """Returns the batch of a training image at the resolution of the last one; None unless it is in memory."""
        return None if self.train_stream is None else self.train_stream.photo(image_idx)

    def next_eval(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Returns a random evaluation image, see :meth:`next_eval_image`."""
        return self.next_eval_image(step)

    def get_param_groups(self) -> dict[str, list[Parameter]]:
        """Returns no groups: there is nothing to train."""
        return {}

    def get_datapath(self) -> Path:
        """Path of the capture."""
        return Path(self.config.dataparser.data)

    def get_train_rays_per_batch(self) -> int:
        """Number of pixels of the last training image."""
        if self.train_stream is not None:
            return self.train_stream.pixels_per_batch
        return int(self.train_dataset.cameras.height[0]) * int(self.train_dataset.cameras.width[0])

    def get_eval_rays_per_batch(self) -> int:
        """Number of pixels of the first evaluation image."""
        if self.eval_dataset is None:
            return 0
        return int(self.eval_dataset.cameras.height[0]) * int(self.eval_dataset.cameras.width[0])

    def streams(self) -> dict[str, WindowStream]:
        """The stream of training images, once it is set up."""
        return {} if self.train_stream is None else {"train": self.train_stream}

    def _log_size(self) -> None:
        cameras = self.train_dataset.cameras
        changed = sum(not lens.is_pinhole for lens in self.train_dataset.lenses)
        if self.rank == 0:
            mean_mib = float((cameras.height * cameras.width).float().mean()) * 3 / 2**20
            undone = f", lens distortion undone in {changed} of them" if changed else ""
            CONSOLE.log(f"Training images: {len(self.train_dataset)} of {mean_mib:.2f} MiB on average{undone}.")
            if self.world_size > 1:
                CONSOLE.log(
                    f"Batch: {self.world_size} images a step, one on each GPU; steps and rates are not changed."
                )
