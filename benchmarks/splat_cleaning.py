r"""Removing floaters: how many of those planted into runs go, what else goes, and what that does to held-out photos.

    ns-train sugar-ext-lite --data fox --max-num-iterations 800 --pipeline.model.regularization none \
        --pipeline.datamanager.camera-res-scale-factor 0.2
    python benchmarks/splat_cleaning.py --runs fox=outputs/fox/sugar-ext-lite/.../config.yml

Each run is cleaned as `f3rm-ext splats clean` does, as it is and with three kinds of floaters: blobs near cameras, big
faint haze, and specks far away from everything; three times, at other places. Beside it the same number of Gaussians
goes by opacity, lowest first.
Prints rows and writes results/splat_cleaning.json, which keeps the rows of other runs.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from processes import write_report
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.budget import SplatBudget
from f3rm_ext.export.clean import clean_splats
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh

RESULT = Path(__file__).parent / "results" / "splat_cleaning.json"
KINDS = ("near", "haze", "far")


def plant(gaussians: Gaussians, views: PinholeCameras, seed: int) -> tuple[Gaussians, Tensor]:
    """Adds floaters: 1 % of the number of Gaussians near cameras, 0.1 % of haze, 1 % far away.

    Returns:
        All Gaussians, and the kind of each: 0 for those there were, then the number in ``KINDS`` from 1.
    """
    noise, count = torch.Generator().manual_seed(seed), max(len(gaussians) // 100, 10)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=noise)

    def make(means: Tensor, size: Tensor, alphas: Tensor) -> Gaussians:
        few = len(means)
        return Gaussians(
            means=means,
            scales=(size * uniform(0.5, 1.5, few, 3)).log(),
            quats=torch.randn(few, 4, generator=noise),
            opacities=torch.logit(alphas)[:, None],
            features_dc=rgb_to_sh(uniform(0, 1, few, 3)),
            features_rest=torch.zeros(few, *gaussians.features_rest.shape[1:]),
        )

    camera = torch.randint(len(views.viewmats), (count,), generator=noise)
    usual = (gaussians.means - views.positions.mean(dim=0)).norm(dim=1).median()
    depth = usual * uniform(0.1, 0.4, count)
    size_px = torch.stack([views.widths[camera], views.heights[camera], torch.ones(count)], dim=1)
    pixels = size_px * torch.cat([uniform(0, 1, count, 2), torch.ones(count, 1)], dim=1)
    rays = torch.einsum("nij,nj->ni", torch.linalg.inv(views.Ks[camera]), pixels)
    ahead = torch.einsum("nji,nj->ni", views.viewmats[camera, :3, :3], rays * depth[:, None])
    size = depth[:, None] * uniform(0.01, 0.05, count, 1)
    near = make(ahead + views.positions[camera], size, uniform(0.1, 0.8, count))
    low, high = torch.quantile(gaussians.means, torch.tensor([0.05, 0.95]), dim=0)
    few = max(count // 10, 5)
    clouds = low + (high - low) * uniform(0, 1, few, 3)
    haze = make(clouds, views.extent() * uniform(0.1, 0.3, few, 1), uniform(0.02, 0.08, few))
    centre = gaussians.means.median(dim=0).values
    radius = torch.quantile((gaussians.means - centre).norm(dim=1), 0.98)
    away = functional.normalize(torch.randn(count, 3, generator=noise), dim=1) * uniform(1.5, 3.5, count, 1)
    far = make(centre + radius * away, 0.01 * radius * torch.ones(count, 1), uniform(0.3, 0.9, count))
    parts = (gaussians, near, haze, far)
    joined = {name: torch.cat([part.tensors()[name] for part in parts]) for name in gaussians.tensors()}
    return Gaussians.from_tensors(joined), torch.cat([torch.full((len(p),), i) for i, p in enumerate(parts)])


def clean(run: SplatRun, gaussians: Gaussians, kinds: Tensor) -> dict[str, Any]:
    """Cleans a run with other Gaussians than its own, and measures it beside pruning by opacity."""
    run.model.set_gaussians(gaussians)  # type: ignore[operator]
    start = time.process_time()
    cleaning = clean_splats(run)
    cpu_s, removed = time.process_time() - start, ~cleaning.kept
    faint_first = gaussians.alphas().argsort()[int(removed.sum()) :]
    return {
        "gaussians": len(gaussians),
        "removed": int(removed.sum()),
        **{name: [int(removed[kinds == i].sum()), int((kinds == i).sum())] for i, name in enumerate(KINDS, 1)},
        "other_share": float(removed[kinds == 0].float().mean()),
        "reasons": {reason.value: count for reason, count in cleaning.counts().items()},
        "withdrawn": [reason.value for reason in cleaning.withdrawn],
        "held_out": cleaning.held_out,
        "psnr_before": cleaning.psnr_before,
        "psnr_after": cleaning.psnr_after,
        "psnr_by_opacity": SplatBudget(run, Path("splats.ply")).psnr(gaussians[faint_first]),
        "cpu_s": cpu_s,
    }


@dataclass(kw_only=True)
class Measure:
    """Measures cleaning."""

    runs: tuple[str, ...]
    """Runs of sugar-ext, as NAME=config.yml."""
    seeds: int = 3
    """Plantings of floaters into each run."""

    def main(self) -> None:
        """Measures all runs."""
        for given in self.runs:
            name, _, config = given.partition("=")
            run = load_splat_run(Path(config))
            own, views = run.splats(), PinholeCameras.of(run.manager.train_dataset.cameras)
            first = {"capture": name, "planted": False}
            _write_row(first | clean(run, own, torch.zeros(len(own))), lambda row, name=name: row["capture"] != name)
            for seed in range(self.seeds):
                _write_row({"capture": name, "planted": True, "seed": seed, **clean(run, *plant(own, views, seed))})


def _write_row(row: dict[str, Any], keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> None:
    """Adds a row to those of the report that are kept."""
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rows = [*filter(keep, report.get("rows", ())), row]
    write_report({"rows": rows}, RESULT)
    print(row, flush=True)


if __name__ == "__main__":
    tyro.cli(Measure).main()
