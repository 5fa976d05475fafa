"""Whole images for training splats, and for evaluating them."""

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
from f3rm_ext.capture.points import keep_going_without_points, keep_usable_points
from f3rm_ext.data.config_checks import check_positive, check_scale_factor, check_window, flag
from f3rm_ext.data.eval_dataloaders import EvalLoader
from f3rm_ext.data.image_reader import MaskedPixels
from f3rm_ext.data.image_stream import ImageStream, picture_batch
from f3rm_ext.data.mixin import CyclingDataManager, FeaturedDataManager, Stream
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.engine.shortage import Lever, Loss
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.options import FeatureOptions


@dataclass
class LiftedFeatureOptions(FeatureOptions):
    """Which 2D features the splats get, and where features are kept."""

    extractors: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--pipeline.model.features"])] = ()
    """Extractors whose features are lifted onto the splats when training ends, each as NAME or
    NAME:key=value,key=value; none by default. `f3rm-ext doctor` lists the names."""


@dataclass
class ImageDataManagerConfig(FullImageDatamanagerConfig):
    """Options of :class:`ImageDataManager`."""

    _target: type = field(default_factory=lambda: ImageDataManager)
    """Class to build."""
    dataparser: AnnotatedDataParserUnion = field(default_factory=lambda: CaptureDataParserConfig(load_3D_points=True))
    """How the capture on disk is read; splats begin at its points."""
    camera_res_scale_factor: Annotated[float, tyro.conf.arg(aliases=["--resolution-scale"])] = 1.0
    """Ratio of the sizes trained and evaluated at to those of the files, (0, 1]; 0.25 for a quarter of each side."""
    features: LiftedFeatureOptions = field(default_factory=LiftedFeatureOptions)
    """The 2D features to lift onto the splats when training ends."""
    masked_pixels: MaskedPixels = "ignore"
    """What training makes of pixels that masks leave out. ignore: nothing, so fog may grow there. background: they are
    empty, over a random background (that of --pipeline.model.background-color, if it is black or white), so that an
    object comes out clean. Either way they do not count in evaluation."""
    num_downscales: int = 2
    """Training begins with images whose sides are halved this many times, 0 to 8; 0: full size from the start.
    Evaluation is at full size always."""
    resolution_schedule: int = 3000
    """Training steps after which the sides are doubled, until they are full, 1 or more."""
    train_num_images_to_sample_from: int | float = -1
    """Training images kept in memory at a time, 1 or more (at most all are taken); -1 or inf: all."""
    train_num_times_to_repeat_images: int | float = -1
    """Steps (of one image each) for which each set of training images is used before the next set, 1 or more;
    -1 or inf: for ever."""
    steps_per_coverage: int = 500
    """Steps between two records of what has been seen (TensorBoard and coverage.json), 1 or more."""

    # Options of nerfstudio's datamanagers that have no meaning here: images are kept as bytes on the CPU, and
    # evaluation reads one image at a time. nerfstudio's commands set some of them.
    masks_on_gpu: tyro.conf.Suppress[bool] = False
    images_on_gpu: tyro.conf.Suppress[bool] = False
    eval_num_images_to_sample_from: tyro.conf.Suppress[int] = -1
    eval_num_times_to_repeat_images: tyro.conf.Suppress[int] = -1
    eval_image_indices: tyro.conf.Suppress[tuple[int, ...] | None] = (0,)
    cache_images: tyro.conf.Suppress[Literal["cpu", "gpu"]] = "cpu"
    cache_images_type: tyro.conf.Suppress[Literal["uint8", "float32"]] = "uint8"
    max_thread_workers: tyro.conf.Suppress[int | None] = None
    train_cameras_sampling_strategy: tyro.conf.Suppress[Literal["random", "fps"]] = "random"
    train_cameras_sampling_seed: tyro.conf.Suppress[int] = 42
    fps_reset_every: tyro.conf.Suppress[int] = 100

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: one of them cannot work.
        """
        check_positive(self, "resolution_schedule", "steps_per_coverage")
        check_window(self, "train")
        check_scale_factor(self)
        if self.num_downscales not in range(9):
            raise ConfigError(
                f"--{flag('num_downscales')} is {self.num_downscales}, but sides can be halved 0 to 8 times."
            )

    def halvings(self, step: int) -> int:
        """How many times the sides of the images of a training step are halved.

        Args:
            step: counted from 0 over the whole run.
        """
        return max(0, self.num_downscales - step // self.resolution_schedule)


class ImageEvalLoader(EvalLoader):
    """Evaluation images in order, or one by index, each read when it is asked for and kept by no one."""

    def read(self, image_idx: int) -> dict[str, Any]:
        """See :func:`~f3rm_ext.data.image_stream.picture_batch`."""
        assert isinstance(self.input_dataset, PinholeDataset)
        return picture_batch(self.input_dataset.picture(image_idx), image_idx, self.device)


class ImageDataManager(FeaturedDataManager, CyclingDataManager, DataManager):
    """A pinhole camera and its whole image at every step, and the same for evaluation.

    Nothing but the present window of images (and the next one, loaded in the background) is in memory, as bytes on
    the CPU, and nothing is loaded before the first step. It has no parameters, buffers or state that training would
    have to save other than :meth:`cycle_state`.
    """

    config: ImageDataManagerConfig
    train_dataset: PinholeDataset
    eval_dataset: PinholeDataset | None
    train_stream: ImageStream | None = None
    fixed_indices_eval_dataloader: ImageEvalLoader
    eval_dataloader: ImageEvalLoader
    """The same; nerfstudio's renderer asks it for a camera to start from."""

    def __init__(
        self,
        config: ImageDataManagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        """Reads the capture; opens no image that the dataparser does not open.

        Raises:
            UserError: the capture or an option cannot be used.
        """
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
        keep_going_without_points(self.dataparser)
        if test_mode == "inference":
            self.dataparser.downscale_factor = 1  # type: ignore[attr-defined]  # images may be absent
        self.includes_time = self.dataparser.includes_time
        self.train_dataparser_outputs: DataparserOutputs = self.dataparser.get_dataparser_outputs(split="train")
        self.check_train_outputs(self.train_dataparser_outputs)
        keep_usable_points(self.train_dataparser_outputs.metadata)
        self.train_dataset = self._dataset(self.train_dataparser_outputs)
        # Where models without points of the capture look for a place to begin.
        self.train_dataset.metadata["cameras"] = self.train_dataset.cameras
        self.note_masked_pixels(self.train_dataset)
        outputs = self.eval_outputs()
        self.eval_dataset = None if outputs is None else self._dataset(outputs)
        self.fixed_indices_eval_dataloader = self.eval_dataloader = ImageEvalLoader(
            self.eval_dataset,
            device,
            self.eval_feature_source,
            required=test_mode == "test",
        )
        super().__init__()

    def setup_train(self) -> None:
        """Prepares features (in training only) and the cycle; loads no image."""
        self.train_feature_source()
        cycle = self.make_cycle("train", len(self.train_dataset))
        masked = self.config.masked_pixels
        self.train_stream = ImageStream(self.train_dataset, cycle, device=self.device, masked=masked)
        if self.test_mode == "val":
            self.log_window(cycle)
            self._log_size()

    def setup_eval(self) -> None:
        """Nothing to do: images are read when they are asked for."""

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """The camera (shape 1) and the batch of the next image, at the resolution of the step.

        The batch has what :func:`~f3rm_ext.data.image_stream.picture_batch` says, on the device. The camera's
        metadata has ``cam_idx``, the image's index.

        Args:
            step: counted from 0 over the whole run; decides the resolution, nothing else.
        """
        assert self.train_stream is not None
        self.train_count += 1
        return self.train_stream.next(self.config.halvings(step))

    def next_eval(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """A random evaluation image, as :meth:`next_eval_image`."""
        return self.next_eval_image(step)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """A random evaluation image at full resolution: its camera, and its batch with ``camera`` in it.

        Raises:
            CaptureError: there are no evaluation images.
        """
        self.eval_count += 1
        return self.eval_dataloader.get_camera(0 if self.eval_dataset is None else self.draw_eval_image())

    def get_param_groups(self) -> dict[str, list[Parameter]]:
        """None: there is nothing to train."""
        return {}

    def memory_levers(self) -> list[Lever]:
        """Options that lower what a training step takes."""
        on_cpu = torch.device(self.device).type == "cpu"  # Images are kept there.
        return [*(self.window_levers(len(self.train_dataset), Loss.NOTHING) if on_cpu else ()), self.scale_lever()]

    def get_datapath(self) -> Path:
        """Where the capture is."""
        return Path(self.config.dataparser.data)

    def get_train_rays_per_batch(self) -> int:
        """Pixels of the image of the last training step."""
        if self.train_stream is not None:
            return self.train_stream.pixels_per_batch
        return int(self.train_dataset.cameras.height[0]) * int(self.train_dataset.cameras.width[0])

    def get_eval_rays_per_batch(self) -> int:
        """Pixels of the first evaluation image."""
        if self.eval_dataset is None:
            return 0
        return int(self.eval_dataset.cameras.height[0]) * int(self.eval_dataset.cameras.width[0])

    def streams(self) -> dict[str, Stream]:
        """The stream of training images, once it is set up."""
        return {} if self.train_stream is None else {"train": self.train_stream}

    def _dataset(self, outputs: DataparserOutputs) -> PinholeDataset:
        return PinholeDataset(outputs, self.config.camera_res_scale_factor)

    def _log_size(self) -> None:
        cameras = self.train_dataset.cameras
        changed = sum(not lens.is_pinhole for lens in self.train_dataset.lenses)
        if self.rank == 0:
            mean_mib = float((cameras.height * cameras.width).float().mean()) * 3 / 2**20
            undone = f", lens distortion undone in {changed} of them" if changed else ""
            CONSOLE.log(f"Training images: {len(self.train_dataset)} of {mean_mib:.2f} MiB on average{undone}.")
