"""DiffusionSfM's tiny model on a room of `f3rm-ext scene synth`, on one CPU core: poses and endpoints of both stages.

    f3rm-ext scene synth room1 --num-images 384 --width 112 --height 84 --seed 1 --light-rays 4
    f3rm-ext sfm prepare --output data --category room --captures room1
    python benchmarks/tiny_diffusion.py encoder --data data --vit dinov2_vits14.pth --out encoder.pth
    python benchmarks/tiny_diffusion.py train --data data --encoder encoder.pth --runs runs
    python benchmarks/tiny_diffusion.py measure --data data --runs runs

`encoder` takes the first ten blocks of a ViT-S/14 and fits the final norm to the images: every channel has mean 0 and
variance 1 over all patches. `train` runs `f3rm-ext sfm train` for each row of `RUNS`; those that are there already are
left as they are. `measure` draws image sets from the held-out images and writes results/tiny_diffusion.json after every
model; rows that the file has already are kept, so delete it to measure anew. The peers of a dense model are the sparse
one that it began with, its prediction interpolated, and a dense model whose head predicts alone, after as many steps.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.features.extractors.weights import load_state_dict
from f3rm_ext.sfm.diffusion.checkpoint import build_model, dense_from_sparse, read_weights
from f3rm_ext.sfm.diffusion.co3d import Co3dScenes, SceneSample
from f3rm_ext.sfm.diffusion.encoder import ImageEncoder
from f3rm_ext.sfm.diffusion.model import RayDiffuser, upsampled
from f3rm_ext.sfm.diffusion.prediction import predict_maps
from f3rm_ext.sfm.metrics import compare_poses
from f3rm_ext.sfm.rays import map_points
from f3rm_ext.sfm.recovery import recover_cameras

CATEGORY, SIDE_PX, PATCHES, BLOCKS, DENSE, IMAGES = "room", 56, 4, 10, 16, 8
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A training."""

    name: str
    begins_with: str
    """Run whose weights it begins with; none for random ones."""
    steps: int
    settings: tuple[str, ...]

    @property
    def checkpoint(self) -> str:
        """Its last checkpoint, in the folder of all runs."""
        return f"{self.name}/checkpoints/ckpt_{self.steps:08d}.pth"


_SPARSE = ("training.batch_size=16", "training.beta2=0.95", "training.gradient_clipping=True")
_DENSE = (*_SPARSE[1:], "training.batch_size=2", "training.lr=3e-4", "training.dpt_head=True")
RUNS = (
    Run("sparse_a", "", 1500, (*_SPARSE, "training.lr=1e-3")),
    Run("sparse_b", "sparse_a", 400, (*_SPARSE, "training.lr=3e-4", "training.seed=1")),
    Run("dense", "sparse_b", 300, _DENSE),
    Run("dense_head_alone", "sparse_b", 300, (*_DENSE, "model.residual=False")),
)
SPARSE = RUNS[1]
"""The sparse model that is measured, and that the dense ones begin with."""


def scenes(data: Path, split: str, images: int, cells: int) -> Co3dScenes:
    """Image sets, cut alike every time."""
    return Co3dScenes(
        data,
        [CATEGORY],
        "train" if split == "train" else "test",
        num_images=images,
        cells=cells,
        patches=PATCHES,
        image_size_px=SIDE_PX,
        augment=False,
        seed=0,
    )


@dataclass
class Encoder:
    """Writes the first blocks of a ViT with a norm fitted to the training images."""

    data: Path
    """Folder that `f3rm-ext sfm prepare` wrote."""
    vit: Path
    """ViT-S/14 whose blocks are used."""
    out: Path = Path("encoder.pth")
    """File to write."""

    def main(self) -> None:
        """Writes it."""
        state = {
            name: value.float()
            for name, value in load_state_dict(self.vit).items()
            if not name.startswith("blocks.") or int(name.split(".")[1]) < BLOCKS
        }
        encoder = ImageEncoder(VisionTransformer.from_state_dict(dict(state)))
        found = scenes(self.data, "train", 2, PATCHES)
        patches = []
        with torch.no_grad():
            for sequence in found.sequences:
                images = found.load(sequence.frames, np.random.default_rng(0)).images
                patches += [encoder(part[None]).patches[0].movedim(1, -1).flatten(0, 2) for part in images.split(8)]
        values = torch.cat(patches)
        mean, deviation = values.mean(dim=0), values.std(dim=0)
        state["norm.weight"] = state["norm.weight"] / deviation
        state["norm.bias"] = (state["norm.bias"] - mean) / deviation
        torch.save(state, self.out)


@dataclass
class Train:
    """Trains what is not there yet."""

    data: Path
    """Folder that `f3rm-ext sfm prepare` wrote."""
    encoder: Path
    """What `encoder` wrote."""
    runs: Path = Path("runs")
    """Folder of the runs."""
    only: tuple[str, ...] = ()
    """Names of runs; by default all."""

    def main(self) -> None:
        """Trains."""
        for run in RUNS:
            if (self.only and run.name not in self.only) or (self.runs / run.checkpoint).is_file():
                continue
            rays = PATCHES * (DENSE if "training.dpt_head=True" in run.settings else 1)
            words = [
                *("model.size=tiny", f"model.encoder_weights={self.encoder}", f"dataset.path={self.data}"),
                *(f"dataset.category={CATEGORY}", f"dataset.image_size={SIDE_PX}", f"model.num_images={IMAGES}"),
                *("dataset.apply_augmentation=False", "debug.wandb=False", "training.num_workers=0"),
                *(f"training.full_num_patches_x={rays}", f"training.full_num_patches_y={rays}"),
                *("training.interval_evaluate=0", "training.interval_save_checkpoint=50"),
                *(f"training.max_iterations={run.steps}", f"hydra.run.dir={self.runs / run.name}", *run.settings),
            ]
            if run.begins_with:
                begin = next(one for one in RUNS if one.name == run.begins_with)
                words.append(f"training.pretrain_path={self.runs / begin.checkpoint}")
            program = Path(sys.executable).with_name("f3rm-ext")
            subprocess.run([program, "sfm", "train", *words], check=True)


@dataclass
class Measure:
    """Measures poses and endpoints of image sets that no training saw."""

    data: Path
    """Folder that `f3rm-ext sfm prepare` wrote."""
    runs: Path = Path("runs")
    """Folder of the runs."""
    sets: int = 8
    """Image sets."""
    split: str = "test"
    """Images to draw from: test for held-out ones, or train."""
    out: Path = HERE / "results" / "tiny_diffusion.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Prints and writes the rows."""
        torch.set_num_threads(1)
        truth = scenes(self.data, self.split, IMAGES, PATCHES * DENSE)
        training_images = scenes(self.data, "train", IMAGES, PATCHES).num_frames
        options = {"sets": self.sets, "images": IMAGES, "split": self.split, "training_images": training_images}
        report: dict[str, Any] = {"rows": []}
        if self.out.is_file():
            report = json.loads(self.out.read_text())
            assert report["options"] == options, f"{self.out} has other options: delete it"
        report |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        report |= {"cores": os.cpu_count(), "bfloat16": compat.has_bfloat16_matrix_units(), "options": options}
        if "true_rays" not in report:
            rays = scenes(self.data, self.split, IMAGES, PATCHES)
            errors = [endpoint_errors(rays[number].maps, truth[number]) for number in range(self.sets)]
            report["true_rays"] = means(errors)
            self.out.write_text(json.dumps(report, indent=1) + "\n")
        for row, model in self._models():
            if any(row.items() <= known.items() for known in report["rows"]):
                continue
            start = time.process_time()
            found = measure(model.eval(), truth, self.sets)
            report["rows"].append({**row, **found, "cpu_s_per_set": (time.process_time() - start) / self.sets})
            print(json.dumps(report["rows"][-1]), flush=True)
            self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _models(self) -> Iterator[tuple[dict[str, Any], RayDiffuser]]:
        """The measured models, each with how it came about."""
        sparse = read_weights(self.runs / SPARSE.checkpoint)
        model = build_model(sparse)
        yield {"model": "sparse", "residual": False, "steps": self._steps(SPARSE)}, model
        dense = RayDiffuser(model.encoder.vit, model.size, "dense", residual=True)
        dense_from_sparse(dense, sparse)
        yield {"model": "dense", "residual": True, "steps": 0}, dense
        for run in RUNS:
            if run.begins_with == SPARSE.name and (self.runs / run.checkpoint).is_file():
                found = build_model(read_weights(self.runs / run.checkpoint))
                yield {"model": "dense", "residual": found.residual is not None, "steps": run.steps}, found

    @staticmethod
    def _steps(run: Run) -> int:
        """Steps of a run and of those before it."""
        before = next((one for one in RUNS if one.name == run.begins_with), None)
        return run.steps + (Measure._steps(before) if before else 0)


def endpoint_errors(maps: Tensor, true: SceneSample) -> dict[str, float]:
    """Mean distance of endpoints in the frame of the first camera, whose median point is at distance 1.

    The truth has 16 × 16 cells per patch. If the maps have one, it is repeated, and for another figure interpolated.
    """

    def error(maps: Tensor) -> float:
        return float((map_points(maps)[1] - map_points(true.maps)[1]).norm(dim=-1)[true.known > 0].mean())

    if maps.shape == true.maps.shape:
        return {"endpoints": error(maps)}
    repeated = maps.repeat_interleave(DENSE, dim=-1).repeat_interleave(DENSE, dim=-2)
    return {"endpoints": error(repeated), "endpoints_interpolated": error(upsampled(maps[None])[0])}


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of all figures."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def measure(model: RayDiffuser, truth: Co3dScenes, count: int) -> dict[str, float]:
    """Means over image sets: poses with known intrinsics, and endpoints."""
    rows = []
    sizes = torch.full((IMAGES, 2), float(SIDE_PX))
    for number in range(count):
        scene = truth[number]
        # In the precision of training, which is several times as fast where the CPU has units for it.
        with torch.autocast("cpu", torch.bfloat16, enabled=compat.has_bfloat16_matrix_units()):
            maps = predict_maps(model, scene.images, scene.ndc, torch.Generator().manual_seed(number))
        cameras = recover_cameras(maps, sizes, (scene.focals_px, scene.principals_px))
        true = (scene.rotations.double().numpy(), scene.centers.double().numpy())
        found = compare_poses((cameras.rotations.numpy(), cameras.centers.numpy()), true)
        poses = {"rra_15": found.rra["15"], "rta_15": found.rta["15"], "auc_30": found.auc_30}
        rows.append({**poses, "centers": found.center_accuracy, **endpoint_errors(maps, scene)})
    return means(rows)


if __name__ == "__main__":
    chosen = tyro.cli(
        Annotated[Encoder, tyro.conf.subcommand("encoder")]
        | Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Measure, tyro.conf.subcommand("measure")]
    )
    chosen.main()
