"""The base of both datamanagers: image cycle, coverage and resume; optional evaluation images; 2D features."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.utils import comms, writer
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import events
from f3rm_ext.capture.checks import check_dataparser_outputs
from f3rm_ext.capture.exposures import exposure_stops
from f3rm_ext.capture.images import name_some, tell_apart
from f3rm_ext.data.background import measure_background
from f3rm_ext.data.cycling_config import AUTO_PX, ImageBytes, flag
from f3rm_ext.data.eval_dataloaders import EvalLoader
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixels, MaskedPixelsOption
from f3rm_ext.data.pixel_sampler import CHANNELS
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.silhouettes import are_silhouettes
from f3rm_ext.data.stereo.exposures import read_or_measure_stops
from f3rm_ext.data.window_stream import WindowStream
from f3rm_ext.errors import ConfigError, UserError
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.features.store.feature_store import cache_root
from f3rm_ext.memory.options import MemoryOption, RunState

_CHOICE = {
    "background": "The masks cut an object out of its surroundings: masked pixels are trained as empty. With {option} "
    "ignore they do not count.",
    "ignore": "The masks do not show the silhouettes of an object: masked pixels do not count. With {option} "
    "background they are trained as empty.",
}
_BEGINNING = "; the first {1} steps have {0} images, while the others are read"


class CyclingDataManager(ABC):
    """Mixin for nerfstudio's datamanagers: training images come in windows that cycle through the data set.

    If the config's ``features`` name extractors, both splits have 2D features.
    """

    STATE_VERSION: ClassVar[int] = 1

    config: Any
    device: torch.device | str
    dataparser: DataParser
    test_mode: Literal["test", "val", "inference"]
    test_split: str
    train_dataparser_outputs: DataparserOutputs
    train_dataset: InputDataset
    eval_dataset: InputDataset | None
    eval_dataloader: EvalLoader
    world_size: int
    rank: int
    local_rank: int
    seed: int
    """The same for all processes."""
    eval_images_drawn: int
    image_scale: float
    """Factor on the size of the images, see :meth:`resolve_scale`."""
    masked_pixels: MaskedPixels
    """Treatment of masked pixels in training, see :meth:`note_masked_pixels`."""
    choices: dict[str, str | float]
    """Options whose value ``auto`` was decided by the data, and what they became. The trainer keeps them."""
    _sources: list[FeatureSource] | None = None
    _sources_failed: bool = False

    def take_place(self, local_rank: int) -> None:
        """Sets the rank of this process, the local one outside of a process group, and the seed that all share."""
        self.rank = comms.get_rank() if comms.is_dist_avail_and_initialized() else local_rank
        # nerfstudio seeds each process with the machine's seed plus its rank.
        self.seed = torch.initial_seed() - self.rank
        self.eval_images_drawn = 0
        self.choices = {}

    @abstractmethod
    def streams(self) -> dict[str, WindowStream]:
        """The streams by split (train, eval). Coverage is recorded for the training images."""

    def cycle_state(self) -> dict[str, Any]:
        """The position of the image cycles and random draws, for the checkpoint: numbers, lists and small tensors."""
        state: dict[str, Any] = {
            "version": self.STATE_VERSION,
            "seed": self.seed,
            "eval_images_drawn": self.eval_images_drawn,
        }
        for split, stream in self.streams().items():
            state[split] = stream.state()
        return state

    def load_cycle_state(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`cycle_state` was taken: the same images and draws follow.

        A state of other images is ignored, and the log says so.
        """
        if not state:
            return
        if state.get("version") != self.STATE_VERSION:
            CONSOLE.log("The image cycle of this checkpoint is of another version: starting a new one.")
            return
        self.seed = int(state["seed"])
        self.eval_images_drawn = int(state["eval_images_drawn"])
        for split, stream in self.streams().items():
            if split in state and not stream.load_state(state[split]):
                CONSOLE.log(f"The {split} images have changed since the checkpoint: starting a new image cycle.")

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Records coverage during training and at the end."""
        trainer = training_callback_attributes.trainer
        path = None if trainer is None else Path(trainer.base_dir) / "coverage.json"

        def record(step: int) -> None:
            stream = self.streams().get("train")
            if stream is not None and self.rank == 0:
                summary = stream.coverage.summary()
                writer.put_dict(name="Coverage", scalar_dict=cast(dict[str, Any], summary), step=step)
                self._write_coverage(stream, path, step)

        def conclude(step: int) -> None:
            stream = self.streams().get("train")
            if stream is not None and self.rank == 0:
                CONSOLE.log(f"Coverage: {stream.coverage.describe()}.", markup=False)
                self._write_coverage(stream, path, step)
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
        """Stops background loading and releases all images. The next batch would start it again."""
        for stream in self.streams().values():
            stream.close()

    def check_train_outputs(self, outputs: DataparserOutputs) -> None:
        """Checks the cameras and files of the training images. Raises CaptureError if they cannot be used."""
        check_dataparser_outputs(outputs, check_files=self.test_mode != "inference", min_images=2)

    def resolve_scale(self) -> float:
        """Returns the scale of the images, and chooses it if the options leave it open."""
        cameras, is_open = self.train_dataparser_outputs.cameras, self.config.camera_res_scale_factor == "auto"
        scale: float = self.config.resolve_scale(cameras.width, cameras.height)
        if is_open and self.test_mode == "val":
            self.choices["camera_res_scale_factor"] = scale
            if scale < 1 and self.rank == 0:
                CONSOLE.log(
                    f"Images are reduced to {AUTO_PX} pixels on their longer side, which is as much as this method "
                    f"resolves: --resolution-scale {scale:.3g}, where 1 keeps their size."
                )
        return scale

    def note_masked_pixels(self, dataset: InputDataset) -> None:
        """Decides how training treats masked pixels and tells the model: ``masked_pixels`` in the data set's metadata.
        Raises ConfigError if masked pixels should be trained as background, but the capture has no masks."""
        wanted: MaskedPixelsOption = self.config.masked_pixels
        outputs = self.train_dataparser_outputs
        files = outputs.mask_filenames or []
        if wanted == "background" and self.test_mode == "val" and not files:
            raise ConfigError(
                f"--{flag('masked_pixels')} is background, but the capture has no masks: give each frame a mask_path "
                "in transforms.json, or leave the option out (images with alpha need none)."
            )
        if wanted == "auto":
            wanted = "background" if files and are_silhouettes(outputs.cameras, files) else "ignore"
            if files and self.test_mode == "val":
                self.choices["masked_pixels"] = wanted
                if self.rank == 0:
                    CONSOLE.log(_CHOICE[wanted].format(option=f"--{flag('masked_pixels')}"))
        self.masked_pixels = dataset.metadata["masked_pixels"] = wanted

    def note_colors(self, dataset: InputDataset, photos: InputDataset) -> None:
        """Tells the model the exposures of the training photos: ``exif_stops`` in the data set's metadata and, in
        training, ``measure_stops``, which finds them in the photos, and ``measure_background``, which finds the colour
        behind them."""
        if self.test_mode != "inference":  # photos may be absent
            dataset.metadata["exif_stops"] = exposure_stops(self.train_dataparser_outputs.image_filenames)
        if self.test_mode == "val":
            cache = cache_root(self.config.features.cache_dir, "exposures")
            dataset.metadata["measure_stops"] = partial(read_or_measure_stops, self.train_dataparser_outputs, cache)
            dataset.metadata["measure_background"] = partial(measure_background, photos, self.masked_pixels)

    def eval_outputs(self) -> DataparserOutputs | None:
        """Cameras and files of the evaluation images, or None if the capture has none. Raises CaptureError if they
        cannot be used."""
        try:
            outputs = self.dataparser.get_dataparser_outputs(split=self.test_split)
        except FileNotFoundError as error:
            if self.test_mode != "val":
                raise
            CONSOLE.log(f"No evaluation images: {error}", markup=False)
            return None
        events.result(eval_images=len(outputs.image_filenames))
        if not outputs.image_filenames:
            sentence = "No photo is held out, so none is measured; test_filenames in transforms.json can name some."
            CONSOLE.log(sentence)
            events.note(sentence)
            return None
        check_dataparser_outputs(outputs, check_files=self.test_mode != "inference", min_images=1)
        trained = set(map(Path, self.train_dataparser_outputs.image_filenames))
        shared = [path for path in map(Path, outputs.image_filenames) if path in trained]
        if shared and self.test_mode != "inference" and self.rank == 0:
            CONSOLE.log(
                f"{len(shared)} of {len(outputs.image_filenames)} evaluation images are training images too "
                f"({name_some([path.name for path in shared])}), so figures do not tell how well new views are shown.",
                markup=False,
            )
        return outputs

    def make_cycle(
        self, split: Literal["train", "eval"], dataset: InputDataset, source: FeatureSource | None = None
    ) -> tuple[ImageCycle, int]:
        """The image cycle of a split, and the distance of the rows and columns of pixels that are kept of its images.

        A window larger than the split takes all of its images, and the log says so.

        Args:
            source: the features that are kept with the images.

        Raises:
            ConfigError: an option is out of range.
        """
        num_images = len(dataset)
        pixels = (dataset.cameras.height * dataset.cameras.width).reshape(-1)
        maps = {} if source is None else source.load(int(pixels.argmax()))
        size = ImageBytes(CHANNELS * int(pixels.max()), sum(each.values.nbytes for each in maps.values()))
        stride = self.config.pixel_stride(split, num_images, size, comms.get_local_size())
        cycle = self.config.image_cycle(
            split,
            num_images,
            size,
            comms.get_local_size(),
            seed=self.seed,
            shards=self.world_size,
            shard=self.rank,
        )
        option = f"{split}_num_images_to_sample_from"
        window = getattr(self.config, option)
        if num_images < window < math.inf and self.test_mode == "val" and self.rank == 0:
            images = "training" if split == "train" else "evaluation"
            CONSOLE.print(
                f"--{flag(option)} is {int(window)}, but there are {num_images} {images} images: all of them are used."
            )
        return cycle, stride

    def make_placement(
        self, option: str, *, wanted: bool, off: str, what: str = "Training images", log: bool = True
    ) -> Placement | None:
        """Decides where images are kept; None on the CPU, where there is nothing to decide."""
        device = torch.device(self.device)
        if device.type != "cuda":
            return None
        return Placement(device, wanted=wanted, off=f"{flag(option)} {off}", what=what, log=log and self.rank == 0)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Returns a random evaluation image, see :meth:`EvalLoader.get_camera`; CaptureError if there are none."""
        dice = random.Random(f"{self.seed}/eval-image/{self.rank}/{self.eval_images_drawn}")
        self.eval_images_drawn += 1
        return self.eval_dataloader.get_camera(dice.randrange(len(self.eval_dataloader) or 1))

    def memory_options(self) -> list[MemoryOption]:
        """Options that lower the memory of a training step."""
        images, stream = len(self.train_dataset), self.streams().get("train")
        whole = images  # that are in memory at a time; all before it is known
        if stream is not None:
            whole = 0 if getattr(stream, "stride", 1) > 1 else stream.cycle.window_size
        return self.config.memory_options(
            RunState(
                torch.device(self.device).type,
                images,
                images_on_device=stream is not None and stream.on_device,
                images_in_memory=whole,
            )
        )

    def log_window(self, cycle: ImageCycle, stride: int = 1) -> None:
        """Logs how many training images are in memory, and which pixels of them."""
        if self.rank != 0:
            return
        if stride > 1:
            CONSOLE.log(
                f"1 of {stride**2} pixels of each of the {cycle.num_images} training images is kept in memory, because "
                f"all would take too much{_BEGINNING.format(*cycle.start) if cycle.start else ''}."
            )
        elif cycle.window_size == cycle.num_images:
            CONSOLE.log(f"All {cycle.num_images} training images are kept in memory.")
        elif cycle.changes:
            fitted = self.config.window("train")[0] is None
            CONSOLE.log(
                f"{cycle.window_size} of {cycle.num_images} training images in memory, "
                f"others every {cycle.repeat} steps{', because all would take too much memory' if fitted else ''}."
            )
        else:
            CONSOLE.log(
                f"{cycle.window_size} of {cycle.num_images} training images in memory for ever: the others are never "
                f"used unless --{flag('train_num_times_to_repeat_images')} is given."
            )

    def _write_coverage(self, stream: WindowStream, path: Path | None, step: int) -> None:
        if path is None or not path.parent.is_dir():
            return
        dataset: InputDataset = self.train_dataset
        try:
            stream.coverage.write(path, step=step, names=tell_apart(dataset.image_filenames))
        except OSError as error:  # a full disk must not end training here
            CONSOLE.log(f"{path} could not be written: {error}", markup=False)

    def train_feature_source(self) -> Any:
        """Feature maps of the training images; None without extractors, and outside of training."""
        if self.test_mode != "val" or not self.config.features.extractors:
            return None
        if self._sources is None:
            self._sources = self.prepare_features(with_train=True)
        return self._sources[0]

    def eval_feature_source(self) -> FeatureSource | None:
        """Feature maps of the evaluation images; None if there are none or they cannot be extracted."""
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

    def prepare_features(self, *, with_train: bool) -> list[FeatureSource]:
        """Extracts missing features of the evaluation images and, before them, those of the training images if wanted.
        Raises UserError, see :func:`~f3rm_ext.features.source.prepare_features`."""
        from f3rm_ext.features.source import prepare_features

        datasets = [self.train_dataset] if with_train else []
        if self.eval_dataset is not None:
            datasets.append(self.eval_dataset)
        return prepare_features(
            datasets,
            self.config.features,
            device=self.device,
            local_rank=self.local_rank,
            world_size=self.world_size,
            local_size=comms.get_local_size(),
        )
