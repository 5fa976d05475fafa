"""Smaller splats: which Gaussians, degree of harmonics and precision a file of a given size, or loss, keeps.

Gaussians are pruned by their contribution: the sum of their compositing weights over all pixels of the training views.
Opacity says less, since an opaque Gaussian may be hidden or tiny. What a choice costs is measured on photos.
"""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.splat.features.lifting import accumulate_pixels
from f3rm_ext.splat.files.checks import check_values
from f3rm_ext.splat.files.formats import WRITE_ONLY, format_to_write, read_splats, write_splats
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.files.packing import morton_order
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rendering import SplatScene, render
from f3rm_ext.utils.console import image_progress

_MAX_VIEWS = 8
_SPARE = 0.985
"""A guess aims at this share of the size, as sizes are not quite in proportion."""
_CLOSE = 0.96
"""A file of this share of the size is large enough."""
_GUESSES = 8
"""Tries of a number of Gaussians for a size; two are usual."""
_HALVINGS = 6
"""Tries of a number of Gaussians for a loss."""
_FEWEST = 0.01
"""Smallest share of the Gaussians that is tried for a loss."""
_STEP_SHARE = 1 / 8
"""Largest step of rounded positions, in sizes of small Gaussians. It cost .003 dB at most on three captures."""
_WORTHWHILE = 0.98
"""Positions are rounded where the file shrinks to this share at least; formats of fixed precision do not shrink."""
_RUIN_DB, _FINE_DB = 3.0, 1.0


@dataclass(frozen=True)
class Form:
    """How Gaussians are stored, beyond what their format demands."""

    sh_degree: int
    step: float = 0.0
    """Positions are rounded to multiples of this, scene units, so that they compress better; 0 leaves them."""

    def apply(self, gaussians: Gaussians) -> Gaussians:
        """Returns the Gaussians in this form."""
        gaussians = gaussians.to_sh_degree(min(self.sh_degree, gaussians.sh_degree))
        return replace(gaussians, means=(gaussians.means / self.step).round() * self.step) if self.step else gaussians


SizeOf = Callable[[Int[Tensor, " kept"], Form], int]
"""Returns the size in bytes of a file with these Gaussians in this form."""


@dataclass(frozen=True)
class Limit:
    """What a file may take, or lose."""

    sh_degree: int
    """The highest degree to choose."""
    max_mb: float | None = None
    """Choose the highest PSNR within this size, MB."""
    max_loss_db: float | None = None
    """Choose the smallest file that loses at most this much more than compression itself does, dB."""


@dataclass(frozen=True)
class Reduction:
    """A choice of Gaussians and of their form, with its cost."""

    rows: Int[Tensor, " kept"]
    """Indices of the Gaussians that are kept, neighbours side by side."""
    form: Form
    total: int
    """Number of Gaussians there were."""
    psnr: float
    """PSNR of what is kept after a round trip through the file, dB."""
    full_psnr: float
    """PSNR of all Gaussians as they were trained, dB."""
    held_out: bool
    """Whether held-out photos were the judges, rather than training photos."""
    fine_mb: float | None = None
    """Where much is lost: about the size of a file that loses 1 dB beyond its compression, MB."""

    def apply(self, gaussians: Gaussians) -> Gaussians:
        """Returns what is kept of all Gaussians, in its form."""
        return self.form.apply(gaussians[self.rows])

    def __str__(self) -> str:
        kept = len(self.rows)
        count = f"All {kept} Gaussians" if kept == self.total else f"{kept} of {self.total} Gaussians"
        rounded = f" and positions in steps of {self.form.step:.2g}" if self.form.step else ""
        judges = "held-out" if self.held_out else "training"
        told = (
            f"{count} are kept, with SH degree {self.form.sh_degree}{rounded}: {self.psnr:.2f} dB on {judges} photos "
            f"after compression, {self.full_psnr:.2f} dB before."
        )
        if self.fine_mb is None:
            return told
        return (
            f"{told} Warning: the picture loses {self.full_psnr - self.psnr:.1f} dB; with --max-mb {self.fine_mb:.2g} "
            "it would lose about 1 dB beyond what compression costs."
        )


def reduce_splats(run: SplatRun, size_of: SizeOf, out: Path, limit: Limit) -> Reduction:
    """Chooses the Gaussians of a file, their degree of harmonics and their precision, by one of two limits.

    Args:
        run: the run.
        size_of: returns the size in bytes of a file with these rows in this form.
        out: name of a file of the format whose losses count; it is not written.
        limit: what the file may take, or lose.

    Raises:
        ConfigError: not even one Gaussian without harmonics fits.
        SplatFileError: values are NaN or infinite.
    """
    budget = SplatBudget(run, out)
    check_values(budget.gaussians, out, action="would get")
    highest = 0 if format_to_write(out) == "splat" else min(limit.sh_degree, budget.gaussians.sh_degree)
    degrees = range(highest, -1, -1)
    with image_progress("steps") as progress:
        views = progress.add_task("Contributions of the Gaussians", total=len(run.manager.train_dataset))
        search = BudgetSearch(budget, lambda: budget.contributions(lambda: progress.advance(views)), size_of)
        steps = progress.add_task("Degrees of harmonics", total=len(degrees))
        tried = progress.track(degrees, task_id=steps)
        if limit.max_mb is not None:
            return search.fit_size(limit.max_mb * 1e6, tried)
        assert limit.max_loss_db is not None
        return search.fit_loss(limit.max_loss_db, tried)


class SplatBudget:
    """Measures what a run of splats loses when it is made smaller.

    Args:
        run: the run; its held-out photos are the judges, or its training photos where it holds out none.
        out: name of a file of the format that splats are stored in.
    """

    def __init__(self, run: SplatRun, out: Path) -> None:
        self.run = run
        self.gaussians = run.splats()
        self.held_out = run.manager.eval_dataset is not None
        self._name = out.name
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

    def step(self) -> float:
        """Returns a step of positions that no picture shows: a power of two, scene units."""
        sizes = self.gaussians.scales.mean(dim=1)
        small = float(sizes.kthvalue(1 + len(sizes) // 10).values)
        return 2.0 ** math.floor(small / math.log(2) + math.log2(_STEP_SHARE))

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

    def stored_psnr(self, rows: Int[Tensor, " kept"], form: Form) -> float:
        """Returns the PSNR of some Gaussians as a reader of the file gets them, dB.

        Formats that are only written hold what they are given.
        """
        gaussians = form.apply(self.gaussians[rows])
        if format_to_write(Path(self._name)) not in WRITE_ONLY:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / self._name
                write_splats(path, gaussians, SplatInfo())
                gaussians = read_splats(path)[0].to(gaussians.means.device)
        return self.psnr(gaussians)

    def _scene(self, gaussians: Gaussians) -> SplatScene:
        return SplatScene(gaussians, self._mip, background=self.run.model.background)


class BudgetSearch:
    """Finds how many Gaussians to keep, the most important ones first.

    Args:
        budget: measures losses.
        importance: returns that of each Gaussian; called where not all of them fit.
        size_of: measures sizes.
    """

    def __init__(
        self, budget: SplatBudget, importance: Callable[[], Float[Tensor, " gaussians"]], size_of: SizeOf
    ) -> None:
        self._budget = budget
        self._importance = importance
        self._size_of = size_of
        self._total = len(budget.gaussians)
        self._near = morton_order(budget.gaussians).cpu()
        self._full = budget.psnr(budget.gaussians)

    def fit_size(self, max_bytes: float, degrees: Iterable[int]) -> Reduction:
        """Returns the best picture within a size: degrees from above, until a lower one shows less."""
        total, best, whole = self._total, None, None
        base = per_gaussian = step = 0.0
        for degree in degrees:
            form = Form(degree, step)
            if whole is None:
                whole = self._size(total, form)
                if whole <= max_bytes:
                    return self._reduction(total, form)
                form, whole = self._rounded(form, whole)
                if whole <= max_bytes:
                    return self._reduction(total, form)
                step = form.step
            base = self._size(1, form)
            if base > max_bytes:
                continue
            per_gaussian = per_gaussian or (whole - base) / max(total - 1, 1)
            count, per_gaussian = self._largest_count(form, max_bytes, base, per_gaussian)
            choice = self._reduction(count, form)
            if best is not None and choice.psnr <= best.psnr:
                break
            best = choice
        if best is None:
            raise ConfigError(
                f"The file takes {base / 1e6:.3g} MB without any Gaussians, more than the {max_bytes / 1e6:g} MB of "
                "--max-mb: allow more, or ask fewer questions."
            )
        if self._full - best.psnr <= _RUIN_DB:
            return best
        fine = self._smallest_count(best.form, self._psnr(total, best.form) - _FINE_DB)
        assert fine is not None
        return replace(best, fine_mb=self._size(fine, best.form) / 1e6)

    def fit_loss(self, max_loss_db: float, degrees: Iterable[int]) -> Reduction:
        """Returns the smallest file that loses little enough, counted from the whole file."""
        total, best, best_size, least, step = self._total, None, math.inf, -math.inf, 0.0
        for degree in degrees:
            form = Form(degree, step)
            if best is None:
                best, best_size = self._reduction(total, form), self._size(total, form)
                least = best.psnr - max_loss_db
                rounded, size = self._rounded(form, best_size)
                if size < best_size and self._psnr(total, rounded) >= least:
                    form, step = rounded, rounded.step
            count = self._smallest_count(form, least)
            if count is None:
                break
            size = self._size(count, form)
            if size < best_size:
                best, best_size = self._reduction(count, form), size
        assert best is not None
        return best

    def first(self, count: int) -> Int[Tensor, " kept"]:
        """Returns the rows of the most important Gaussians, neighbours side by side."""
        if count >= self._total:
            return self._near
        chosen = torch.zeros(self._total, dtype=torch.bool)
        chosen[self._order[:count]] = True
        return self._near[chosen[self._near]]

    @cached_property
    def _order(self) -> Int[Tensor, " gaussians"]:
        return self._importance().argsort(descending=True).cpu()

    def _size(self, count: int, form: Form) -> int:
        return self._size_of(self.first(count), form)

    def _psnr(self, count: int, form: Form) -> float:
        return self._budget.stored_psnr(self.first(count), form)

    def _reduction(self, count: int, form: Form) -> Reduction:
        rows, total = self.first(count), self._total
        psnr = self._budget.stored_psnr(rows, form)
        return Reduction(rows, form, total, psnr, self._full, self._budget.held_out)

    def _rounded(self, form: Form, size: int) -> tuple[Form, int]:
        """The form with rounded positions and its size with all Gaussians, where that is worthwhile."""
        rounded = replace(form, step=self._budget.step())
        smaller = self._size(self._total, rounded)
        return (rounded, smaller) if smaller <= _WORTHWHILE * size else (form, size)

    def _largest_count(self, form: Form, max_bytes: float, base: int, per_gaussian: float) -> tuple[int, float]:
        """The largest number of Gaussians that fits, found by interpolation, and the bytes that each of them takes.

        Args:
            base: size with one Gaussian, which fits.
            per_gaussian: first guess, bytes.
        """
        low, low_size, high = 1, base, self._total + 1
        for _ in range(_GUESSES):
            if high - low <= 1:
                break
            room = _SPARE * max_bytes - low_size
            count = min(max(low + int(room / max(per_gaussian, 1e-9)), low + 1), high - 1)
            size = self._size(count, form)
            per_gaussian = (size - base) / (count - 1)
            if size > max_bytes:
                high = count
                continue
            low, low_size = count, size
            if size > _CLOSE * max_bytes:
                break
        return low, per_gaussian

    def _smallest_count(self, form: Form, least_psnr: float) -> int | None:
        """The smallest number of Gaussians that keeps a PSNR, to a few per cent; None where all of them lose it."""
        high = self._total
        if self._psnr(high, form) < least_psnr:
            return None
        low = max(1, int(_FEWEST * high))
        for _ in range(_HALVINGS):
            count = round(math.sqrt(low * high))
            if self._psnr(count, form) >= least_psnr:
                high = count
            else:
                low = count
        return high
