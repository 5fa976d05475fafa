"""Step time and memory of training the pose estimator at the published size, beside its plan.

    python benchmarks/pose_training.py --device cuda                       # one GPU; writes results/pose_training.json
    python benchmarks/pose_training.py --batch 1 --images 2 --steps 2 --only dense-head   # fits a CPU with 8 GiB

The real trainer of `f3rm-ext sfm train` takes its steps with the options of `--preset sparse` and `--preset dense`, as
one process of the eight. The dense stage has two rows: its first steps train the head alone, the later ones everything.
Scenes are noise in pinned memory, of the published shape, and the encoder is a DINOv2 ViT-S/14 with random weights:
both cost what real ones cost. Reading data and averaging gradients over GPUs are left out.

Memory is that of a step with the most images. Times are given for such steps, and for steps with 2 to 8 images, as they
are trained. If the published batch does not fit, the report says so, and half of it is tried. Rows of other sizes that
the file has already are kept.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import training_steps
from training_steps import Row, TensorMemory, count_step, halved_until_it_fits, shortage_sentence, time_steps

ROWS: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "sparse": ("sparse", (), 400_000),
    "dense-head": ("dense", (), 50_000),
    "dense-all": ("dense", ("training.reinit_after=0",), 750_000),
}
"""Preset, settings beside it, and the steps that the published training takes in this way."""
TINY = ("model.size=tiny", "dataset.image_size=56", "model.num_images=3", "training.batch_size=2")
TINY_PATCHES = 4
_KNOWN = 0.9
"""Share of cells with a depth."""


class MadeUpScenes:
    """Scenes of noise."""

    augment, num_frames = True, 100_000

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def __getitem__(self, number: int) -> Any:
        """Returns a sample, see :class:`SceneSample`."""
        from f3rm_ext.sfm.diffusion.co3d import SceneSample
        from f3rm_ext.sfm.rays import CHANNELS, cell_ndc, normalize_maps

        dice = torch.Generator().manual_seed(number)
        images, cells, patches = self.settings.model.num_images, self.settings.cells, self.settings.patches
        side_px = self.settings.dataset.image_size
        lens = torch.full((images, 2), float(side_px))
        return SceneSample(
            images=torch.rand(images, 3, side_px, side_px, generator=dice),
            maps=normalize_maps(torch.randn(images, CHANNELS, cells, cells, generator=dice)),
            known=(torch.rand(images, cells, cells, generator=dice) < _KNOWN).float(),
            ndc=cell_ndc(patches, patches, lens).expand(images, -1, -1, -1),
            focals_px=lens,
            principals_px=lens / 2,
            rotations=torch.eye(3).expand(images, 3, 3),
            centers=torch.randn(images, 3, generator=dice),
            numbers=torch.arange(images) + images * number,
        )


def make_settings(name: str, options: argparse.Namespace, folder: Path) -> Any:
    """Returns the settings of a row.

    Args:
        folder: where random weights of the encoder are written, if no others are given.
    """
    from f3rm_ext.sfm.diffusion.plan import build_encoder
    from f3rm_ext.sfm.diffusion.settings import parse_settings

    preset, more, _ = ROWS[name]
    weights = options.encoder
    if weights is None:
        weights = folder / "vit.pth"
        torch.manual_seed(0)
        torch.save(build_encoder().state_dict(), weights)
    words = [*more, f"model.encoder_weights={weights}", "training.interval_evaluate=0", "debug.wandb=False"]
    if options.tiny:
        cells = TINY_PATCHES * (16 if preset == "dense" else 1)
        words += [*TINY, f"training.full_num_patches_x={cells}", f"training.full_num_patches_y={cells}"]
    words += [f"training.batch_size={options.batch}"] if options.batch else []
    words += [f"model.num_images={options.images}"] if options.images else []
    return parse_settings(words, preset)


def batches(settings: Any, device: torch.device) -> Iterator[Any]:
    """Yields batches on the device, copied as `Training.run` copies them; the noise of two of them in turn."""
    from f3rm_ext.sfm.diffusion.co3d import SceneSample

    scenes, batch = MadeUpScenes(settings), settings.training.batch_size
    kept = []
    for first in (0, batch):
        parts = zip(*(scenes[first + place] for place in range(batch)), strict=True)
        kept.append([torch.stack(part) for part in parts])
    if device.type == "cuda":
        kept = [[part.pin_memory() for part in parts] for parts in kept]
    while True:
        for parts in kept:
            yield SceneSample(*(part.to(device, non_blocking=True) for part in parts))


def measure(name: str, settings: Any, options: argparse.Namespace) -> Row:
    """Builds the trainer, and measures its steps."""
    from accelerate import Accelerator

    from f3rm_ext.sfm.diffusion.training import Training

    accelerator = Accelerator(mixed_precision="no", cpu=options.device == "cpu")
    device, model = accelerator.device, settings.model
    seen: list[int] = []

    with TensorMemory(device) as memory:
        training = Training(settings, accelerator, MadeUpScenes(settings))
        samples = batches(settings, device)

        def count(_: object, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[1].shape[0] * inputs[1].shape[1])

        def step() -> float:
            training.step(next(samples))
            training.iteration += 1
            return seen.pop()

        training.model.register_forward_pre_hook(count)
        random, model.random_num_images = model.random_num_images, False
        step()  # makes the moments
        with memory.measured():
            step()
    found = memory.result(*planned(settings, training))
    full = time_steps(step, device, options.warm_up, options.steps, options.seconds / 2)
    model.random_num_images = random
    found |= {f"full_{key}": value for key, value in full.items()}
    found |= time_steps(step, device, options.warm_up, options.steps, options.seconds / 2)
    found |= count_step(step, device)
    return {
        "batch": settings.training.batch_size,
        "images": model.num_images,
        "precision": str(training.dtype).removeprefix("torch.") if training.amp else "float32",
        "encoder": "random weights" if options.encoder is None else options.encoder.name,
        **found,
        "stage_steps": ROWS[name][2],
        "stage_days": round(ROWS[name][2] / found["steps_per_s"] / 86_400, 2),
    }


def planned(settings: Any, training: Any) -> tuple[int, int]:
    """Returns the plan of a step: the bytes of its tensors, and with allowances for the rest.

    Args:
        training: whose precision is planned, which is not that of the settings on some CPUs.
    """
    from f3rm_ext.sfm.diffusion.plan import step_memory

    asked, settings.training.mixed_precision = settings.training.mixed_precision, training.amp
    held = step_memory(settings, 1, settings.training.reinit_after == 0, training.device.type)
    settings.training.mixed_precision = asked
    tensors = sum(size for category, size in held.items() if category not in ("context", "fragmentation"))
    return tensors, sum(held.values())


def run_one(name: str, options: argparse.Namespace) -> Row:
    """Returns a row: of the given batch, or of the largest half of it that fits."""
    with tempfile.TemporaryDirectory(prefix="pose-training-") as folder:
        settings = make_settings(name, options, Path(folder))

        def with_batch(batch: int) -> Row:
            settings.training.batch_size = batch
            return measure(name, settings, options)

        found, refused = halved_until_it_fits(settings.training.batch_size, with_batch, shortage_sentence)
    return {**found, "refused": refused}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = training_steps.make_parser(__doc__, list(ROWS), "pose_training.json", seconds=16.0)
    parser.add_argument("--batch", type=int, help="scenes per step; by default that of the preset")
    parser.add_argument("--images", type=int, help="images per scene at most; by default 8")
    parser.add_argument("--encoder", type=Path, help="weights of DINOv2 ViT-S/14; by default random ones")
    parser.add_argument("--tiny", action="store_true", help="the tiny model and small images, for a rehearsal")
    return parser


if __name__ == "__main__":
    training_steps.run_rows(make_parser(), run_one, ("label", "batch", "images"))
