"""Rays, colours and 2D features for training and evaluation."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.pixel_samplers import PixelSamplerConfig
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.utils import comms, writer
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.capture.checks import check_dataparser_outputs
from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data.eval_loading import EvalLoader, RandomEvalLoader
from f3rm_ext.data.rays import make_ray_generator
from f3rm_ext.data.stream import MapSource, PixelStream
from f3rm_ext.data.windows import WindowCycle, parse_count
from f3rm_ext.errors import ConfigError, UserError
from f3rm_ext.features.options import FeatureOptions

if TYPE_CHECKING:
    from f3rm_ext.query.during_eval import EvalQueries

STATE_VERSION = 1


@dataclass
class F3rmDataManagerConfig(VanillaDataManagerConfig):
    """Options of :class:`F3rmDataManager`."""

    _target: type = field(default_factory=lambda: F3rmDataManager)
    """Class to build."""
    dataparser: AnnotatedDataParserUnion = field(default_factory=CaptureDataParserConfig)
    """How the capture on disk is read."""
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """The 2D features to distil."""
    feature_ray_fraction: float = 0.5
    """Part of each batch's rays that get feature targets, (0, 1]. All rays train colour."""
    train_num_rays_per_batch: int = 4096
    """Rays per training step, 1 or more; see ray-batch-scope for what it means with several GPUs."""
    train_num_images_to_sample_from: int | float = -1
    """Training images kept in memory at a time, 1 to the number of training images; -1 or inf: all."""
    train_num_times_to_repeat_images: int | float = -1
    """Steps for which each set of training images is used before the next set, 1 or more; -1 or inf: for ever."""
    eval_num_rays_per_batch: int = 4096
    """Rays per evaluation step during training, 1 or more."""
    eval_num_images_to_sample_from: int | float = -1
    """Evaluation images kept in memory at a time, 1 or more (at most all are taken); -1 or inf: all."""
    eval_num_times_to_repeat_images: int | float = -1
    """Evaluation steps for which each set of images is used, 1 or more; -1 or inf: for ever."""
    ray_batch_scope: Literal["global", "per-device"] = "global"
    """global: the rays per batch are divided over the GPUs. per-device: every GPU takes that many."""
    steps_per_coverage: int = 500
    """Steps between two records of what has been seen (TensorBoard and coverage.json), 1 or more."""

    # Options of nerfstudio's datamanager that have no meaning here.
    patch_size: tyro.conf.Suppress[int] = 1
    pixel_sampler: tyro.conf.Suppress[PixelSamplerConfig] = field(default_factory=PixelSamplerConfig)
    eval_image_indices: tyro.conf.Suppress[tuple[int, ...] | None] = (0,)

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: one of them cannot work.
        """
        super().__post_init__()
        for option in ("train_num_rays_per_batch", "eval_num_rays_per_batch", "steps_per_coverage"):
            value = getattr(self, option)
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ConfigError(f"--{_flag(option)} is {value}, but it has to be a whole number from 1 up.")
        for split in ("train", "eval"):
            for option, unit in (
                (f"{split}_num_images_to_sample_from", "images"),
                (f"{split}_num_times_to_repeat_images", "steps"),
            ):
                parse_count(getattr(self, option), _flag(option), unit=unit)
        if not 0 < self.feature_ray_fraction <= 1:
            raise ConfigError(
                f"--{_flag('feature_ray_fraction')} is {self.feature_ray_fraction}, outside (0, 1]: "
                "to train without features give no extractors instead."
            )
        if self.patch_size != 1:
            raise ConfigError(f"patch_size is {self.patch_size}, but only single pixels (1) can be sampled.")
        if not 0 < self.camera_res_scale_factor <= 1:
            raise ConfigError(
                f"--{_flag('camera_res_scale_factor')} is {self.camera_res_scale_factor}, outside (0, 1]: "
                "give 1 for full size, 0.5 for half."
            )


class F3rmDataManager(VanillaDataManager[InputDataset]):
    """Batches of rays with colours and features, and whole images for evaluation.

    Nothing but the present window of images (and the next one, loaded in the background) is in memory, and nothing is
    loaded before the first batch is asked for. It has no parameters, buffers or state that training would have to
    save other than :meth:`cycle_state`.
    """

    config: F3rmDataManagerConfig
    eval_dataset: InputDataset | None  # type: ignore[assignment]
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
        """Reads the capture and, in training (``test_mode`` "val"), prepares the features.

        Raises:
            UserError: the capture, the features or an option cannot be used.
        """
        self.rank = comms.get_rank() if comms.is_dist_avail_and_initialized() else local_rank
        # nerfstudio seeds each process with the machine's seed plus its rank.
        self.seed = torch.initial_seed() - self.rank
        self.eval_images_drawn = 0
        self._sources: list[MapSource] | None = None
        self._sources_failed = False
        self._eval_queries: tuple[EvalQueries | None] | None = None
        self.fixed_indices_eval_dataloader = self._empty_loader(test_mode)
        self.eval_dataloader = self._empty_loader(test_mode)
        super().__init__(
            config=config, device=device, test_mode=test_mode, world_size=world_size, local_rank=local_rank, **kwargs
        )

    def create_train_dataset(self) -> InputDataset:
        """The training images.

        Raises:
            CaptureError: they cannot be used.
        """
        check_dataparser_outputs(self.train_dataparser_outputs, check_files=self.test_mode != "inference", min_images=2)
        return _own_exclusions(super().create_train_dataset())

    def create_eval_dataset(self) -> InputDataset | None:  # type: ignore[override]
        """The evaluation images, None if there are none."""
        try:
            outputs = self.dataparser.get_dataparser_outputs(split=self.test_split)
        except FileNotFoundError as error:
            if self.test_mode != "val":
                raise
            CONSOLE.log(f"No evaluation images: {error}", markup=False)
            return None
        if not outputs.image_filenames:
            CONSOLE.log(f"The capture has no {self.test_split} images: going on without evaluation.", markup=False)
            return None
        check_dataparser_outputs(outputs, check_files=self.test_mode != "inference", min_images=1)
        return _own_exclusions(
            self.dataset_type(dataparser_outputs=outputs, scale_factor=self.config.camera_res_scale_factor)
        )

    def setup_train(self) -> None:
        """Prepares features (in training only) and the cycle; loads no image."""
        rays = self._rays_of_this_process(self.config.train_num_rays_per_batch, "train_num_rays_per_batch")
        cycle = self._cycle("train", len(self.train_dataset))
        if self.test_mode == "val":
            self._prepare_training_features()
        self.train_pixel_sampler = self._stream(
            "train", self.train_dataset, cycle, rays, None if self._sources is None else self._sources[0]
        )
        self.train_ray_generator = make_ray_generator(self.train_dataset.cameras, self.device)
        if self.test_mode == "val":
            self._log_setup(cycle, rays)

    def setup_eval(self) -> None:
        """Sets up evaluation; loads no image."""
        dataset = self.eval_dataset
        assert dataset is not None
        rays = self._rays_of_this_process(self.config.eval_num_rays_per_batch, "eval_num_rays_per_batch")
        cycle = self._cycle("eval", len(dataset))
        self.eval_pixel_sampler = self._stream(
            "eval", dataset, cycle, rays, None if self._sources is None else self._sources[-1]
        )
        self.eval_ray_generator = make_ray_generator(dataset.cameras, self.device)
        self.fixed_indices_eval_dataloader = EvalLoader(
            dataset, self.device, self.eval_feature_source, queries=self.eval_queries
        )
        self.eval_dataloader = RandomEvalLoader(dataset, self.device, self.eval_feature_source, self._draw_eval_image)

    def next_train(self, step: int) -> tuple[RayBundle, dict[str, Any]]:
        """Rays, and ``image``, ``indices`` and (in training) ``features``, see :meth:`PixelStream.next`."""
        assert self.train_pixel_sampler is not None
        self.train_count += 1
        batch = self.train_pixel_sampler.next()
        return self.train_ray_generator(batch["indices"]), batch

    def next_eval(self, step: int) -> tuple[RayBundle, dict[str, Any]]:
        """The same from the evaluation images."""
        assert self.eval_pixel_sampler is not None
        self.eval_count += 1
        batch = self.eval_pixel_sampler.next()
        return self.eval_ray_generator(batch["indices"]), batch

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """A random evaluation image: its camera, and ``image``, ``image_idx``, ``camera``, ``feature_maps``."""
        return next(iter(self.eval_dataloader))

    def get_train_rays_per_batch(self) -> int:
        """Rays per training step of this process."""
        if self.train_pixel_sampler is not None:
            return self.train_pixel_sampler.num_rays_per_batch
        return self.config.train_num_rays_per_batch

    def get_eval_rays_per_batch(self) -> int:
        """Rays per evaluation step of this process."""
        if self.eval_pixel_sampler is not None:
            return self.eval_pixel_sampler.num_rays_per_batch
        return self.config.eval_num_rays_per_batch

    def cycle_state(self) -> dict[str, Any]:
        """Where the image cycles and pixel draws are: numbers, lists and small tensors, for the checkpoint."""
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "seed": self.seed,
            "eval_images_drawn": self.eval_images_drawn,
        }
        for split, stream in self._streams().items():
            state[split] = stream.state()
        return state

    def load_cycle_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`cycle_state` was taken, so that the same windows and pixels follow.

        A state of other images is not used; a line in the log says so.
        """
        if not state:
            return
        if state.get("version") != STATE_VERSION:
            CONSOLE.log("The image cycle of this checkpoint is of another version: starting a new one.")
            return
        self.seed = int(state["seed"])
        self.eval_images_drawn = int(state["eval_images_drawn"])
        for split, stream in self._streams().items():
            if split in state and not stream.load_state(state[split]):
                CONSOLE.log(f"The {split} images have changed since the checkpoint: starting a new image cycle.")

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Records coverage during training and at its end."""
        trainer = training_callback_attributes.trainer
        path = None if trainer is None else Path(trainer.base_dir) / "coverage.json"

        def record(step: int) -> None:
            if self.train_pixel_sampler is not None and self.rank == 0:
                summary = self.train_pixel_sampler.coverage.summary()
                writer.put_dict(name="Coverage", scalar_dict=cast(dict[str, Any], summary), step=step)
                self._write_coverage(path, step)

        def conclude(step: int) -> None:
            if self.train_pixel_sampler is not None and self.rank == 0:
                CONSOLE.log(f"Coverage: {self.train_pixel_sampler.coverage.describe()}.", markup=False)
                self._write_coverage(path, step)
            self.close()

        return [
            TrainingCallback(
                [TrainingCallbackLocation.AFTER_TRAIN_ITERATION],
                record,
                update_every_num_iters=self.config.steps_per_coverage,
            ),
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN], conclude),
        ]

    def close(self) -> None:
        """Stops loading in the background and lets go of all images. Another batch would start again."""
        for stream in self._streams().values():
            stream.close()

    def eval_feature_source(self) -> MapSource | None:
        """Feature maps of the evaluation images; None where there are none or they cannot be had."""
        if self.test_mode == "inference" or not self.config.features.extractors or self.eval_dataset is None:
            return None
        if self._sources is None and not self._sources_failed:
            try:
                # The basis of PCA codes belongs to the training images.
                self._sources = self._prepare_features(with_train=self.config.features.codes > 0)
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

            self._eval_queries = (EvalQueries.of(self),)
        return self._eval_queries[0]

    def _empty_loader(self, test_mode: str) -> EvalLoader:
        return EvalLoader(None, "cpu", lambda: None, required=test_mode == "test")

    def _prepare_training_features(self) -> None:
        specs: tuple[Any, ...] = ()
        if self.config.features.extractors:
            self._sources = self._prepare_features(with_train=True)
            specs = tuple(self._sources[0].specs)  # type: ignore[attr-defined]
        self.train_dataset.metadata["feature_specs"] = specs
        self.train_dataset.metadata["feature_ray_fraction"] = self.config.feature_ray_fraction
        self.train_dataset.metadata["feature_ray_fraction"] = self.config.feature_ray_fraction

    def _prepare_features(self, *, with_train: bool) -> list[MapSource]:
        from f3rm_ext.features.source import prepare_features

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

    def _cycle(self, split: Literal["train", "eval"], num_images: int) -> WindowCycle:
        option = _flag(f"{split}_num_images_to_sample_from")
        window = parse_count(getattr(self.config, f"{split}_num_images_to_sample_from"), option, unit="images")
        repeat_option = f"{split}_num_times_to_repeat_images"
        repeat = parse_count(getattr(self.config, repeat_option), _flag(repeat_option), unit="steps")
        if split == "eval" and window is not None and window > num_images:
            window = None  # the same options are often given for both, and there are fewer evaluation images
        return WindowCycle(
            num_images,
            window,
            repeat,
            seed=self.seed,
            shards=self.world_size,
            shard=self.rank,
            option=option,
        )

    def _stream(
        self,
        split: str,
        dataset: InputDataset,
        cycle: WindowCycle,
        rays: int,
        source: MapSource | None,
    ) -> PixelStream:
        return PixelStream(
            dataset,
            cycle,
            num_rays=rays,
            split=split,
            device=self.device,
            pixels_on_device=self.config.images_on_gpu,
            source=source,
            feature_ray_fraction=self.config.feature_ray_fraction,
        )

    def _streams(self) -> dict[str, PixelStream]:
        both = {"train": self.train_pixel_sampler, "eval": self.eval_pixel_sampler}
        return {split: stream for split, stream in both.items() if stream is not None}

    def _rays_of_this_process(self, rays: int, option: str) -> int:
        if self.config.ray_batch_scope == "per-device":
            return rays
        if rays < self.world_size:
            raise ConfigError(
                f"--{_flag(option)} is {rays}, too few to be divided over {self.world_size} GPUs: "
                f"give at least {self.world_size}, or use --{_flag('ray_batch_scope')} per-device."
            )
        return rays // self.world_size + (1 if self.rank < rays % self.world_size else 0)

    def _draw_eval_image(self) -> int:
        assert self.eval_dataset is not None
        dice = random.Random(f"{self.seed}/eval-image/{self.rank}/{self.eval_images_drawn}")
        self.eval_images_drawn += 1
        return dice.randrange(len(self.eval_dataset))

    def _log_setup(self, cycle: WindowCycle, rays: int) -> None:
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
        if cycle.window_size == cycle.num_images:
            CONSOLE.log(f"All {cycle.num_images} training images are kept in memory.")
        elif cycle.changes:
            CONSOLE.log(
                f"{cycle.window_size} of {cycle.num_images} training images in memory, "
                f"others every {cycle.repeat} steps."
            )
        else:
            CONSOLE.log(
                f"{cycle.window_size} of {cycle.num_images} training images in memory for ever: the others are never "
                f"used unless --{_flag('train_num_times_to_repeat_images')} is given."
            )

    def _write_coverage(self, path: Path | None, step: int) -> None:
        if path is None or not path.parent.is_dir() or self.train_pixel_sampler is None:
            return
        names = [Path(name).name for name in self.train_dataset.image_filenames]
        try:
            self.train_pixel_sampler.coverage.write(path, step=step, names=names)
        except OSError as error:  # a full disk must not end training here
            CONSOLE.log(f"{path} could not be written: {error}", markup=False)


def _flag(option: str) -> str:
    return "pipeline.datamanager." + option.replace("_", "-")


def _own_exclusions(dataset: InputDataset) -> InputDataset:
    """Gives the data set its own list, because nerfstudio changes the one it finds, which belongs to the class."""
    dataset.exclude_batch_keys_from_device = list(dataset.exclude_batch_keys_from_device)
    return dataset
