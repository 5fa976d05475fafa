"""What datamanagers with a cycling window of images share: evaluation images or none, resume, coverage, the end."""

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import torch
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.utils import comms, writer
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.capture.checks import check_dataparser_outputs
from f3rm_ext.data.coverage import Coverage
from f3rm_ext.data.image_cycle import ImageCycle, parse_count
from f3rm_ext.data.image_reader import MaskedPixels
from f3rm_ext.engine.shortage import Lever, Loss
from f3rm_ext.errors import ConfigError

_REPEAT = 100
"""Steps for which a window is used, where somebody is advised to have one."""


def flag(option: str) -> str:
    """Command line option of a datamanager's config field."""
    return "pipeline.datamanager." + option.replace("_", "-")


def check_positive(config: object, *options: str) -> None:
    """Checks that options are whole numbers from 1 up.

    Raises:
        ConfigError: one is not.
    """
    for option in options:
        value = getattr(config, option)
        if isinstance(value, bool) or value != int(value) or value < 1:
            raise ConfigError(f"--{flag(option)} is {value}, but it has to be a whole number from 1 up.")


def check_window(config: object, split: Literal["train", "eval"]) -> None:
    """Checks how many images of a split are to be in memory and for how long.

    Raises:
        ConfigError: one of the numbers cannot work.
    """
    for option, unit in (
        (f"{split}_num_images_to_sample_from", "images"),
        (f"{split}_num_times_to_repeat_images", "steps"),
    ):
        parse_count(getattr(config, option), flag(option), unit=unit)


def check_scale_factor(config: Any) -> None:
    """Checks the ratio by which images are scaled.

    Raises:
        ConfigError: it is outside (0, 1].
    """
    if not 0 < config.camera_res_scale_factor <= 1:
        raise ConfigError(
            f"--{flag('camera_res_scale_factor')} is {config.camera_res_scale_factor}, outside (0, 1]: "
            "give 1 for full size, 0.5 for half."
        )


@runtime_checkable
class Stream(Protocol):
    """Endless batches from one data set."""

    @property
    def coverage(self) -> Coverage:
        """What has been seen up to now."""
        ...

    def state(self) -> dict[str, Any]:
        """What :meth:`load_state` needs to go on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on where :meth:`state` was taken; returns whether it could."""
        ...

    def close(self) -> None:
        """Stops loading and lets go of images."""
        ...


class CyclingDataManager:
    """Mixin in front of one of nerfstudio's datamanagers."""

    STATE_VERSION: ClassVar[int] = 1

    config: Any
    dataparser: DataParser
    test_mode: Literal["test", "val", "inference"]
    test_split: str
    train_dataparser_outputs: DataparserOutputs
    train_dataset: Any
    eval_dataset: Any
    world_size: int
    rank: int
    seed: int
    """The same for all processes."""
    eval_images_drawn: int

    def take_place(self, local_rank: int) -> None:
        """Settles which process this is, and the seed all of them share.

        Args:
            local_rank: of this process, where torch does not know better.
        """
        self.rank = comms.get_rank() if comms.is_dist_avail_and_initialized() else local_rank
        # nerfstudio seeds each process with the machine's seed plus its rank.
        self.seed = torch.initial_seed() - self.rank
        self.eval_images_drawn = 0

    def streams(self) -> dict[str, Stream]:
        """The streams there are by split (train, eval); those of the training images are recorded as coverage."""
        raise NotImplementedError

    def cycle_state(self) -> dict[str, Any]:
        """Where the image cycles and draws are: numbers, lists and small tensors, for the checkpoint."""
        state: dict[str, Any] = {
            "version": self.STATE_VERSION,
            "seed": self.seed,
            "eval_images_drawn": self.eval_images_drawn,
        }
        for split, stream in self.streams().items():
            state[split] = stream.state()
        return state

    def load_cycle_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`cycle_state` was taken, so that the same images and draws follow.

        A state of other images is not used; a line in the log says so.
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
        """Records coverage during training and at its end."""
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
        """Stops loading in the background and lets go of all images. Another batch would start again."""
        for stream in self.streams().values():
            stream.close()

    def check_train_outputs(self, outputs: DataparserOutputs) -> None:
        """Checks cameras and files of the training images.

        Raises:
            CaptureError: they cannot be used.
        """
        check_dataparser_outputs(outputs, check_files=self.test_mode != "inference", min_images=2)

    def note_masked_pixels(self, dataset: InputDataset) -> None:
        """Has the model know what training makes of masked pixels: ``masked_pixels`` in the data set's metadata.

        Raises:
            ConfigError: masked pixels are to be trained, and there are no masks.
        """
        masked: MaskedPixels = self.config.masked_pixels
        if masked == "background" and self.test_mode == "val" and not self.train_dataparser_outputs.mask_filenames:
            raise ConfigError(
                f"--{flag('masked_pixels')} is background, but the capture has no masks: give each frame a mask_path "
                "in transforms.json, or leave the option out (images with alpha need none)."
            )
        dataset.metadata["masked_pixels"] = masked

    def eval_outputs(self) -> DataparserOutputs | None:
        """Cameras and files of the evaluation images, None if there are none.

        Raises:
            CaptureError: they cannot be used.
        """
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
        return outputs

    def make_cycle(self, split: Literal["train", "eval"], num_images: int) -> ImageCycle:
        """The cycle that the options of a split ask for; says where they ask for more images than there are.

        Raises:
            ConfigError: a number cannot work.
        """
        option = flag(f"{split}_num_images_to_sample_from")
        window = parse_count(getattr(self.config, f"{split}_num_images_to_sample_from"), option, unit="images")
        repeat_option = f"{split}_num_times_to_repeat_images"
        repeat = parse_count(getattr(self.config, repeat_option), flag(repeat_option), unit="steps")
        if window is not None and window > num_images and self.test_mode == "val" and self.rank == 0:
            images = "training" if split == "train" else "evaluation"
            CONSOLE.print(f"--{option} is {window}, but there are {num_images} {images} images: all of them are used.")
        return ImageCycle(num_images, window, repeat, seed=self.seed, shards=self.world_size, shard=self.rank)

    def draw_eval_image(self) -> int:
        """Index of a random evaluation image."""
        assert self.eval_dataset is not None
        dice = random.Random(f"{self.seed}/eval-image/{self.rank}/{self.eval_images_drawn}")
        self.eval_images_drawn += 1
        return dice.randrange(len(self.eval_dataset))

    def window_levers(self, num_images: int, loss: Loss) -> Iterator[Lever]:
        """Fewer training images in memory, or smaller ones, where they lie in the memory that is short.

        Args:
            num_images: training images.
            loss: what fewer of them at a time cost.
        """
        window, repeat = (f"train_num_{name}" for name in ("images_to_sample_from", "times_to_repeat_images"))
        count = parse_count(getattr(self.config, window), flag(window), unit="images") or num_images
        if min(count, num_images) > 1:
            steps = getattr(self.config, repeat)
            lower = f"{min(count, num_images) // 2} --{flag(repeat)} {_REPEAT if steps in (-1, math.inf) else steps}"
            now = f"{min(count, num_images)} of {num_images}, for {'ever' if steps in (-1, math.inf) else steps}"
            yield Lever(loss, flag(window), now, lower)

    def scale_lever(self) -> Lever:
        """Smaller images."""
        scale = self.config.camera_res_scale_factor
        return Lever(Loss.DETAIL, flag("camera_res_scale_factor"), scale, scale / 2)

    def log_window(self, cycle: ImageCycle) -> None:
        """Says once how many training images are in memory."""
        if self.rank != 0:
            return
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
                f"used unless --{flag('train_num_times_to_repeat_images')} is given."
            )

    def _write_coverage(self, stream: Stream, path: Path | None, step: int) -> None:
        if path is None or not path.parent.is_dir():
            return
        dataset: InputDataset = self.train_dataset
        names = [Path(name).name for name in dataset.image_filenames]
        try:
            stream.coverage.write(path, step=step, names=names)
        except OSError as error:  # a full disk must not end training here
            CONSOLE.log(f"{path} could not be written: {error}", markup=False)
