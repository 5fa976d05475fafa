"""One field of the GPU day, trained in this process: speed, quality, memory, launches and waits, and a query.

gpu_day.py runs it; the last line of what it prints has the result. The options are those of train_once.py and:
"""

from dataclasses import dataclass
from typing import Any

import torch
import tyro
from peers import tolerate_missing_lpips
from processes import report_result
from step_watch import StepWatch, time_ms
from train_once import TrainOnce

QUALITY = ("psnr", "ssim", "lpips")


@dataclass
class GpuDayField(TrainOnce):
    """Trains one field for some seconds, then measures it."""

    seconds: float = 10.0
    """Seconds of training, without start-up."""
    warm_up: int = 20
    """Steps at the beginning that are not timed."""
    counted: int = 6
    """Steps after the timed ones whose launches and waits are counted."""
    views: int = 4
    """Held-out photos to compare with, spread over all of them."""
    text: str = ""
    """What to look for in a picture after training; empty for no query."""
    picture: tuple[int, int] = (1920, 1080)
    """Width and height of that picture in pixels."""

    def main(self) -> None:
        """Trains, measures, and hands the result over."""
        from nerfstudio.scripts.train import _set_random_seed

        from f3rm_ext.engine.cost import peak_mib, reset_peak

        without_lpips = tolerate_missing_lpips()
        config = self.make_config()
        config.save_config()
        _set_random_seed(self.seed)
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        model = trainer.pipeline.model
        watch = StepWatch(model.device, self.steps - self.counted - 1, self.warm_up, self.seconds, self.counted)
        watch.attach(trainer)
        reset_peak(model.device)
        watch.run(trainer.train)
        # Our methods take the peak back before every step, and remember it.
        peak = max(peak_mib(model.device), model.cost.peak_mib if hasattr(model, "cost") else 0.0)
        rays = trainer.pipeline.datamanager.get_train_rays_per_batch()
        result = {"method": self.method, "rays_per_step": rays, "peak_mib": round(peak), **watch.result()}
        result["rays_per_s"] = round(rays * result["it_per_s"])
        report_result(result)  # pictures take long where time is short
        result |= compare(trainer.pipeline, self.views, without_lpips)
        if self.text:
            result["query"] = ask(model, trainer.pipeline.datamanager.train_dataset.cameras, self.text, self.picture)
        report_result(result)


@torch.no_grad()
def compare(pipeline: Any, views: int, without_lpips: str) -> dict[str, Any]:
    """Returns the means over some held-out photos, and the time of a picture."""
    pipeline.eval()
    model, loader = pipeline.model, pipeline.datamanager.fixed_indices_eval_dataloader
    every = max(1, len(pipeline.datamanager.eval_dataset) // views)
    found: list[dict[str, float]] = []
    ms = 0.0
    for index, (camera, batch) in enumerate(loader):
        if index % every or len(found) == views:
            continue
        there = camera.to(model.device)
        ms = time_ms(lambda there=there: model.get_outputs_for_camera(there), model.device, 1)["ms"]
        metrics, _ = model.get_image_metrics_and_images(model.get_outputs_for_camera(there), batch)
        found.append({name: float(metrics[name]) for name in QUALITY if name in metrics})
    names = [name for name in QUALITY if all(name in metrics and metrics[name] == metrics[name] for metrics in found)]
    means = {name: round(sum(metrics[name] for metrics in found) / len(found), 4) for name in names if found}
    return {
        "views": len(found),
        "picture_ms": ms,
        **means,
        **({"without_lpips": without_lpips} if without_lpips else {}),
    }


def resized(cameras: Any, size: tuple[int, int]) -> Any:
    """Returns the first of some cameras with another number of pixels, on the CPU; the width keeps its angle."""
    from nerfstudio.cameras.cameras import Cameras

    width, height = size
    first = cameras[:1].to("cpu")
    scale = width / float(first.width.item())
    return Cameras(
        first.camera_to_worlds,
        fx=first.fx * scale,
        fy=first.fy * scale,
        cx=width / 2,
        cy=height / 2,
        width=width,
        height=height,
    )


def ask(model: Any, cameras: Any, text: str, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the time of a picture with the scores of a text, and that of encoding the text.

    Args:
        model: with features, of an extractor that understands text.
        cameras: of the capture; the first one's pose is used.
    """
    from f3rm_ext.engine.cost import peak_mib, reset_peak
    from f3rm_ext.query.builders import text_queries
    from f3rm_ext.query.encoders import TextEncoder
    from f3rm_ext.query.queryable import score_image

    model.eval()
    head = next(iter(model.query_heads().values()))
    encoder = TextEncoder(model.device)
    queries = text_queries(head, (text,), encoder, "common")
    encoding = time_ms(lambda: encoder.encode(head, (text,)), model.device, 5)
    camera = resized(cameras, size).to(model.device)
    reset_peak(model.device)
    found = time_ms(lambda: score_image(model, camera, queries), model.device, 20)
    return {
        **found,
        "width": size[0],
        "height": size[1],
        "dimensions": head.dim,
        "encode_ms": encoding["ms"],
        "peak_mib": round(peak_mib(model.device)),
    }


if __name__ == "__main__":
    tyro.cli(GpuDayField).main()
