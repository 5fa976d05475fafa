"""Settings of a training, by the dotted names of the released code, and two presets.

``training.batch_size=8 dataset.category=apple`` sets two of them. Names that the released documentation also has are
understood: ``dataset.category`` for ``dataset.shape``, ``train.…`` for ``training.…``.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from f3rm_ext.errors import ConfigError

Size = Literal["published", "tiny"]
Preset = Literal["none", "sparse", "dense"]
Residual = Literal["auto", "True", "False"]


@dataclass
class TrainingSettings:
    """``training.*``"""

    resume: bool = False
    """Resume from the newest checkpoint in the run's folder."""
    pretrain_path: str = ""
    """Checkpoint with the initial weights; a dense model starts from that of a sparse one. Resumed runs ignore it."""
    batch_size: int = 8
    """Scenes of one process (GPU) in each step."""
    max_iterations: int = 100_000
    """Number of optimiser steps."""
    iterations_for_batch: int = 0
    """Scenes per step of all processes for which max_iterations and reinit_after are meant, such as 64 for the
    published sparse stage: both are scaled, so that as many scenes are seen. 0 leaves them as they are."""
    lr: float = 1e-4
    """Learning rate. The encoder and the transformer of a dense model get a tenth of it; with `model.residual` the
    convolution of its rays gets a 2560th."""
    beta2: float = 0.999
    """Decay of Adam's mean of squared gradients, above 0 and below 1. Short runs may want less, such as 0.95, which
    forgets the gradients of the first steps sooner."""
    mixed_precision: bool = True
    """Compute in 16 bits where that is safe. On a CPU only with `bfloat`, if it multiplies bfloat16 matrices (AMX)."""
    bfloat: bool = True
    """Use bfloat16 for mixed precision; otherwise float16 with scaled gradients."""
    gradient_clipping: bool = False
    """Limit the norm of the gradient to 1, after unscaling."""
    l1_loss: bool = False
    """Use absolute errors instead of squared ones."""
    freeze_encoder: bool = True
    """Freeze DINOv2."""
    reinit: bool = False
    """Unfreeze encoder and transformer after `reinit_after` steps, with a new optimiser."""
    reinit_after: int = 50_000
    """Steps before encoder and transformer are unfrozen."""
    dpt_head: bool = False
    """Train the dense model, which predicts 16 × 16 rays per patch."""
    full_num_patches_x: int = 16
    """Rays along an image's width: 16, or 256 with the dense head."""
    full_num_patches_y: int = 16
    """Rays along an image's height; equal to full_num_patches_x."""
    interval_save_checkpoint: int = 5000
    """Steps between checkpoints; the newest two are kept."""
    interval_evaluate: int = 5000
    """Steps between evaluations on eight image sets of the test list; 0 for none."""
    num_workers: int = 8
    """Number of processes that read data; 0 reads in the training process."""
    seed: int = 0
    """Seed of all random numbers, 0 to 2⁶³ - 1."""


@dataclass
class ModelSettings:
    """``model.*``"""

    num_images: int = 8
    """Largest number of images of a scene, at least 2."""
    random_num_images: bool = True
    """Draw the number of images anew in every step, from 2 to num_images."""
    freeze_transformer: bool = False
    """Freeze the transformer."""
    size: Size = "published"
    """Width and depth of the networks: as published, or tiny for a CPU."""
    residual: Residual = "auto"
    """Dense model: the head predicts what is added to the upsampled prediction of the transformer, so that training
    begins with the errors of the sparse model. auto: True for tiny models, False at the published size, whose models
    predict with the head alone. A resumed run keeps what its checkpoint has."""
    encoder_weights: str = ""
    """State dict of DINOv2 ViT-S/14; by default the published one, which is downloaded."""


@dataclass
class DatasetSettings:
    """``dataset.*``"""

    name: str = "co3d"
    """Name of the data set; co3d is the only one."""
    shape: str = "all_train"
    """Categories, separated by commas; all_train stands for all in the folder except the ten held-out ones."""
    path: str = "co3d_data"
    """Folder of the data set: co3d/ with the images, co3d_annotations/ with the lists."""
    apply_augmentation: bool = True
    """Crop images at random, to 0.8 to 1.1 times the short side. Without augmentation the features of a frozen DINOv2
    are computed once and kept, up to 1 GiB."""
    image_size: int = 224
    """Side of the images in pixels, a multiple of 14."""


@dataclass
class DebugSettings:
    """``debug.*``"""

    wandb: bool = True
    """Log to Weights & Biases."""
    project_name: str = "diffusionsfm"
    """Name of the project in Weights & Biases."""
    run_name: str = "run"
    """Name of the run, and of its folder."""


@dataclass
class Settings:
    """All settings of a training."""

    training: TrainingSettings = field(default_factory=TrainingSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)
    run_dir: str = ""
    """Folder of the run, ``hydra.run.dir``; by default outputs/ and the run's name."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.run_dir) if self.run_dir else Path("outputs") / self.debug.run_name

    @property
    def has_residual(self) -> bool:
        """Whether a new model adds the dense head's prediction to that of the transformer."""
        if not self.training.dpt_head:
            return False
        return self.model.size != "published" if self.model.residual == "auto" else self.model.residual == "True"

    @property
    def freezes_random_weights(self) -> bool:
        """Whether training begins with a transformer that is frozen and was never trained."""
        training = self.training
        is_frozen = self.model.freeze_transformer and not (training.reinit and training.reinit_after <= 0)
        return is_frozen and not training.resume and not training.pretrain_path

    @property
    def patches(self) -> int:
        """Patches along each side of an image."""
        return self.dataset.image_size // 14

    @property
    def cells(self) -> int:
        """Rays along each side of an image."""
        return self.training.full_num_patches_x


PRESETS: dict[Preset, tuple[str, ...]] = {
    "none": (),
    "sparse": (
        "debug.run_name=sparse",
        "training.batch_size=8",
        "training.max_iterations=400000",
        "model.num_images=8",
    ),
    "dense": (
        "debug.run_name=dense",
        *("training.batch_size=4", "training.max_iterations=800000", "model.num_images=8"),
        *("training.dpt_head=True", "training.full_num_patches_x=256", "training.full_num_patches_y=256"),
        *("training.gradient_clipping=True", "training.reinit=True", "training.freeze_encoder=True"),
        "model.freeze_transformer=True",
    ),
}
"""The two published stages, for 8 processes."""
CHECKPOINTS = "checkpoints"
"""Folder in that of the run."""
MOST_SEED = 2**63 - 1
"""Largest seed of a generator."""
_ALIASES = {"dataset.category": "dataset.shape", "hydra.run.dir": "run_dir"}
_PUBLISHED_VALUES: Mapping[str, bool | int | float | str | None] = {
    "training.interval_visualize": None,
    "training.interval_delete_checkpoint": None,
    "training.delete_all_checkpoints_after_training": False,
    "training.matmul_precision": None,
    "training.gpu_id": 0,
    "training.job_key": "",
    "training.translation_scale": 1,
    "training.regression": False,
    "training.prob_unconditional": 0,
    "training.load_extra_cameras": False,
    "training.calculate_intrinsics": False,
    "training.distort": False,
    "training.normalize_first_camera": True,
    "training.first_cam_mediod": True,
    "training.diffuse_origins_and_endpoints": True,
    "training.diffuse_depths": False,
    "training.depth_resolution": 1,
    "training.dpt_encoder_features": True,
    "training.nearest_neighbor": True,
    "training.no_bg_targets": True,
    "training.unit_normalize_scene": False,
    "training.sd_scale": 2,
    "training.grad_accumulation": False,
    "model.pred_x0": True,
    "model.model_type": "dit",
    "model.num_patches_x": 16,
    "model.num_patches_y": 16,
    "model.depth": 16,
    "model.feature_extractor": "dino",
    "model.append_ndc": True,
    "model.within_image": False,
    "model.use_homogeneous": True,
    "model.cond_depth_mask": True,
    "noise_scheduler.type": "linear",
    "noise_scheduler.max_timesteps": 100,
    "noise_scheduler.beta_start": 0.012,
    "noise_scheduler.beta_end": 0.00085,
    "noise_scheduler.marigold_ddim": False,
    "dataset.use_global_intrinsics": True,
    "dataset.mask_holes": True,
    "debug.anomaly_detection": False,
}
"""Settings of the released code that can only have the value with which the published models were trained. None means
that the setting has no effect here, so any value is accepted."""


def parse_settings(words: Sequence[str], preset: Preset = "none") -> Settings:
    """Reads settings from ``key=value`` words; later ones count. Raises ConfigError if a key is unknown, or a value
    cannot be used."""
    settings = Settings()
    for word in (*PRESETS[preset], *words):
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"`{word}` sets nothing: write settings as key=value, such as training.batch_size=4.")
        _set(settings, key.lstrip("+"), value)
    check_settings(settings)
    return settings


def _set(settings: Settings, key: str, value: str) -> None:
    if key.startswith("train."):
        key = "training." + key.removeprefix("train.")
    key, value = _ALIASES.get(key, key), value.strip("'\"")
    if key in _PUBLISHED_VALUES:
        _check_fixed(key, value, _PUBLISHED_VALUES[key])
        return
    known = dict(flatten(settings))
    if key not in known:
        suggestions = difflib.get_close_matches(key, [*known, *_ALIASES], n=1)
        group = key.partition(".")[0] + "."
        others = [name for name in known if name.startswith(group)] or [*[*known][:-1], "hydra.run.dir"]
        raise ConfigError(
            f"There is no setting {key}: "
            + (f"write {suggestions[0]}, if you mean that." if suggestions else f"choose from {', '.join(others)}.")
        )
    *group, name = key.split(".")
    owner = getattr(settings, group[0]) if group else settings
    kind = next(entry.type for entry in fields(owner) if entry.name == name)
    setattr(owner, name, _parse_value(key, value, kind))


def _check_fixed(key: str, value: str, published: bool | int | float | str | None) -> None:
    if published is None:
        return
    if isinstance(published, str):
        is_published = value.lower() == published
    else:  # 1 and 1.0 are one number
        is_published = _parse_value(key, value, bool if isinstance(published, bool) else float) == published
    if not is_published:
        has = "none" if published == "" else published
        raise ConfigError(f"{key}={value} is not built: the published models have {has}, the only value here.")


def _parse_value(key: str, value: str, kind: Any) -> bool | int | float | str:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{key} is {value}: choose from {', '.join(get_args(kind))}.")
        return value
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{key} is {value}, but must be True or False.")
        return value.lower() in ("true", "1")
    try:
        return kind(value.replace("_", "")) if kind is int else kind(value)
    except ValueError as error:
        raise ConfigError(f"{key} is {value}, but must be a{'n integer' if kind is int else ' number'}.") from error


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields all settings by their dotted names."""
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, value


def scale_steps(settings: Settings, processes: int) -> Settings:
    """Returns settings whose steps are those for their batch; see ``training.iterations_for_batch``."""
    training = settings.training
    if not training.iterations_for_batch:
        return settings
    factor = training.iterations_for_batch / (training.batch_size * processes)
    steps, reinit = (round(factor * each) for each in (training.max_iterations, training.reinit_after))
    return replace(settings, training=replace(training, max_iterations=max(1, steps), reinit_after=reinit))


def check_settings(settings: Settings) -> None:
    """Checks the ranges of values, and that they agree with each other. Raises ConfigError if a value cannot be
    used."""
    training, model, data = settings.training, settings.model, settings.dataset
    for key, value, least in (
        ("training.batch_size", training.batch_size, 1),
        ("training.max_iterations", training.max_iterations, 1),
        ("training.iterations_for_batch", training.iterations_for_batch, 0),
        ("training.interval_save_checkpoint", training.interval_save_checkpoint, 1),
        ("training.interval_evaluate", training.interval_evaluate, 0),
        ("training.num_workers", training.num_workers, 0),
        ("training.seed", training.seed, 0),
        ("model.num_images", model.num_images, 2),
    ):
        if value < least:
            raise ConfigError(f"{key} is {value}, but must be at least {least}.")
    if not 0 < training.beta2 < 1:
        raise ConfigError(f"training.beta2 is {training.beta2}, but must lie between 0 and 1.")
    if not 0 < training.lr < math.inf:
        raise ConfigError(f"training.lr is {training.lr}, but must be a positive number, such as 1e-4.")
    if training.seed > MOST_SEED:
        raise ConfigError(f"training.seed is {training.seed}, but must be at most {MOST_SEED}.")
    if data.name != "co3d":
        raise ConfigError(f"dataset.name is {data.name}, but co3d is the only data set: convert yours to its format.")
    if data.image_size < 14 or data.image_size % 14:
        raise ConfigError(f"dataset.image_size is {data.image_size}, but patches have 14 pixels: use a multiple of 14.")
    rays = settings.patches * (16 if training.dpt_head else 1)
    if (training.full_num_patches_x, training.full_num_patches_y) != (rays, rays):
        head = "with training.dpt_head=True" if training.dpt_head else "without the dense head"
        raise ConfigError(
            f"training.full_num_patches_x and _y are {training.full_num_patches_x} and {training.full_num_patches_y}, "
            f"but {head} there are {rays} rays along each side: set both to {rays}."
        )
    if training.reinit and not training.dpt_head:
        raise ConfigError("training.reinit belongs to the dense stage: add training.dpt_head=True.")
    if model.residual == "True" and not training.dpt_head:
        raise ConfigError("model.residual belongs to the dense stage: add training.dpt_head=True.")


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first."""
    return sorted((folder / CHECKPOINTS).glob("ckpt_*.pth"))


def check_folder(settings: Settings) -> None:
    """Checks that a training that begins anew does so in a folder without checkpoints."""
    checkpoints = find_checkpoints(settings.folder)
    if checkpoints and not settings.training.resume:
        raise ConfigError(
            f"The folder {settings.folder} holds the checkpoints of a run ({checkpoints[-1].name}): go on with it by "
            "training.resume=True, or give another folder by hydra.run.dir=… or debug.run_name=…."
        )


def check_weights(settings: Settings) -> None:
    """Checks that a training has the weights that it freezes; a plan needs none."""
    if settings.freezes_random_weights:
        stage = "dense" if settings.training.dpt_head else "sparse"
        raise ConfigError(
            f"The {stage} stage would freeze a transformer with random weights: give training.pretrain_path=… of a "
            "sparse training, or set model.freeze_transformer=False to train it, too."
        )
