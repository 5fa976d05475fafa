"""Smaller splats: which Gaussians and which degree of harmonics a file of a given size, or of a given loss, keeps.

Gaussians are pruned by their contribution: the sum of their compositing weights over all pixels of the training views.
Opacity says less, since an opaque Gaussian may be hidden or tiny. What a choice costs is measured on photos.
"""

import math
import tempfile
from collections.abc import Callable, Iterable
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
from f3rm_ext.splat.rendering import SplatScene, render
from f3rm_ext.utils.console import image_progress

SizeOf = Callable[[Int[Tensor, " kept"], int], int]
"""Returns the size in bytes of a file with these Gaussians and this degree of harmonics."""
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.45, 0.35, 0.27, 0.2, 0.15, 0.1, 0.07, 0.05)
"""Shares of the Gaussians that a loss is measured for, one after another."""
_MAX_VIEWS = 8
_SPARE = 0.98
"""A first guess aims at this share of the size, as sizes are not quite in proportion."""
_CLOSE = 0.96
"""A file of this share of the size is large enough."""


@dataclass(frozen=True)
class Reduction:
    """A choice of Gaussians and of a degree of harmonics, with its cost."""

    rows: Int[Tensor, " kept"]
    """Indices of the Gaussians that are kept, in order."""
    sh_degree: int
    psnr: float
    """PSNR of what is kept after a round trip through the file, dB."""
    full_psnr: float
    """PSNR of all Gaussians as they were trained, dB."""
    held_out: bool
    """Whether held-out photos were the judges, rather than training photos."""

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} Gaussians with SH degree {self.sh_degree} are kept: {self.psnr:.2f} dB on "
            f"{'held-out' if self.held_out else 'training'} photos after compression, {self.full_psnr:.2f} dB before."
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
        tried = progress.track(degrees, task_id=steps)
        if max_mb is not None:
            return _fit_size(budget, order, max_mb * 1e6, size_of, tried)
        assert max_loss_db is not None
        return _fit_loss(budget, order, max_loss_db, size_of, tried)


class SplatBudget:
    """Measures what a run of splats loses when it is made smaller.

    Args:
        run: the run; its held-out photos are the judges, or its training photos where it holds out none.
    """

    def __init__(self, run: SplatRun) -> None:
        self.run = run
        self.gaussians = run.splats()
        self.held_out = run.manager.eval_dataset is not None
        self._photos = run.manager.eval_dataset or run.manager.train_dataset
        self._mip = replace(run.model.config.mip, filter_3d=False)

    def contributions(self, on_view: Callable[[], None] = lambda: None) -> Float[Tensor, " gaussians"]:
        """Returns the sum of the compositing weights of each Gaussian over the pixels of all training views."""
        views = PinholeCameras.of(self.run.manager.train_dataset.cameras).to(self.gaussians.means.device)
        scene, total = self._scene(self.gaussians), torch.zeros_like(self.gaussians.means[:, :1])
        for index in range(len(views.viewmats)):
            view = views.take(slice(index, index + 1))
            pixels = total.new_ones(int(view.heights[0]), int(view.widths[0]), 1)
            total += accumulate_pixels(scene, view, pixels)
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
            output = render(self._scene(gaussians), view)
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
        return SplatScene(gaussians, self._mip, background=self.run.model.background)


def _fit_size(
    budget: SplatBudget, order: Int[Tensor, " gaussians"], max_bytes: float, size_of: SizeOf, degrees: Iterable[int]
) -> Reduction:
    """The best degree with as many of the first Gaussians in the order as fit."""
    full, best, smallest = budget.psnr(budget.gaussians), None, 0
    for degree in degrees:

        def size_of_first(count: int, degree: int = degree) -> int:
            return size_of(_first(order, count), degree)

        smallest = size_of_first(1)
        if smallest > max_bytes:
            continue
        rows = _first(order, _largest_count(len(order), smallest, max_bytes, size_of_first))
        psnr = budget.compressed_psnr(rows, degree)
        if best is None or psnr > best.psnr:
            best = Reduction(rows, degree, psnr, full, budget.held_out)
        if len(rows) == len(order):
            break  # a lower degree saves what nobody asked for
    if best is None:
        raise ConfigError(
            f"The file takes {smallest / 1e6:.1f} MB without any Gaussians, more than the {max_bytes / 1e6:g} MB of "
            "--max-mb: allow more, or ask fewer questions."
        )
    return best


def _fit_loss(
    budget: SplatBudget, order: Int[Tensor, " gaussians"], max_loss_db: float, size_of: SizeOf, degrees: Iterable[int]
) -> Reduction:
    """The smallest file that loses little enough; what is tried first, the whole, is what losses are counted from."""
    full, whole = budget.psnr(budget.gaussians), None
    best, best_size = None, math.inf
    for degree in degrees:
        for share in _SHARES:
            rows = _first(order, max(1, round(share * len(order))))
            psnr = budget.compressed_psnr(rows, degree)
            whole = psnr if whole is None else whole
            if psnr < whole - max_loss_db:
                break
            size = size_of(rows, degree)
            if size < best_size:
                best, best_size = Reduction(rows, degree, psnr, full, budget.held_out), size
    assert best is not None
    return best


def _first(order: Int[Tensor, " gaussians"], count: int) -> Int[Tensor, " kept"]:
    """The rows of the first Gaussians in an order, as they lie in the file."""
    return order[:count].sort().values


def _largest_count(total: int, low_size: int, max_bytes: float, size_of: Callable[[int], int]) -> int:
    """The largest number of Gaussians whose file fits, found by interpolation; one alone, of ``low_size``, fits."""
    low, high, high_size = 1, total, size_of(total)
    if high_size <= max_bytes:
        return total
    for _ in range(4):
        per_gaussian = (high_size - low_size) / (high - low)
        count = min(max(low + 1, low + int(_SPARE * (max_bytes - low_size) / per_gaussian)), high - 1)
        if count <= low:
            break
        size = size_of(count)
        if size > max_bytes:
            high, high_size = count, size
            continue
        low, low_size = count, size
        if size > _CLOSE * max_bytes:
            break
    return low
