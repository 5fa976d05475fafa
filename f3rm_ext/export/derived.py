"""Runs made of some Gaussians of a run of splats: one writer for the commands that remove Gaussians."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Bool
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.config_file import read_config
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.splats import SplatRun, export_run
from f3rm_ext.html.page import Picture, render_page
from f3rm_ext.html.tables import Table
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.model import SplatModel
from f3rm_ext.splat.rendering import render
from f3rm_ext.utils.output_file import write_file
from f3rm_ext.utils.output_folder import SUMMARY, OutputFolder, made_by
from f3rm_ext.utils.pictures import pick_evenly, to_bytes
from f3rm_ext.utils.provenance import require_own_folder, sign_text

CONFIG, REMOVED, REPORT = "config.yml", "removed.ply", "report.html"
_TRANSFORMS = "dataparser_transforms.json"
_MODELS = "nerfstudio_models"
_PICTURES = 4
Strip = list[tuple[str, Picture]]
"""Pictures of one view side by side, with their labels."""
_ROWS = re.compile(r"_model\.(gauss_params\.\w+|filter_3d|confidence|lifted\.heads\..+\.(codes|groups))")
"""Names of the tensors with one row per Gaussian."""


@dataclass(frozen=True)
class Report:
    """What the page of a command says beside its pictures."""

    title: str
    lead: str
    """A sentence for people."""
    keys: Sequence[tuple[str, str]]
    """Figures and their meanings."""
    heading: str
    """Above the table."""
    table: Table


def require_divisible(run: SplatRun) -> None:
    """Raises ConfigError where the Gaussians of a run cannot be removed one by one."""
    if not isinstance(run.model, SplatModel):
        raise ConfigError(
            f"The Gaussians of {run.config.method_name} are bound to a mesh, so none of them can go alone: give a run "
            "of sugar-ext, or edit the mesh."
        )


def require_own_run(out: Path, run: Path, command: str) -> None:
    """Checks, before the work begins, that a folder may become the derived run.

    ``run`` is the folder of the run that it is made of; ``command`` is one such as ``splats clean``.

    Raises:
        ConfigError: it is that of the run itself, or holds what the command did not write.
    """
    if out.resolve() == run.resolve():
        raise ConfigError(f"--out is the run itself, {out}: choose another folder, so that both stay.")
    require_own_folder(out, SUMMARY, f"f3rm-ext {command}", "--out")


def write_derived(
    run: SplatRun,
    load_config: Path,
    out: Path,
    command: str,
    kept: Bool[Tensor, " gaussians"],
    scores: GaussianScores,
    report: Report,
    summary: Mapping[str, object],
) -> None:
    """Writes some Gaussians of a run as a run of its own, with a file of what was removed and a report.

    Args:
        load_config: config.yml of the run.
        out: folder to write; files that the command did not write stay.
        command: the one that writes, for example ``splats clean``.
        scores: of the Gaussians that go, in ``removed.ply``.
        summary: what ``summary.json`` says beside the number of Gaussians.

    Raises:
        ConfigError: files of others are in the way, or the folder cannot be written to.
        CheckpointError: the checkpoint cannot be written.
    """
    model_file = f"{_MODELS}/{run.checkpoint.name}"
    transforms = checkpoint.folder_of(load_config).parent / _TRANSFORMS
    others = [] if bool(kept.all()) else [REMOVED]
    others += [_TRANSFORMS] if transforms.is_file() else []
    folder = OutputFolder(out, {**made_by(command), **run.describe()})
    folder.plan([CONFIG, model_file, REPORT, *others])
    for _, path in checkpoint.newest_first(out / _MODELS):
        if path.name != run.checkpoint.name:
            raise ConfigError(
                f"{path} is there already, of another step than {run.checkpoint.name}: move it away, or choose another "
                "folder with --out."
            )
    splats, mask = run.splats(), kept.to(run.model.device)
    parts = {"before": splats, "after": splats[mask], "what went": splats[~mask]}
    if REMOVED in others:
        export_run(run, out / REMOVED, scores=scores, splats=parts["what went"])
    if _TRANSFORMS in others:
        write_file(out / _TRANSFORMS, transforms.read_bytes())
    checkpoint.write(_take_rows(checkpoint.load(run.checkpoint, ("step", "pipeline")), kept), out / model_file)
    write_report(run, out, command, report, _pictures(run, parts))
    # After the checkpoint that it leads to: before, there is no run to open.
    write_file(out / CONFIG, yaml.dump(_config_at(load_config, out)).encode())
    folder.summary({"complete": True, "gaussians": len(kept), **summary})


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
    # Nerfstudio looks in OUTPUT/EXPERIMENT/METHOD/TIMESTAMP/MODELS; an absolute MODELS replaces what is before it.
    if out.parent.name == config.method_name:
        config.output_dir, config.experiment_name = out.parents[2], out.parents[1].name
    else:
        config.relative_model_dir = out / _MODELS
    return config


def write_report(run: SplatRun, out: Path, command: str, report: Report, views: Sequence[Strip]) -> None:
    """Writes the page of a command on a run into a folder; ``views`` are its pictures, view by view."""
    page = render_page(
        "derived.html",
        command=f"f3rm-ext {command}",
        views=views,
        signature=f"Run: {run.checkpoint}, step {run.step}.",
        **vars(report),
    )
    write_file(out / REPORT, sign_text(page, f"f3rm-ext {command}"))


@torch.no_grad()
def _pictures(run: SplatRun, parts: Mapping[str, Gaussians]) -> list[Strip]:
    """Draws parts of the splats as some photos see them, held-out ones if there are any."""
    cameras, strips = (run.manager.eval_dataset or run.manager.train_dataset).cameras, []
    for index in pick_evenly(len(cameras), _PICTURES):
        view, strip = PinholeCameras.to_render(cameras[index : index + 1], run.model.device), []
        for label, gaussians in parts.items():
            if len(gaussians):
                colors = render(run.scene(gaussians), view).rasterization.colors
            else:
                colors = run.model.background.expand(int(view.heights[0]), int(view.widths[0]), 3)
            strip.append((label, Picture.from_array(to_bytes(colors.cpu().numpy()))))
        strips.append(strip)
    return strips
