"""Smaller splats: which Gaussians and which degree of harmonics a file of a given size, or of a given loss, keeps.

Gaussians are pruned by their contribution: the sum of their compositing weights over all pixels of the training views.
Opacity says less, since an opaque Gaussian may be hidden or tiny. What a choice costs is measured on photos.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.splat.features.lifting import accumulate_pixels
from f3rm_ext.splat.files.formats import read_splats, write_splats
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, render
from f3rm_ext.utils.console import image_progress

SizeOf = Callable[[Int[Tensor, " kept"], int], int]
"""Returns the size in bytes of a file with these Gaussians and this degree of harmonics."""
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.45, 0.35, 0.27, 0.2, 0.15, 0.1, 0.07, 0.05)
"""Shares of the Gaussians that a loss is measured for, one after another."""
_MAX_VIEWS = 8
_SPARE = 0.98
"""A first guess aims at this share of the size, as sizes are not quite in proportion."""


@dataclass(frozen=True)
class Reduction:
    """Which Gaussians are kept, and what that costs."""

    rows: Int[Tensor, " kept"]
    """Indices of the Gaussians that are kept, in order."""
    sh_degree: int
    psnr: float
    """Of what is kept after a round trip through the file, dB."""
    full_psnr: float
    """Of all Gaussians as they were trained, dB."""

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} Gaussians with SH degree {self.sh_degree} are kept: {self.psnr:.2f} dB on "
            f"held-out photos after compression, {self.full_psnr:.2f} dB before."
        )


def reduce_splats(
    run: SplatRun,
    size_of: SizeOf,
    max_mb: float | None,
    max_loss_db: float | None,
    sh_degree: int,
) -> Reduction:
    """Chooses the Gaussians and the degree of harmonics of a file, by one of two limits.

    Args:
        run: the run.
        size_of: returns the size in bytes of a file with these rows and this degree.
        max_mb: the highest PSNR within this size, MB; None for the other limit.
        max_loss_db: the smallest file that loses at most this much more than compression itself does, dB.
        sh_degree: the highest degree to choose.

    Raises:
        ConfigError: not even one Gaussian without harmonics fits.
    """
    budget = SplatBudget(run)
    degrees = range(min(sh_degree, budget.gaussians.sh_degree), -1, -1)
    with image_progress("steps") as progress:
        views = progress.add_task("Contributions of the Gaussians", total=len(run.manager.train_dataset))
        order = budget.contributions(lambda: progress.advance(views)).argsort(descending=True).cpu()
        steps = progress.add_task("Degrees of harmonics", total=len(degrees))
        choose = _fit_loss if max_mb is None else _fit_size
        limit = max_loss_db if max_mb is None else max_mb * 1e6
        assert limit is not None
        return choose(budget, order, limit, size_of, degrees, lambda: progress.advance(steps))


class SplatBudget:
    """Measures what a run of splats loses when it is made smaller.

    Args:
        run: the run; its held-out photos are the judges, or its training photos where it holds out none.
    """

    def __init__(self, run: SplatRun) -> None:
        self.run = run
        self.gaussians = run.splats()
        self._photos = run.manager.train_dataset if run.manager.eval_dataset is None else run.manager.eval_dataset
        self._mip = replace(run.model.config.mip, filter_3d=False)

    def contributions(self, on_view: Callable[[], None] = lambda: None) -> Float[Tensor, " gaussians"]:
        """Returns the sum of the compositing weights of each Gaussian over the pixels of all training views."""
        views = PinholeCameras.of(self.run.manager.train_dataset.cameras).to(self.gaussians.means.device)
        scene, total = self._scene(self.gaussians), torch.zeros_like(self.gaussians.means[:, :1])
        for index in range(len(views.viewmats)):
            view = PinholeCameras(*(value[index : index + 1] for value in views))
            pixels = total.new_ones(int(view.heights[0]), int(view.widths[0]), 1)
            total += accumulate_pixels(scene, view, pixels, RenderSettings())
            on_view()
        return total[:, 0]

    @torch.no_grad()
    def psnr(self, gaussians: Gaussians) -> float:
        """Returns the mean PSNR over at most eight photos, dB."""
        model, losses = self.run.model, []
        step = math.ceil(len(self._photos) / _MAX_VIEWS)
        for index in range(0, len(self._photos), step):
            batch = picture_batch(self._photos.picture(index), index, model.device)
            view = PinholeCameras.to_render(self._photos.cameras[index : index + 1], model.device)
            output = render(self._scene(gaussians), view, gaussians.sh_degree, model.background, RenderSettings())
            metrics = model.get_metrics_dict(output.outputs(), batch)
            losses += [float(metrics["psnr"])] if "psnr" in metrics else []
        return sum(losses) / len(losses)

    def compressed_psnr(self, rows: Int[Tensor, " kept"], sh_degree: int) -> float:
        """Returns the PSNR of some Gaussians after a round trip through an .spz file, dB."""
        gaussians = self.gaussians[rows.to(self.gaussians.means.device)].to_sh_degree(sh_degree)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "splats.spz"
            write_splats(path, gaussians, SplatInfo())
            again, _ = read_splats(path)
        return self.psnr(again.to(gaussians.means.device))

    def _scene(self, gaussians: Gaussians) -> SplatScene:
        return SplatScene(gaussians, gaussians.means.new_zeros(len(gaussians)), self._mip)


def _fit_size(
    budget: SplatBudget,
    order: Int[Tensor, " gaussians"],
    max_bytes: float,
    size_of: SizeOf,
    degrees: Sequence[int],
    on_degree: Callable[[], None],
) -> Reduction:
    full, best, smallest = budget.psnr(budget.gaussians), None, 0
    for degree in degrees:
        count = _largest_count(len(order), max_bytes, lambda count, d=degree: size_of(order[:count].sort().values, d))
        on_degree()
        if not count:
            smallest = size_of(order[:1], degree)
            continue
        rows = order[:count].sort().values
        psnr = budget.compressed_psnr(rows, degree)
        if best is None or psnr > best.psnr:
            best = Reduction(rows, degree, psnr, full)
        if count == len(order):
            break  # a lower degree saves what nobody asked for
    if best is None:
        raise ConfigError(
            f"The file takes {smallest / 1e6:.1f} MB without any Gaussians, more than the {max_bytes / 1e6:g} MB of "
            "--max-mb: allow more, or ask fewer questions."
        )
    return best


def _fit_loss(
    budget: SplatBudget,
    order: Int[Tensor, " gaussians"],
    max_loss_db: float,
    size_of: SizeOf,
    degrees: Sequence[int],
    on_degree: Callable[[], None],
) -> Reduction:
    rows = torch.arange(len(order))
    full, whole = budget.psnr(budget.gaussians), budget.compressed_psnr(rows, degrees[0])
    best, best_size = Reduction(rows, degrees[0], whole, full), size_of(rows, degrees[0])
    for degree in degrees:
        for share in _SHARES:
            rows = order[: max(1, round(share * len(order)))].sort().values
            psnr = budget.compressed_psnr(rows, degree)
            if psnr < whole - max_loss_db:
                break
            size = size_of(rows, degree)
            if size < best_size:
                best, best_size = Reduction(rows, degree, psnr, full), size
        on_degree()
    return best


def _largest_count(total: int, max_bytes: float, size_of: Callable[[int], int]) -> int:
    """The largest number of Gaussians whose file fits, found by interpolation; 0 if one alone does not."""
    low, low_size, high, high_size = 1, size_of(1), total, size_of(total)
    if high_size <= max_bytes:
        return total
    if low_size > max_bytes:
        return 0
    for _ in range(4):
        per_gaussian = (high_size - low_size) / (high - low)
        count = min(max(low + 1, low + int(_SPARE * (max_bytes - low_size) / per_gaussian)), high - 1)
        if count <= low or count >= high:
            break
        size = size_of(count)
        if size <= max_bytes:
            low, low_size = count, size
            if size > 0.96 * max_bytes:
                break
        else:
            high, high_size = count, size
    return low
