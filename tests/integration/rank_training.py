"""``ns-train`` whose rays get the same jitter however many processes share them, so that runs can be compared."""

import os
import sys
from typing import Any

import torch
from nerfstudio.model_components import ray_samplers
from nerfstudio.scripts import train

from f3rm_ext.engine import launch

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
RAYS = 255


class SharedJitter:
    """torch, but random numbers of a batch are those of a process's rays among all rays of the batch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def rand(self, shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        """Uniform numbers for each n-th ray; nothing special outside of training."""
        own = len(range(RAYS)[RANK::WORLD])
        if shape[0] != own:
            return torch.rand(shape)
        # Each process draws the numbers of all rays, so that all generators stay in step.
        state = torch.Generator().manual_seed(int(torch.randint(2**40, (), generator=self.generator)))
        return torch.rand((RAYS, *shape[1:]), generator=state)[RANK::WORLD].contiguous()

    generator = torch.Generator().manual_seed(5)


def see_both_images() -> None:
    """Has this one process train splats on the mean of the losses of both images that two processes would have."""
    from f3rm_ext.data.image_cycle import ImageCycle
    from f3rm_ext.data.image_stream import ImageStream
    from f3rm_ext.query.pipeline import FeaturePipeline
    from f3rm_ext.splat.densify import default

    seen: list[Any] = []

    def get_train_loss_dict(self: Any, step: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        if not hasattr(self, "streams"):
            dataset = self.datamanager.train_dataset
            cycles = [ImageCycle(len(dataset), None, None, seed=42, shards=2, shard=shard) for shard in range(2)]
            self.streams = [ImageStream(dataset, cycle) for cycle in cycles]
        seen.clear()
        sums: dict[str, Any] = {}
        for stream in self.streams:
            camera, batch = stream.next(self.datamanager.config.halvings(step))
            outputs = self.model(camera)
            seen.append(outputs["rendered"].rasterization)
            for name, loss in self.model.get_loss_dict(outputs, batch).items():
                sums[name] = sums.get(name, 0) + loss / 2
        return {}, sums, {}

    make_info, update = default._info, default._CappedStrategy._update_state

    def update_with_both(self: Any, params: Any, state: Any, _: Any, packed: bool = False) -> None:
        for rasterization in seen:
            info = {**make_info(rasterization, self.absgrad), "n_cameras": 2}
            update(self, params, state, info, packed)

    FeaturePipeline.get_train_loss_dict = get_train_loss_dict  # type: ignore[method-assign]
    default._CappedStrategy._update_state = update_with_both  # type: ignore[method-assign]


class Entries:
    """Centres of this process's Gaussians in the images of all processes, as gsplat gives them; see :func:`shard`."""

    requires_grad = True

    def __init__(self, centres: torch.Tensor, counts: list[int]) -> None:
        self.centres, self.counts = centres, counts

    def retain_grad(self) -> None:
        self.centres.retain_grad()

    @property
    def grad(self) -> torch.Tensor:
        """Every process reads it at the same time."""
        assert self.centres.grad is not None
        return own_entries(self.centres.grad, self.counts)


def own_entries(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """What the images of all processes say of this process's Gaussians."""
    everyone = [torch.empty_like(rows) for _ in counts]
    torch.distributed.all_gather(everyone, rows.contiguous())
    return torch.cat([of_image.split(counts)[RANK] for of_image in everyone])


def shard() -> None:
    """Divides Gaussians over processes on the CPU: each gathers all of them for its image, as no program should."""
    import torch.distributed.nn.functional as collectives

    from f3rm_ext.splat import options, rendering
    from f3rm_ext.splat.gaussians import Ellipsoids
    from f3rm_ext.splat.rasterize import rasterize
    from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

    def gathered(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        padded = torch.nn.functional.pad(rows.flatten(1), (0, 0, 0, max(counts) - len(rows)))
        parts = [part[:count] for part, count in zip(collectives.all_gather(padded), counts, strict=True)]
        return torch.cat(parts).reshape(-1, *rows.shape[1:])

    def rasterize_sharded(shapes: Ellipsoids, dc: Any, rest: Any, degree: int, camera: Any, background: Any) -> Any:
        means, quats, sizes, alphas = shapes
        viewmat = camera.viewmat
        sent = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD)]
        torch.distributed.all_gather(sent, torch.tensor([len(means)]))
        counts = [int(count) for count in sent]
        everything = [gathered(rows, counts) for rows in (means, quats, sizes, alphas[:, None], dc, rest)]
        means, quats, sizes, alphas, dc, rest = everything
        position = -viewmat[:3, :3].T @ viewmat[:3, 3]
        colors = sh_colors(degree, means.detach() - position, dc, rest)
        drawn = rasterize(Ellipsoids(means, quats, sizes, alphas[:, 0]), colors, camera, background)
        drawn.rows = torch.arange(counts[RANK]).repeat(WORLD)
        drawn.radii = own_entries(drawn.radii, counts)
        drawn.means2d = Entries(drawn.means2d, counts)  # type: ignore[assignment]
        return drawn

    rendering.rasterize_sharded = rasterize_sharded  # type: ignore[assignment]
    options.check_sharding = lambda trainer: None  # type: ignore[assignment]


def launch_as_nerfstudio_does() -> None:
    """Makes this process a worker of nerfstudio's, which insists on CUDA and then does the same with gloo."""
    place = {name: os.environ.pop(name) for name in list(os.environ) if name in launch.VARIABLES}
    rank, world, real = int(place["RANK"]), int(place["WORLD_SIZE"]), (torch.cuda.is_available, torch.cuda.device_count)

    def main(*args: Any) -> None:
        torch.cuda.is_available, torch.cuda.device_count = real
        train.train_loop(*args)

    def work(config: Any, **_: Any) -> None:
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: world
        url = f"tcp://127.0.0.1:{place['MASTER_PORT']}"
        train._distributed_worker(rank, main, world, world, 0, url, config, device_type="cpu")

    train.launch = work


def drift_apart() -> None:
    """Changes one number of rank 1 by one bit, as a GPU that computes otherwise might."""
    from f3rm_ext.query.pipeline import FeaturePipeline

    get_train_loss_dict = FeaturePipeline.get_train_loss_dict

    def drifting(self: Any, step: int) -> Any:
        if RANK == 1 and step == 2:
            next(self.model.field.parameters()).data.view(-1).view(torch.int32)[7] += 1
        return get_train_loss_dict(self, step)

    FeaturePipeline.get_train_loss_dict = drifting  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "by_nerfstudio" in sys.argv:
        launch_as_nerfstudio_does()
    if "drifting" in sys.argv:
        drift_apart()
    if "--pipeline.model.shard-gaussians" in sys.argv:
        shard()
    if "both_images" in sys.argv:
        see_both_images()
    if "--optimizers.fields.optimizer.eps" in sys.argv:  # the comparison of runs
        ray_samplers.torch = SharedJitter()  # type: ignore[attr-defined]
    sys.argv[0] = "ns-train"
    train.entrypoint()
