"""Training of both stages, on one process or several (``accelerate launch``).

Everything random is a function of the seed, the step and the number of the sample: a resumed run continues exactly, and
several processes do what one with all of their scenes would.
"""

import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from f3rm_ext import compat
from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.ranks import largest_over_ranks
from f3rm_ext.errors import CaptureError, CheckpointError, ConfigError, MemoryShortageError
from f3rm_ext.features.extractors.dino import Dinov2Config, Dinov2Extractor
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import load_state_dict, resolve
from f3rm_ext.memory.options import MemoryOption, QualityImpact
from f3rm_ext.memory.shortage import report_shortage, shortage_error
from f3rm_ext.sfm.diffusion import checkpoint as files
from f3rm_ext.sfm.diffusion.batches import Scenes, load_batches, make_dataset
from f3rm_ext.sfm.diffusion.co3d import Co3dScenes, SceneSample
from f3rm_ext.sfm.diffusion.dense_head import UPSAMPLING
from f3rm_ext.sfm.diffusion.encoder import EncodedImages, FeatureCache
from f3rm_ext.sfm.diffusion.model import SIZES, RayDiffuser, masked_loss
from f3rm_ext.sfm.diffusion.plan import set_trained
from f3rm_ext.sfm.diffusion.prediction import evaluate
from f3rm_ext.sfm.diffusion.schedule import STEPS, add_noise, make_scheduler
from f3rm_ext.sfm.diffusion.settings import CHECKPOINTS, Settings, find_checkpoints, flatten
from f3rm_ext.utils.console import say
from f3rm_ext.utils.output_file import require_writable, write_error, write_file
from f3rm_ext.utils.signals import Interrupt, handle_signals

if TYPE_CHECKING:
    from accelerate import Accelerator

_LOSS_LOG = "losses.jsonl"
EVALUATED_SETS = 8
"""Image sets of an evaluation."""
_STATE_KEYS = ("state_dict", "optimizer", "scaler", "iteration", "settings")
_MAX_NORM = 1.0
_MAX_FEATURE_BYTES = 1 << 30
_BETA1 = 0.9
_FIXED_SETTINGS = (
    *("training.dpt_head", "model.size"),
    *("training.freeze_encoder", "training.reinit", "model.freeze_transformer"),
)
"""Settings that a resumed run cannot change."""
_BACKBONE_RATE = 0.1
"""Factor on the learning rate of encoder and transformer in the dense stage."""
_RAYS_RATE = _BACKBONE_RATE / UPSAMPLING**2
"""Factor on the learning rate of the rays' convolution, if the model begins as the sparse one. All cells of a patch see
about the same ray, so Adam moves their weights alike, and the steps of all cells add up."""
Report = Callable[[int, float], None]
"""Called after each step with its number and the loss."""
ReportMetrics = Callable[[int, dict[str, float]], None]
"""Called after each evaluation with the number of the step and the means over the image sets."""


class EncoderAndModel(nn.Module):
    """Encoder and network in one call, so that gradients of both are averaged over processes."""

    def __init__(self, model: RayDiffuser) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        images: Float[Tensor, "batch images 3 h w"] | EncodedImages,
        noisy: Float[Tensor, "batch images 8 cells cells"],
        steps: Int64[Tensor, " batch"],
        ndc: Float[Tensor, "batch images 2 patches patches"],
        known: Float[Tensor, "batch images cells cells"],
    ) -> Float[Tensor, "batch images 8 cells cells"]:
        encoded = images if isinstance(images, EncodedImages) else self.model.encoder(images)
        return self.model(noisy, steps, encoded, ndc, known)


def make_accelerator() -> "tuple[Accelerator, str | None]":
    """Returns accelerate's view of devices and processes, and a warning if it was told to use its mixed precision.
    Raises ConfigError if accelerate is not installed."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ConfigError(
            "Training DiffusionSfM needs the package accelerate: `pip install 'f3rm-ext[sfm]'`."
        ) from error
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    warning = None
    if precision not in ("", "no"):
        warning = (
            f"accelerate's mixed precision ({precision}) is not used, because training has its own "
            "(training.mixed_precision): answer no in `accelerate config`."
        )
    # Without GPUs accelerate takes processes of torchrun for runs of their own, unless it is told to use the CPU.
    on_cpu = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not compat.has_cuda()
    return Accelerator(mixed_precision="no", cpu=on_cpu), warning


def derive_seed(*numbers: int) -> int:
    """Returns a seed for a generator, different for different numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


class Training:
    """A training run.

    ``notice`` says why nothing is evaluated, if the test list cannot be used.

    Args:
        scenes: what to train on; by default the training split of the settings' data set.

    Raises:
        UserError: data, weights or checkpoints cannot be used.
    """

    def __init__(self, settings: Settings, accelerator: "Accelerator", scenes: Scenes | None = None) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.device: torch.device = accelerator.device
        self.iteration = 0
        self.dataset: Scenes = make_dataset(settings, "train") if scenes is None else scenes
        self.held_out, self.notice = None, ""
        if settings.training.interval_evaluate:
            try:
                self.held_out = make_dataset(settings, "test")
            except CaptureError as error:
                self.notice = f"Nothing is evaluated while training: {error}"
        saved = self._load_newest() if settings.training.resume else None
        self.network = _make_model(settings, saved)
        if saved is not None:
            self.iteration = int(saved["iteration"])
        self.alphas_bar = make_scheduler().alphas_cumprod.to(self.device)
        training = settings.training
        self.amp = training.mixed_precision and (
            self.device.type != "cpu" or (training.bfloat and compat.has_bfloat16_matrix_units())
        )
        self.dtype = torch.bfloat16 if training.bfloat else torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp and not training.bfloat)
        self._prepare()
        if saved is not None:
            self._restore_optimizer(saved)

    def _load_newest(self) -> dict[str, Any]:
        if not find_checkpoints(self.settings.folder):
            raise CheckpointError(
                f"There is no checkpoint in {self.settings.folder / CHECKPOINTS} to resume: give the run's folder with "
                "hydra.run.dir, or leave training.resume out."
            )
        warn = say if self.accelerator.is_main_process else lambda text: None
        saved = checkpoint.load(checkpoint.newest_intact(self.settings.folder / CHECKPOINTS, warn), _STATE_KEYS)
        values, before = dict(flatten(self.settings)), saved["settings"]
        changes = [f"{key} was {before[key]}" for key in _FIXED_SETTINGS if before.get(key, values[key]) != values[key]]
        if changes:
            raise CheckpointError(
                f"The run in {self.settings.folder} cannot go on with these settings ({', '.join(changes)}): give the "
                "same ones, or begin a new run with training.pretrain_path."
            )
        return saved

    def _restore_optimizer(self, saved: dict[str, Any]) -> None:
        """Restores moments, and the scale of gradients, but no rates, since the settings may have changed.

        With another step at which everything is unfrozen the checkpoint may have moments of other parameters: then
        the new optimiser stays, as it does in that step.
        """
        groups = self.optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if [len(group["params"]) for group in saved["optimizer"]["param_groups"]] == sizes:
            own = [{key: group[key] for key in ("lr", "betas")} for group in groups]
            self.optimizer.load_state_dict(saved["optimizer"])
            for group, values in zip(self.optimizer.param_groups, own, strict=True):
                group.update(values)
        if saved["scaler"]:  # empty after steps in bfloat16
            self.scaler.load_state_dict(saved["scaler"])

    def _prepare(self) -> None:
        """Chooses what is trained; makes the optimiser and the wrapper that averages gradients."""
        training, model = self.settings.training, self.settings.model
        freeze = not (training.reinit and self.iteration >= training.reinit_after)
        set_trained(self.network, training.freeze_encoder and freeze, model.freeze_transformer and freeze)
        self.network.to(self.device)
        groups: dict[float, list[nn.Parameter]] = {factor: [] for factor in (1.0, _BACKBONE_RATE, _RAYS_RATE)}
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad:
                groups[self._rate_factor(name)].append(parameter)
        self.optimizer = torch.optim.Adam(
            [{"params": some, "lr": factor * training.lr} for factor, some in groups.items() if some],
            betas=(_BETA1, training.beta2),
        )
        self.features = self._feature_cache()
        self.model = self.accelerator.prepare_model(EncoderAndModel(self.network))
        self.model.train()

    def _rate_factor(self, name: str) -> float:
        """Factor on the learning rate of a parameter."""
        if self.network.residual is not None and name.startswith("rays."):
            return _RAYS_RATE
        is_slow = self.network.stage == "dense" and name.startswith(("encoder.", "transformer."))
        return _BACKBONE_RATE if is_slow else 1.0

    def _feature_cache(self) -> FeatureCache | None:
        """Keeps the features of images that are always cut alike, if their encoder is frozen and they fit."""
        encoder, dense = self.network.encoder, self.network.stage == "dense"
        is_frozen = not any(parameter.requires_grad for parameter in encoder.parameters())
        size = FeatureCache.bytes_per_image(encoder.width, self.settings.patches, dense) * self.dataset.num_frames
        if not is_frozen or self.dataset.augment or size > _MAX_FEATURE_BYTES:
            return None
        return FeatureCache(encoder, dense)

    def run(
        self,
        report: Report = lambda iteration, loss: None,
        report_metrics: ReportMetrics = lambda iteration, metrics: None,
    ) -> int:
        """Trains to the last step, or until Ctrl-C or SIGTERM; the last step is saved.

        Returns:
            The signal that stopped the training; 0 for none.

        Raises:
            UserError: the loss is not a number, memory runs out, an image cannot be read, or a file cannot be written.
        """
        training = self.settings.training
        if self.accelerator.is_main_process:
            require_writable(self._checkpoint_path(), "hydra.run.dir")
            self._forget_losses()
        interrupt = Interrupt(alone=self.accelerator.num_processes == 1)
        with handle_signals(interrupt.on_signal, signal.SIGINT, signal.SIGTERM):
            for samples in load_batches(self.dataset, self._places(), training.num_workers, self.device):
                start = time.perf_counter()
                with report_shortage(self._shortage):
                    loss = self.step(SceneSample(*(values.to(self.device, non_blocking=True) for values in samples)))
                self.iteration += 1
                if self.accelerator.is_main_process:
                    self._log(loss, time.perf_counter() - start)
                    report(self.iteration, loss)
                if training.reinit and self.iteration == training.reinit_after:
                    # Before a checkpoint of this step is saved: a run that resumes there begins unfrozen.
                    del self.model  # with its hooks for the gradients that were averaged so far
                    self.accelerator.free_memory()
                    self._prepare()
                    self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaler.is_enabled())
                stop = self._largest_over_ranks(interrupt.number)
                is_last = self.iteration == training.max_iterations
                if is_last or stop or self.iteration % training.interval_save_checkpoint == 0:
                    self.save()
                if stop and not is_last:
                    return stop
                if self.held_out is not None and (is_last or self.iteration % training.interval_evaluate == 0):
                    if self.accelerator.is_main_process:
                        report_metrics(self.iteration, self.evaluate(self.held_out))
                    self.accelerator.wait_for_everyone()
        return 0

    def _places(self) -> Iterator[range]:
        """Yields the numbers of the samples of each step to come, counted over all processes."""
        training = self.settings.training
        # Those of a step: step * processes * batch + rank * batch onwards.
        own, batch = self.accelerator.process_index * training.batch_size, training.batch_size
        total = batch * self.accelerator.num_processes
        for start in range(self.iteration * total + own, training.max_iterations * total + own, total):
            yield range(start, start + batch)

    def _largest_over_ranks(self, number: int) -> int:
        largest = torch.tensor(number, device=self.device)
        largest_over_ranks(largest)
        return int(largest)

    def _shortage(self) -> MemoryShortageError:
        """Returns the error for a step in which memory ran out."""
        training, model = self.settings.training, self.settings.model
        batch, count = training.batch_size, model.num_images
        options = [MemoryOption(QualityImpact.NOISE, "training.batch_size", batch, batch // 2)] * (batch > 1)
        options += [MemoryOption(QualityImpact.DETAIL, "model.num_images", count, count // 2)] * (count > 3)
        if not training.mixed_precision:  # it halves the memory of activations
            options.append(MemoryOption(QualityImpact.PRECISION, "training.mixed_precision", False, True))
        saved = find_checkpoints(self.settings.folder)
        restart = "resume the run by training.resume=True" if saved else "nothing was saved yet, so start again"
        return shortage_error(
            self.iteration, self.device, options, restart=restart, form=lambda option: f"{option.name}={option.lower}"
        )

    def _divergence(self, what: str) -> ConfigError:
        return ConfigError(
            f"The {what} at step {self.iteration}: resume from the last checkpoint with "
            "training.mixed_precision=False, which takes about twice the memory for activations, or lower "
            "training.lr."
        )

    def step(self, sample: SceneSample) -> float:
        """Does one step of the optimiser. Returns the loss, averaged over processes."""
        training, model = self.settings.training, self.settings.model
        shared = torch.Generator().manual_seed(derive_seed(training.seed, 0, self.iteration))
        count = model.num_images
        if model.random_num_images:
            count = int(torch.randint(2, count + 1, (1,), generator=shared))
        clean, known = sample.maps[:, :count], sample.known[:, :count]
        noisy, steps = self._add_noise(clean, known)
        self.optimizer.zero_grad(set_to_none=True)  # before activations come
        images: Tensor | EncodedImages = sample.images[:, :count]
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.amp):
            if self.features is not None:
                images = self.features.encode(sample.images[:, :count], sample.numbers[:, :count])
            predicted = self.model(images, noisy, steps, sample.ndc[:, :count], known)
        loss = masked_loss(predicted.float(), clean, known, training.l1_loss)
        value = float(self.accelerator.reduce(loss.detach(), "mean"))  # type: ignore[arg-type]
        if not math.isfinite(value):
            raise self._divergence("loss is not a number")
        self.scaler.scale(loss).backward()
        if training.gradient_clipping:
            self.scaler.unscale_(self.optimizer)  # the norm is that of true gradients
            trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
            nn.utils.clip_grad_norm_(trained, _MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return value

    def _add_noise(
        self, clean: Float[Tensor, "batch images 8 cells cells"], known: Float[Tensor, "batch images cells cells"]
    ) -> tuple[Float[Tensor, "batch images 8 cells cells"], Int64[Tensor, " batch"]]:
        """Returns the noisy maps of this step's samples, and their steps of the schedule."""
        batch = len(clean)
        first = (self.iteration * self.accelerator.num_processes + self.accelerator.process_index) * batch
        noises = [self._draw(first + place, clean.shape[1:]) for place in range(batch)]
        steps, noise = (torch.stack(values) for values in zip(*noises, strict=True))
        return add_noise(clean, noise, steps, known, self.alphas_bar), steps

    def _draw(self, number: int, shape: torch.Size) -> tuple[Int64[Tensor, ""], Float[Tensor, "images 8 cells cells"]]:
        """The step of the schedule and the noise of a sample."""
        generator = torch.Generator(self.device)
        generator.manual_seed(derive_seed(self.settings.training.seed, 1, number))
        step = torch.randint(STEPS, (), generator=generator, device=self.device)
        return step, torch.randn(shape, generator=generator, device=self.device)

    def evaluate(self, held_out: Co3dScenes) -> dict[str, float]:
        """Returns means over image sets: RRA@15, RTA@15, AUC@30 and the accuracy of camera centres."""
        metrics = evaluate(self.network, held_out, EVALUATED_SETS)
        self.model.train()
        values = [
            {"RRA@15": one.rra["15"], "RTA@15": one.rta["15"], "AUC@30": one.auc_30, "centres": one.center_accuracy}
            for one in metrics
        ]
        return {name: float(np.mean([value[name] for value in values])) for name in values[0]}

    def save(self) -> None:
        """Writes a checkpoint and deletes all but the newest two. Raises ConfigError if the weights are not finite, and
        CheckpointError if the disk is full."""
        # Otherwise all checkpoints that are kept would in time be ones that no run can go on from.
        if not torch.stack([value.isfinite().all() for value in self.network.parameters()]).all():
            raise self._divergence("weights are not finite")
        if self.accelerator.is_main_process:
            path = self._checkpoint_path()
            content = {
                "state_dict": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "iteration": self.iteration,
                "settings": dict(flatten(self.settings)),
            }
            checkpoint.write(content, path)
            checkpoint.prune(path.parent)
        self.accelerator.wait_for_everyone()

    def _checkpoint_path(self) -> Path:
        return self.settings.folder / CHECKPOINTS / f"ckpt_{self.iteration:08d}.pth"

    def _log(self, loss: float, seconds: float) -> None:
        path = self.settings.folder / _LOSS_LOG
        line = json.dumps({"step": self.iteration, "loss": loss, "seconds": round(seconds, 4)})
        try:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        except OSError as error:
            raise write_error(path, error, "hydra.run.dir") from error

    def _forget_losses(self) -> None:
        """Removes the losses of steps that are done again, and of a line that was cut short."""
        path = self.settings.folder / _LOSS_LOG
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.iteration]
            write_file(path, "".join(kept).encode(), "hydra.run.dir")


def _make_model(settings: Settings, saved: dict[str, Any] | None) -> RayDiffuser:
    """The model with the weights it begins with, on the CPU."""
    torch.manual_seed(settings.training.seed)
    size, stage = SIZES[settings.model.size], "dense" if settings.training.dpt_head else "sparse"
    if saved is not None:
        model = files.build_model(saved["state_dict"])
        if (model.size, model.stage) != (dataclasses.replace(size, head_width=model.size.head_width), stage):
            raise CheckpointError("The checkpoint is of another size or stage than its settings say: it is damaged.")
        if settings.model.residual not in ("auto", str(model.residual is not None)):
            raise CheckpointError(
                f"The run in {settings.folder} cannot go on with model.residual={settings.model.residual}, because its "
                f"model has {model.residual is not None}: leave it out, or begin a new run with training.pretrain_path."
            )
        return model
    if not settings.training.pretrain_path:
        return RayDiffuser(_load_encoder(settings), size, stage, settings.has_residual)
    state = files.read_weights(Path(settings.training.pretrain_path))
    encoder = {name.removeprefix("encoder.vit."): value for name, value in state.items() if name.startswith("encoder.")}
    vit = VisionTransformer.from_state_dict(encoder) if encoder else _load_encoder(settings)
    model = RayDiffuser(vit, size, stage, settings.has_residual)
    if stage == "sparse":
        files.load_exactly(model, state)
    else:
        files.dense_from_sparse(model, state)
    return model


def _load_encoder(settings: Settings) -> VisionTransformer:
    file = settings.model.encoder_weights
    weights = Dinov2Extractor.weights_source(Dinov2Config(weights=Path(file) if file else None))
    path = resolve(dataclasses.replace(weights, option="model.encoder_weights"))
    vit = VisionTransformer.from_state_dict(load_state_dict(path))
    if vit.patch_px != 14 or vit.register_tokens is not None:
        raise ConfigError(
            f"model.encoder_weights {path} is a ViT with patches of {vit.patch_px} pixels"
            f"{' and registers' if vit.register_tokens is not None else ''}: use DINOv2 ViT-S/14 without registers."
        )
    return vit
