"""Smaller splats: which Gaussians and which degree of harmonics a file of a given size, or loss, keeps.

Gaussians are pruned in the order of :class:`~f3rm_ext.splat.pruning.PruningOrder`: those first without which the
training views change least. What a choice costs is measured on photos.
"""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CaptureError
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.page import rounded
from f3rm_ext.model_components.exposure import fit_halves
from f3rm_ext.splat.files.checks import BadValues, check_values
from f3rm_ext.splat.files.formats import WRITE_ONLY, format_to_write, read_splats, write_splats
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.files.pruning import Choice, Choose, SizeOf, SizeSearch, too_small
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.pruning import PruningOrder
from f3rm_ext.splat.rendering import render
from f3rm_ext.utils.console import image_progress

_MAX_VIEWS = 8
_HALVINGS = 6
"""Tries of a number of Gaussians for a loss."""
_FEWEST = 0.01
"""Smallest share of the Gaussians that is tried for a loss."""
_RUIN_DB, _FINE_DB = 3.0, 1.0


@dataclass(frozen=True)
class Limit:
    """Limits of a file: its degree of harmonics, and either its size or its loss of PSNR."""

    sh_degree: int
    """The highest degree to choose."""
    max_mb: float | None = None
    """Choose the highest PSNR within this size, MB."""
    max_loss_db: float | None = None
    """Choose the smallest file that loses at most this much more than compression itself does, dB."""


@dataclass(frozen=True)
class Reduction(Choice):
    """A choice with its cost."""

    psnr: float
    """PSNR of what is kept after a round trip through the file, dB."""
    full_psnr: float
    """PSNR of all Gaussians as they were trained, dB."""
    judges: str
    """The photos by which it was measured: held-out or training."""
    notices: tuple[str, ...] = ()
    """Sentences on what was changed before the choice."""
    fine_mb: float | None = None
    """Where much is lost: about the size of a file that loses 1 dB beyond its compression, MB."""

    def __str__(self) -> str:
        told = (
            f"{super().__str__()}: {self.psnr:.2f} dB on {self.judges} photos after compression, {self.full_psnr:.2f} "
            "dB before."
        )
        if self.fine_mb is None:
            return told
        return (
            f"{told} Warning: the picture loses {self.full_psnr - self.psnr:.1f} dB; with --max-mb "
            f"{rounded(self.fine_mb)} it would lose about 1 dB beyond what compression costs."
        )


def reduce_splats(
    run: SplatRun, size_of: SizeOf, out: Path, limit: Limit, bad_values: BadValues = "error"
) -> Reduction:
    """Chooses the Gaussians of a file, and their degree of harmonics, by one of two limits.

    Args:
        size_of: returns the size in bytes of a file with these rows, of this SH degree.
        out: name of a file of the format whose losses count; it is not written.
        bad_values: treatment of values that are NaN or infinite; Gaussians that are dropped are never chosen.

    Raises:
        ConfigError: not even one Gaussian without harmonics fits.
        SplatFileError: values are NaN or infinite.
    """
    budget = SplatBudget(run, out)
    budget.gaussians, valid, notices = check_values(budget.gaussians, out, bad_values, action="would get")
    given = valid.nonzero()[:, 0].cpu()
    highest = 0 if format_to_write(out) == "splat" else min(limit.sh_degree, budget.gaussians.sh_degree)
    degrees = range(highest, -1, -1)
    with image_progress("steps") as progress:
        views, shown = progress.add_task("Cost of each Gaussian", total=len(run.manager.train_dataset)), 0

        def on_view(count: int) -> None:
            nonlocal shown
            shown = shown % count + 1
            progress.update(views, completed=shown, total=count)

        order = budget.order(on_view)
        search = BudgetSearch(budget, order.last, lambda rows, degree: size_of(given[rows], degree))
        steps = progress.add_task("Degrees of harmonics", total=len(degrees))
        tried = progress.track(degrees, task_id=steps)
        if limit.max_mb is not None:
            choice = search.fit_size(limit.max_mb * 1e6, tried)
        else:
            assert limit.max_loss_db is not None
            choice = search.fit_loss(limit.max_loss_db, tried)
    return replace(choice, rows=given[choice.rows], notices=tuple(notices))


class SplatBudget:
    """Measures what a run of splats loses when it is made smaller.

    Its held-out photos are the judges, or its training photos where it holds out none. ``out`` names a file of the
    format that splats are stored in.
    """

    def __init__(self, run: SplatRun, out: Path) -> None:
        self.run = run
        self.gaussians = run.splats()
        self.judges = "training" if run.manager.eval_dataset is None else "held-out"
        self._name = out.name
        self._photos = run.manager.eval_dataset or run.manager.train_dataset

    def order(self, on_view: Callable[[int], None] = lambda count: None) -> PruningOrder:
        """Returns the order in which the Gaussians go."""
        views = PinholeCameras.of(self.run.manager.train_dataset.cameras).to(self.gaussians.means.device)
        return PruningOrder(self.gaussians, self.run.scene, views, on_view)

    @torch.no_grad()
    def psnr(self, gaussians: Gaussians) -> float:
        """Returns the mean PSNR over at most eight photos, dB; if exposures are modelled, at that of each photo.

        Raises:
            CaptureError: masks leave nothing of these photos.
        """
        model, psnrs = self.run.model, []
        step = math.ceil(len(self._photos) / _MAX_VIEWS)
        for index in range(0, len(self._photos), step):
            batch = picture_batch(self._photos.picture(index), index, model.device)
            view = PinholeCameras.to_render(self._photos.cameras[index : index + 1], model.device)
            outputs = render(self.run.scene(gaussians), view).outputs()
            if model.exposures is not None:
                photo = model.true_colors(batch, model.background)
                outputs["rgb"] = fit_halves(outputs["rgb"], photo, batch.get("mask"))
            outputs["rgb"] = outputs["rgb"].clamp(0, 1)  # as it is shown
            metrics = model.get_metrics_dict(outputs, batch)
            psnrs += [float(metrics["psnr"])] if "psnr" in metrics else []
        if not psnrs:
            raise CaptureError(
                f"What splats lose cannot be measured, as masks leave nothing of the {self.judges} photos: check the "
                "masks."
            )
        return sum(psnrs) / len(psnrs)

    def stored_psnr(self, rows: Int[Tensor, " kept"], sh_degree: int) -> float:
        """Returns the PSNR of some Gaussians as a reader of the file gets them, dB.

        Formats that are only written hold what they are given.
        """
        gaussians = self.gaussians[rows].to_sh_degree(sh_degree)
        if format_to_write(Path(self._name)) not in WRITE_ONLY:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / self._name
                write_splats(path, gaussians, SplatInfo())
                gaussians = read_splats(path)[0].to(gaussians.means.device)
        return self.psnr(gaussians)


class BudgetSearch(SizeSearch):
    """Finds which Gaussians show most in a size, or least size for a loss."""

    def __init__(self, budget: SplatBudget, choose: Choose, size_of: SizeOf) -> None:
        super().__init__(budget.gaussians, choose, size_of)
        self._budget = budget
        self._full = budget.psnr(budget.gaussians)

    def fit_size(self, max_bytes: float, degrees: Iterable[int]) -> Reduction:
        """Returns the best picture within a size: degrees from above, until a lower one shows less."""
        total, best, sizes = self.total, None, {}
        base, per_gaussian = 0, 0.0
        for degree in degrees:
            # Only the highest degree is measured whole: where all Gaussians fit with it, no lower one shows more.
            sizes = {} if sizes else {total: self.size(total, degree)}
            if sizes and sizes[total] <= max_bytes:
                return self._reduction(total, degree)
            base = sizes[1] = self.least_size(degree)
            if base > max_bytes:
                continue
            count, per_gaussian = self.largest_count(degree, max_bytes, sizes, per_gaussian)
            choice = self._reduction(count, degree)
            if best is not None and choice.psnr <= best.psnr:
                break
            best = choice
        if best is None:
            raise too_small(base, max_bytes)
        if self._full - best.psnr <= _RUIN_DB:
            return best
        fine = self._smallest_count(best.sh_degree, self._psnr(total, best.sh_degree) - _FINE_DB)
        return replace(best, fine_mb=self.size(fine, best.sh_degree) / 1e6)

    def fit_loss(self, max_loss_db: float, degrees: Iterable[int]) -> Reduction:
        """Returns the smallest file that loses little enough, counted from the whole file."""
        total, best, best_size, least = self.total, None, math.inf, -math.inf
        for degree in degrees:
            whole = self._reduction(total, degree)
            if best is None:
                best, best_size, least = whole, self.size(total, degree), whole.psnr - max_loss_db
            elif whole.psnr < least:
                break
            count = self._smallest_count(degree, least)
            size = self.size(count, degree)
            if size < best_size:
                best, best_size = self._reduction(count, degree), size
        assert best is not None
        return best

    def _psnr(self, count: int, sh_degree: int) -> float:
        return self._budget.stored_psnr(self.first(count), sh_degree)

    def _reduction(self, count: int, sh_degree: int) -> Reduction:
        rows, total = self.first(count), self.total
        psnr = self._budget.stored_psnr(rows, sh_degree)
        return Reduction(rows, sh_degree, total, psnr, self._full, self._budget.judges)

    def _smallest_count(self, sh_degree: int, least_psnr: float) -> int:
        """The smallest number of Gaussians that keeps a PSNR which all of them keep, to a few per cent."""
        high = self.total
        low = max(1, int(_FEWEST * high))
        for _ in range(_HALVINGS):
            count = round(math.sqrt(low * high))
            if self._psnr(count, sh_degree) >= least_psnr:
                high = count
            else:
                low = count
        return high
