"""Steps of the pose estimator's training and of MoCo on the pretended GPU, counted; in float32."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.moco.options import TrainConfig, make_plan
from f3rm_ext.moco.training import Training as MocoTraining
from f3rm_ext.sfm.diffusion.co3d import SceneSample
from f3rm_ext.sfm.diffusion.settings import parse_settings
from f3rm_ext.sfm.diffusion.training import Training as PoseTraining
from pretend.ledger import counted
from pretend.steps import Counts
from pretend.tensors import CUDA

SIDE_PX, PATCHES, SCENES, IMAGES = 28, 2, 2, 3


class NoScenes:
    """Data that nobody reads."""

    augment, num_frames = True, 100

    def __getitem__(self, number: int) -> SceneSample:
        """Fails."""
        raise IndexError(number)


def pose_step(preset: Any, folder: Path, *words: str) -> Counts:
    """Counts the second step of a tiny model, with the copy of its batch.

    Args:
        preset: sparse or dense.
        folder: for the encoder's weights.
    """
    cells = PATCHES * (16 if preset == "dense" else 1)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(VisionTransformer.from_size(64, 2, 2, 14).state_dict(), folder / "vit.pth")
    settings = parse_settings(
        [
            *(f"model.encoder_weights={folder / 'vit.pth'}", "model.size=tiny", f"dataset.image_size={SIDE_PX}"),
            *(f"training.full_num_patches_x={cells}", f"training.full_num_patches_y={cells}"),
            *(f"training.batch_size={SCENES}", f"model.num_images={IMAGES}", "training.interval_evaluate=0"),
            *("training.mixed_precision=False", *words),
        ],
        preset,
    )
    one_process: Any = SimpleNamespace(
        device=CUDA,
        process_index=0,
        num_processes=1,
        prepare_model=lambda model: model,
        reduce=lambda value, _: value,
    )
    training = PoseTraining(settings, one_process, NoScenes())
    many = (SCENES, IMAGES)
    sample = SceneSample(
        images=torch.rand(*many, 3, SIDE_PX, SIDE_PX),
        maps=torch.randn(*many, 8, cells, cells),
        known=torch.ones(*many, cells, cells),
        ndc=torch.zeros(*many, 2, PATCHES, PATCHES),
        focals_px=torch.ones(*many, 2),
        principals_px=torch.ones(*many, 2),
        rotations=torch.eye(3).expand(*many, 3, 3),
        centers=torch.zeros(*many, 3),
        numbers=torch.zeros(many, dtype=torch.int64),
    )
    for training.iteration in range(2):
        with counted() as ledger:
            training.step(SceneSample(*(values.pin_memory().to(CUDA, non_blocking=True) for values in sample)))
    return {"step": ledger}


def moco_step(algorithm: Any, batch: int = 4) -> Counts:
    """Counts the second step of a ResNet-18, of two accumulated batches.

    Args:
        algorithm: v2 or v3.
    """
    more: dict[str, Any] = {"queue_size": 10} if algorithm == "v2" else {}
    config = TrainConfig(
        data=Path("data"), output=Path("out"), algorithm=algorithm, batch_size=batch, epochs=2, image_size=32,
        gradient_accumulation_steps=2, **more,
    )  # fmt: skip
    training = MocoTraining(make_plan(config, 50), "", CUDA)

    def batches() -> Iterator[Any]:
        while True:
            yield (*(torch.rand(batch, 3, 32, 32).pin_memory() for _ in range(2)), torch.arange(batch).pin_memory())

    for _ in range(2):
        with counted() as ledger:
            training.train_step(batches())
    return {"step": ledger}
