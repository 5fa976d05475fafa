"""Cleaning a run of splats: measures what is removed, and writes what remains as a run of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int8
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import checkpoint
from f3rm_ext.export.budget import SplatBudget
from f3rm_ext.export.derived import REMOVED, Report, write_derived
from f3rm_ext.export.splats import SplatRun, export_run
from f3rm_ext.html.tables import Table
from f3rm_ext.splat.cleaning import KEPT, MEANINGS, ROUNDS, Reason, decide_in_rounds, withdraw
from f3rm_ext.splat.evidence import Evidence, Photo, gather_evidence
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.utils.console import image_progress

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

    from f3rm_ext.data.image_datamanager import ImageDataManager
    from f3rm_ext.data.pinhole_dataset import PinholeDataset
    from f3rm_ext.splat.gaussian_model import GaussianModel

COMMAND = "splats clean"
MAX_LOSS_DB = 0.05
"""Reasons are withdrawn until no more than this is lost, dB."""


@dataclass(frozen=True)
class Cleaning:
    """Which Gaussians of a run go, why, and what that costs."""

    reasons: Int8[Tensor, " gaussians"]
    """Number of the reason of each Gaussian in :class:`~f3rm_ext.splat.cleaning.Reason`; −1 for those that stay."""
    withdrawn: tuple[Reason, ...]
    """Reasons that would have cost too much, and count no more."""
    psnr_before: float
    """dB."""
    psnr_after: float
    """dB."""
    judges: str
    """The photos by which it was measured: held-out or training."""

    @property
    def kept(self) -> Bool[Tensor, " gaussians"]:
        """Mask of the Gaussians that stay."""
        return self.reasons == KEPT

    def counts(self) -> dict[Reason, int]:
        """Returns how many Gaussians go for each reason."""
        return {reason: int((self.reasons == number).sum()) for number, reason in enumerate(Reason)}

    def __str__(self) -> str:
        removed, total = int((~self.kept).sum()), len(self.reasons)
        told = ", ".join(f"{reason.value} {count}" for reason, count in self.counts().items() if count)
        sentence = (
            f"{removed} of {total} Gaussians are removed{f' ({told})' if told else ''}: {self.psnr_after:.2f} dB on "
            f"{self.judges} photos, {self.psnr_before:.2f} dB before."
        )
        if not self.withdrawn:
            return sentence
        names = ", ".join(reason.value for reason in self.withdrawn)
        return f"{sentence} Withdrawn, since more than {MAX_LOSS_DB:g} dB would have been lost: {names}."


def clean_splats(run: SplatRun) -> Cleaning:
    """Gathers the evidence on the Gaussians of a run, and decides which of them go."""
    budget, dataset = SplatBudget(run, Path(REMOVED)), run.manager.train_dataset
    gaussians = budget.gaussians
    before = budget.psnr(gaussians)  # first, as it refuses photos that masks hide
    views = PinholeCameras.of(dataset.cameras).to(gaussians.means.device)
    with image_progress("views") as progress:
        task = progress.add_task("Evidence", total=len(ROUNDS) * len(dataset))

        def gather(rows: Tensor) -> Evidence:
            scene = run.scene(gaussians[rows.to(gaussians.means.device)])
            return gather_evidence(
                scene, views, lambda index: read_photo(run, dataset, index), lambda: progress.advance(task)
            )

        proposed = decide_in_rounds(len(gaussians), gather)
    reasons, withdrawn, after = withdraw(proposed, lambda kept: budget.psnr(gaussians[kept]), before - MAX_LOSS_DB)
    return Cleaning(reasons, withdrawn, before, after, budget.judges)


def clean_trained(
    model: "GaussianModel", manager: "ImageDataManager", config: "TrainerConfig", checkpoints: Path, step: int
) -> Bool[Tensor, " gaussians"]:
    """Cleans a model whose training has ended; what goes is written beside the run's config.yml.

    The last checkpoint will be in the folder ``checkpoints``. Returns the mask of the Gaussians that stay.
    """
    run = SplatRun(model, manager, config, checkpoint.make_path(checkpoints, step), step)
    cleaning = clean_splats(run)
    CONSOLE.log(str(cleaning), markup=False)
    removed = ~cleaning.kept
    if bool(removed.any()):
        out = checkpoints.parent / REMOVED
        out = out.with_stem(f"{out.stem}-{step}") if out.exists() else out  # of an earlier end of this run
        splats = run.splats()
        scores = _reason_scores(cleaning.reasons[removed])
        export_run(run, out, scores=scores, splats=splats[removed.to(splats.means.device)])
    return cleaning.kept


def read_photo(run: SplatRun, dataset: "PinholeDataset", index: int) -> Photo:
    """Returns a photo as the run draws it, over its background and at the mean exposure, and which pixels count."""
    batch = picture_batch(dataset.picture(index), index, run.model.device)
    colors, mask = run.model.true_colors(batch, run.model.background), batch.get("mask")
    if run.model.exposures is not None:
        colors, known = run.model.exposures.undo(colors, index)
        mask = known if mask is None else known & mask.to(known.device)
    return colors, None if mask is None else mask.float()


def write_cleaned(run: SplatRun, load_config: Path, out: Path, cleaning: Cleaning) -> None:
    """Writes what remains of a run as a run of its own; see :func:`~f3rm_ext.export.derived.write_derived`."""
    rows = [
        (reason.value, str(count), f"{MEANINGS[reason]}{' (withdrawn)' * (reason in cleaning.withdrawn)}")
        for reason, count in cleaning.counts().items()
    ]
    removed = ~cleaning.kept
    judges = f"{cleaning.judges} photos{': the run holds out none' * (cleaning.judges == 'training')}"
    report = Report(
        title=f"{int(removed.sum())} of {len(removed)} Gaussians are removed",
        lead=str(cleaning),
        keys=[
            (f"{cleaning.psnr_before:.2f} dB", f"PSNR before, {judges}"),
            (f"{cleaning.psnr_after:.2f} dB", f"PSNR after, {judges}"),
            (f"{float(removed.float().mean()):.1%}", "of the Gaussians are removed"),
        ],
        heading="Reasons",
        table=Table(["reason", "Gaussians", "meaning"], rows, "lrn"),
    )
    summary = {
        "removed": {reason.value: count for reason, count in cleaning.counts().items()},
        "withdrawn": [reason.value for reason in cleaning.withdrawn],
        "psnr_before": cleaning.psnr_before,
        "psnr_after": cleaning.psnr_after,
        "photos": cleaning.judges,
    }
    scores = _reason_scores(cleaning.reasons[removed])
    write_derived(run, load_config, out, COMMAND, cleaning.kept, scores, report, summary)


def _reason_scores(reasons: Int8[Tensor, " removed"]) -> GaussianScores:
    """Returns the reasons as columns of a file: 1 for the one that holds, and its number as the label."""
    numbers = reasons.numpy().astype(np.int32)
    columns = (numbers[:, None] == np.arange(len(Reason))).astype(np.float32)
    return GaussianScores(tuple(reason.value for reason in Reason), columns, numbers)
