"""Cleaning a run of splats: measures what is removed, and writes what remains as a run of its own."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from jaxtyping import Bool, Int8
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.config_file import read_config
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.budget import SplatBudget
from f3rm_ext.export.splats import SplatRun, export_run
from f3rm_ext.html.page import Picture, render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.splat.cleaning import KEPT, ROUNDS, Reason, decide_in_rounds, withdraw
from f3rm_ext.splat.evidence import Evidence, Photo, gather_evidence
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.model import SplatModel
from f3rm_ext.splat.rendering import render
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.output_folder import SUMMARY, OutputFolder, made_by
from f3rm_ext.utils.pictures import pick_evenly, to_bytes
from f3rm_ext.utils.provenance import require_own_folder, sign_text

if TYPE_CHECKING:
    from f3rm_ext.data.pinhole_dataset import PinholeDataset

COMMAND = "splats clean"
MAX_LOSS_DB = 0.05
"""Reasons are withdrawn until no more than this is lost, dB."""
CONFIG, REMOVED, REPORT = "config.yml", "removed.ply", "report.html"
_TRANSFORMS = "dataparser_transforms.json"
_MODELS = "nerfstudio_models"
_PICTURES = 4
_ROWS = re.compile(r"_model\.(gauss_params\.\w+|filter_3d|lifted\.heads\..+\.codes)")
"""Names of the tensors with one row per Gaussian."""


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
    held_out: bool
    """Whether held-out photos were the judges, rather than training photos."""

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
        judges = "held-out" if self.held_out else "training"
        sentence = (
            f"{removed} of {total} Gaussians are removed{f' ({told})' if told else ''}: {self.psnr_after:.2f} dB on "
            f"{judges} photos, {self.psnr_before:.2f} dB before."
        )
        if not self.withdrawn:
            return sentence
        names = ", ".join(reason.value for reason in self.withdrawn)
        return f"{sentence} Withdrawn, since more than {MAX_LOSS_DB:g} dB would have been lost: {names}."


def require_cleanable(run: SplatRun) -> None:
    """Raises ConfigError where the Gaussians of a run cannot be removed one by one."""
    if not isinstance(run.model, SplatModel):
        raise ConfigError(
            f"The Gaussians of {run.config.method_name} are bound to a mesh, so none of them can go alone: give a run "
            "of sugar-ext, or clean the mesh."
        )


def require_own_run(out: Path, run: Path) -> None:
    """Checks, before the work begins, that a folder may become the cleaned run.

    Args:
        out: the folder.
        run: folder of the run that is cleaned.

    Raises:
        ConfigError: it is that of the run itself, or holds what this command did not write.
    """
    if out.resolve() == run.resolve():
        raise ConfigError(f"--out is the run itself, {out}: choose another folder, so that both stay.")
    require_own_folder(out, SUMMARY, f"f3rm-ext {COMMAND}", "--out")


def clean_splats(run: SplatRun) -> Cleaning:
    """Gathers the evidence on the Gaussians of a run, and decides which of them go."""
    budget, dataset = SplatBudget(run, Path(REMOVED)), run.manager.train_dataset
    gaussians = budget.gaussians
    views = PinholeCameras.of(dataset.cameras).to(gaussians.means.device)
    with image_progress("views") as progress:
        task = progress.add_task("Evidence", total=len(ROUNDS) * len(dataset))

        def gather(rows: Tensor) -> Evidence:
            scene = run.scene(gaussians[rows.to(gaussians.means.device)])
            return gather_evidence(
                scene, views, lambda index: read_photo(run, dataset, index), lambda: progress.advance(task)
            )

        proposed = decide_in_rounds(len(gaussians), gather)
    before = budget.psnr(gaussians)
    reasons, withdrawn, after = withdraw(proposed, lambda kept: budget.psnr(gaussians[kept]), before - MAX_LOSS_DB)
    return Cleaning(reasons, withdrawn, before, after, budget.held_out)


def read_photo(run: SplatRun, dataset: "PinholeDataset", index: int) -> Photo:
    """Returns a photo as the run draws it, over its background, and which of its pixels count."""
    batch = picture_batch(dataset.picture(index), index, run.model.device)
    mask = batch.get("mask")
    return run.model.true_colors(batch, run.model.background), None if mask is None else mask.float()


def write_cleaned(run: SplatRun, load_config: Path, out: Path, cleaning: Cleaning) -> None:
    """Writes what remains of a run as a run of its own, with a file of what was removed and a report.

    Args:
        load_config: config.yml of the run.
        out: folder to write; files that this command did not write stay.

    Raises:
        ConfigError: files of others are in the way, or the folder cannot be written to.
        CheckpointError: the checkpoint cannot be written.
    """
    removed = ~cleaning.kept
    model_file = f"{_MODELS}/{run.checkpoint.name}"
    transforms = load_config.parent / _TRANSFORMS
    others = [REMOVED] if bool(removed.any()) else []
    others += [_TRANSFORMS] if transforms.is_file() else []
    folder = OutputFolder(out, {**made_by(COMMAND), **run.describe()})
    folder.plan([CONFIG, model_file, REPORT, *others])
    for _, path in checkpoint.newest_first(out / _MODELS):
        if path.name != run.checkpoint.name:
            raise ConfigError(
                f"{path} is there already, of another step than {run.checkpoint.name}: move it away, or choose another "
                "folder with --out."
            )
    if REMOVED in others:
        splats = run.splats()[removed]
        export_run(run, out / REMOVED, scores=_reason_scores(cleaning.reasons[removed.cpu()]), splats=splats)
    if _TRANSFORMS in others:
        with replace_file(out / _TRANSFORMS) as stream:
            stream.write(transforms.read_bytes())
    checkpoint.write(_take_rows(checkpoint.load(run.checkpoint, ("step", "pipeline")), cleaning.kept), out / model_file)
    with replace_file(out / REPORT) as stream:
        stream.write(sign_text(_report(run, cleaning), f"f3rm-ext {COMMAND}"))
    with replace_file(out / CONFIG) as stream:
        stream.write(yaml.dump(_config_at(load_config, out)).encode())
    folder.summary(
        {
            "complete": True,
            "gaussians": len(removed),
            "removed": {reason.value: count for reason, count in cleaning.counts().items()},
            "withdrawn": [reason.value for reason in cleaning.withdrawn],
            "psnr_before": cleaning.psnr_before,
            "psnr_after": cleaning.psnr_after,
            "photos": "held-out" if cleaning.held_out else "training",
        }
    )


def _take_rows(content: dict[str, Any], kept: Bool[Tensor, " gaussians"]) -> dict[str, Any]:
    """Returns a checkpoint with some of its Gaussians. It has no optimisers, whose rows would be of others."""
    state = {name: value[kept] if _ROWS.fullmatch(name) else value for name, value in content["pipeline"].items()}
    extra = state["_model._extra_state"]
    state["_model._extra_state"] = {name: extra[name] for name in extra if name not in ("densifier", "regularizer")}
    return {"step": content["step"], "pipeline": state, "optimizers": {}}


def _config_at(load_config: Path, out: Path) -> Any:
    """Returns the options of a run, so that nerfstudio looks for the checkpoint in another folder."""
    config, out = read_config(load_config), out.resolve()
    config.timestamp, config.load_dir, config.load_step = out.name, None, None
    if out.parent.name == config.method_name:
        config.output_dir, config.experiment_name = out.parents[2], out.parents[1].name
    else:
        config.relative_model_dir = out / _MODELS
    return config


def _reason_scores(reasons: Int8[Tensor, " removed"]) -> GaussianScores:
    """Returns the reasons as columns of a file: 1 for the one that holds, and its number as the label."""
    numbers = reasons.numpy().astype(np.int32)
    columns = (numbers[:, None] == np.arange(len(Reason))).astype(np.float32)
    return GaussianScores(tuple(reason.value for reason in Reason), columns, numbers)


def _report(run: SplatRun, cleaning: Cleaning) -> str:
    photos = run.manager.eval_dataset or run.manager.train_dataset
    gaussians, removed = run.splats(), ~cleaning.kept
    parts = {"before": gaussians, "after": gaussians[cleaning.kept], "what went": gaussians[removed]}
    views = []
    for index in pick_evenly(len(photos), _PICTURES):
        view = PinholeCameras.to_render(photos.cameras[index : index + 1], run.model.device)
        views.append([(label, _picture(run, part, view)) for label, part in parts.items()])
    rows = [
        (reason.value, str(count), f"{reason.meaning}{' (withdrawn)' * (reason in cleaning.withdrawn)}")
        for reason, count in cleaning.counts().items()
    ]
    judges = "held-out photos" if cleaning.held_out else "training photos: the run holds out none"
    return render_page(
        "clean.html",
        title=f"{int(removed.sum())} of {len(removed)} Gaussians are removed",
        lead=str(cleaning),
        keys=[
            (f"{cleaning.psnr_before:.2f} dB", f"PSNR before, {judges}"),
            (f"{cleaning.psnr_after:.2f} dB", f"PSNR after, {judges}"),
            (f"{float(removed.float().mean()):.1%}", "of the Gaussians are removed"),
        ],
        reasons=Table(["reason", "Gaussians", "meaning"], rows, "lrn"),
        views=views,
        signature=f"Run: {run.checkpoint}, step {run.step}.",
    )


@torch.no_grad()
def _picture(run: SplatRun, gaussians: Gaussians, view: PinholeCameras) -> Picture:
    if len(gaussians):
        colors = render(run.scene(gaussians), view).rasterization.colors
    else:
        colors = run.model.background.expand(int(view.heights[0]), int(view.widths[0]), 3)
    return Picture.from_array(to_bytes(colors.cpu().numpy()))
