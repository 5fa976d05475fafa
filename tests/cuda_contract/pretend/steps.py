"""Whole steps of training, pictures and queries of the methods on the pretended GPU, counted."""

import functools
import importlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from PIL import Image

from f3rm_ext.engine.optimizers import fit_optimizers
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import score_image
from f3rm_ext.splat.features.heads import LiftedHead
from pretend.ledger import Ledger, counted
from pretend.tensors import CUDA, is_pretended

PHASES = ("batch", "before", "forward", "backward", "optimizer", "after")
Counts = dict[str, Ledger]


def write_capture(folder: Path, classes: int = 8, size_px: tuple[int, int] = (64, 48)) -> Path:
    """Writes six photos of noise, with labels, from cameras around the origin.

    Args:
        classes: labels, which is the dimension of the features.
    """
    width, height = size_px
    dice = np.random.default_rng(0)
    frames = []
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for index in range(6):
        turn = index * math.tau / 6
        x, y = math.cos(turn), math.sin(turn)
        # It looks at the origin, with z up.
        pose = [[-y, 0.0, x, 2 * x], [x, 0.0, y, 2 * y], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
        name = f"{index}.png"
        Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "images" / name)
        labels = dice.integers(0, classes, (height, width), dtype=np.uint8)
        Image.fromarray(labels).save(folder / "labels" / name)
        frames.append({"file_path": f"images/{name}", "label_file_path": f"labels/{name}", "transform_matrix": pose})
    lens = {"fl_x": width, "fl_y": width, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    names = ["nothing", *(f"thing {number}" for number in range(1, classes))]
    (folder / "transforms.json").write_text(json.dumps({**lens, "classes": names, "frames": frames}))
    return folder


@dataclass
class Run:
    """A run that is about to train: what nerfstudio's trainer has."""

    config: Any
    pipeline: Any
    optimizers: Optimizers
    scaler: Any
    callbacks: list[TrainingCallback]

    @property
    def model(self) -> Any:
        """The model."""
        return self.pipeline.model

    def step(self, step: int) -> Counts:
        """Does what nerfstudio's ``Trainer.train_iteration`` and the callbacks around it do, in float32."""
        counts: Counts = {}
        with counted() as counts["before"]:
            self.before(step)
        with counted() as counts["batch"]:
            inputs, batch = self.pipeline.datamanager.next_train(step)
        with counted() as counts["forward"]:
            _, losses, _ = self.losses(inputs, batch)
            loss = functools.reduce(torch.add, losses.values())
        with counted() as counts["backward"]:
            self.scaler.scale(loss).backward()
        with counted() as counts["optimizer"]:
            self.optimizers.optimizer_scaler_step_all(self.scaler)
            scale = self.scaler.get_scale()
            self.scaler.update()
            if scale <= self.scaler.get_scale():
                self.optimizers.scheduler_step_all(step)
        with counted() as counts["after"]:
            self._call(TrainingCallbackLocation.AFTER_TRAIN_ITERATION, step)
        return counts

    def before(self, step: int) -> None:
        """Does what comes before a step."""
        self.pipeline.train()
        self._call(TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, step)
        self.optimizers.zero_grad_all()

    def losses(self, inputs: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns outputs, losses and metrics of a batch."""
        outputs = self.model(inputs)
        metrics = self.model.get_metrics_dict(outputs, batch)
        return outputs, self.model.get_loss_dict(outputs, batch, metrics), metrics

    def score(self, width: int, height: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Draws a picture with the scores of a text-like query."""
        self.pipeline.eval()
        name, head = next(iter(self.model.query_heads().items()))
        vectors = torch.nn.functional.normalize(torch.ones(2, head.dim) + torch.eye(2, head.dim), dim=-1)
        positives, negatives = Embeddings(vectors[:1], ("a",)), Embeddings(vectors[1:], ("b",))
        query = Query(name="query", positives=positives, negatives=negatives, head=name)
        return score_image(self.model, look_at(width, height), [query])

    def query(self, width: int, height: int) -> Counts:
        """Counts :meth:`score`."""
        with counted() as ledger:
            self.score(width, height)
        return {"picture": ledger}

    def _call(self, location: TrainingCallbackLocation, step: int) -> None:
        for callback in self.callbacks:
            callback.run_callback_at_location(step, location)


def look_at(width: int, height: int) -> Cameras:
    """A camera that looks at the middle of the scene, on the CPU."""
    pose = torch.eye(4)[None, :3]
    pose[0, 2, 3] = 0.8
    focal_px = 0.8 * width
    return Cameras(pose, fx=focal_px, fy=focal_px, cx=width / 2, cy=height / 2, width=width, height=height)


def make_peer(method: str, capture: Path, cache: Path, change: Callable[[Any], None] = lambda config: None) -> Run:
    """Builds a run of one of nerfstudio's own methods, see :func:`make_run`."""
    from nerfstudio.configs.method_configs import all_methods

    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    config: Any = all_methods[method]
    manager = config.pipeline.datamanager
    manager.dataparser = CaptureDataParserConfig(data=capture)
    manager.data = capture
    change(config)
    # Its weights would be loaded from the network.
    lpips = "LearnedPerceptualImagePatchSimilarity"
    with ExitStack() as stack:
        for module in ("torchmetrics.image.lpip", "nerfstudio.models.nerfacto", "nerfstudio.models.splatfacto"):
            if hasattr(importlib.import_module(module), lpips):
                stack.enter_context(mock.patch(f"{module}.{lpips}", lambda **_: torch.nn.Identity()))
        return _run_of(config, cache)


def make_run(method: str, capture: Path, cache: Path, change: Callable[[Any], None] = lambda config: None) -> Run:
    """Builds a run on the pretended GPU, or on the CPU, with the capture's labels as features."""
    config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
    manager = config.pipeline.datamanager
    manager.data = capture
    manager.features.extractors = (f"labels:data={capture}",)
    manager.features.cache_dir = cache
    change(config)
    return _run_of(config, cache)


def _run_of(config: Any, folder: Path) -> Run:
    device = str(CUDA) if is_pretended() else "cpu"
    pipeline = config.pipeline.setup(device=device, test_mode="val")
    fit_optimizers(config.optimizers, config)
    optimizers = Optimizers(config.optimizers, pipeline.get_param_groups())
    with mock.patch("torch.amp.grad_scaler.torch.cuda.is_available", lambda: True):
        scaler = torch.amp.GradScaler("cuda", enabled=bool(config.mixed_precision) and device != "cpu")
    attributes: Any = TrainingCallbackAttributes(
        optimizers=optimizers,
        grad_scaler=scaler,
        pipeline=pipeline,
        trainer=SimpleNamespace(config=config, pipeline=pipeline, base_dir=folder),  # type: ignore[arg-type]
    )
    return Run(config, pipeline, optimizers, scaler, pipeline.get_training_callbacks(attributes))


def lift_made_up_features(run: Run, dim: int) -> None:
    """Gives splats a feature, as lifting would."""
    display = DisplayBasis(torch.zeros(dim), torch.eye(3, dim), -torch.ones(3), torch.ones(3))
    spec = FeatureSpec(name="dense", dim=dim, extractor="dense", identity={"extractor": "dense"}, display=display)
    codes = torch.ones(run.model.num_gaussians, dim, dtype=torch.float16, device=CUDA)
    run.model.lifted.add(LiftedHead(spec, codes).to(CUDA))


def total(counts: Mapping[str, Ledger]) -> Ledger:
    """The account of all phases together."""
    whole = Ledger()
    for ledger in counts.values():
        whole.launches += ledger.launches
        whole.modules += ledger.modules
        whole.waits += ledger.waits
        whole.lines |= ledger.lines
    return whole
