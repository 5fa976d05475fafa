"""Saving what was edited in the viewer: what is still shown of a run, as a run of its own."""

from pathlib import Path

import numpy as np
import torch

from f3rm_ext.data.image_datamanager import ImageDataManager
from f3rm_ext.engine import checkpoint as checkpoints
from f3rm_ext.engine.config_file import read_config
from f3rm_ext.export.derived import CONFIG, Report, require_divisible, write_derived
from f3rm_ext.export.select import COMMAND
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.tables import Table
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussian_model import GaussianModel
from f3rm_ext.utils.output_folder import new_folder
from f3rm_ext.viewer.edits import Edits


def save_edits(model: GaussianModel, manager: ImageDataManager, checkpoint: Path, edits: Edits) -> Path:
    """Writes what is shown after an edit or more as a run in a new folder beside that of the checkpoint.

    See :func:`~f3rm_ext.export.derived.write_derived`. Returns config.yml of the new run.

    Raises:
        ConfigError: Gaussians of this method cannot go one by one, or the folder cannot be written to.
        CheckpointError: the checkpoint cannot be read or written.
    """
    folder = checkpoint.resolve().parents[1]
    step = checkpoints.parse_step(checkpoint)
    assert step is not None and edits.hidden is not None
    run = SplatRun(model, manager, read_config(folder / CONFIG), checkpoint, step)
    require_divisible(run)
    out, hidden = new_folder(folder.with_name(f"{folder.name}-edited")), edits.hidden.cpu()
    numbers, shares = torch.zeros(edits.total, dtype=torch.int32), torch.zeros(edits.total)
    for number, edit in enumerate(edits.steps):
        numbers[edit.rows.cpu()], shares[edit.rows.cpu()] = number, edit.shares.float().cpu()
    scores = GaussianScores(("share",), shares[hidden].numpy()[:, None], numbers[hidden].numpy().astype(np.int32))
    kept, removed = int((~hidden).sum()), int(hidden.sum())
    report = Report(
        title=f"The scene after {len(edits.steps)} edits" if len(edits.steps) > 1 else "The scene after an edit",
        lead=f"{removed} of {edits.total} Gaussians were removed in the viewer.",
        keys=[(str(kept), "Gaussians stay"), (str(removed), "Gaussians go")],
        heading="Edits",
        table=Table(["edit", "Gaussians"], [(edit.name, str(len(edit.rows))) for edit in edits.steps], "lr"),
    )
    steps = [{"edit": edit.name, "removed": len(edit.rows)} for edit in edits.steps]
    write_derived(
        run, folder / CONFIG, out, COMMAND, ~hidden, scores, report, {"edits": steps, "kept": kept, "removed": removed}
    )
    return out / CONFIG
