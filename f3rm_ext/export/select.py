"""Choosing Gaussians of a run by a query: an object alone, or the scene without it, as a run of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.derived import Report, write_derived
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.tables import Table
from f3rm_ext.query.builders import encode_queries
from f3rm_ext.query.options import QuerySpec
from f3rm_ext.query.render import MIN_ACCUMULATION, match_pixels
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.rendering import render
from f3rm_ext.splat.selection import Chosen, PackedMasks, choose_gaussians
from f3rm_ext.utils.console import image_progress

COMMAND = "splats select"
Box = tuple[float, float, float, float, float, float]
"""Least x, y, z and greatest x, y, z, scene units."""
Mask = Callable[[int], Bool[np.ndarray, "h w"]]
"""Returns the pixels of a training view that show the object."""


@dataclass(frozen=True)
class Wish:
    """An object to select."""

    queries: Sequence[QuerySpec] = ()
    """Any of them finds the object."""
    threshold: float = 0.5
    """Scores from here upwards match."""
    labels: Sequence[str] = ()
    """Classes of the capture's label images."""
    box: Box | None = None
    """Centres outside do not belong to the object."""

    @property
    def names(self) -> list[str]:
        """Names of the queries and classes; ``box`` where a box alone decides."""
        return [*(spec.name for spec in self.queries), *self.labels] or ["box"]


@dataclass(frozen=True)
class Selection:
    """The Gaussians of an object, and what is left where it was."""

    names: Sequence[str]
    """Names of the queries and classes that found it."""
    chosen: Bool[Tensor, " gaussians"]
    """The object."""
    core: Bool[Tensor, " gaussians"]
    """The object without its hidden Gaussians outside the extent of the others, as ``--keep`` writes it."""
    shares: Float[Tensor, " gaussians"]
    """Share of the weight of each Gaussian that the training views show on the object, 0 to 1."""
    hidden: int
    """Number of the chosen Gaussians that no view shows while the object is there."""
    object_px: int
    """Pixels of the training views that show the object."""
    empty_px: int
    """Those of these pixels that show nothing without it."""

    def __str__(self) -> str:
        share = self.empty_px / max(self.object_px, 1)
        return (
            f"{int(self.chosen.sum())} of {len(self.chosen)} Gaussians are {', '.join(self.names)}, {self.hidden} of "
            f"them hidden within or behind it. Without it {self.empty_px} of the {self.object_px} pixels that show it "
            f"are empty ({share:.1%}), since no view saw what is behind."
        )


def select_splats(run: SplatRun, wish: Wish) -> Selection:
    """Finds the Gaussians of an object.

    The training views are queried, and their masks lifted (:mod:`f3rm_ext.splat.selection`).

    Raises:
        UserError: a query cannot be encoded, there are no such labels, or nothing or everything is found.
    """
    dataset, splats = run.manager.train_dataset, run.splats()
    inside = torch.ones(len(splats), dtype=torch.bool, device=splats.means.device)
    if wish.box is not None:
        low, high = splats.means.new_tensor(wish.box).view(2, 3)
        inside = ((splats.means >= low) & (splats.means <= high)).all(dim=1)
    with image_progress("views") as progress:
        searches = bool(wish.queries or wish.labels)
        task = progress.add_task("Selection", total=len(dataset) * (2 + 2 * searches))

        def advance() -> None:
            progress.advance(task)

        masks = PackedMasks(_mask_of(run, wish), len(dataset), advance) if searches else None
        views = PinholeCameras.of(dataset.cameras).to(splats.means.device)
        if masks is None:
            lifted = Chosen(inside, inside, inside.float())
        else:
            lifted = choose_gaussians(run.scene(splats), views, masks, inside, advance)
        _require_some(lifted.chosen, wish)
        object_px, empty_px = _count_empty(run, lifted.chosen, views, masks, advance)
    hidden = int((lifted.chosen & ~lifted.visible).sum())
    core = lifted.core(splats.means).cpu()
    return Selection(wish.names, lifted.chosen.cpu(), core, lifted.shares.cpu(), hidden, object_px, empty_px)


def _require_some(chosen: Bool[Tensor, " gaussians"], wish: Wish) -> None:
    names = ", ".join(wish.names)
    if not bool(chosen.any()):
        raise ConfigError(
            f"No Gaussian belongs to {names}, so there is nothing to select: look with `f3rm-ext query` where it is "
            "found, lower --threshold, or enlarge --box."
        )
    if bool(chosen.all()):
        raise ConfigError(
            f"All Gaussians belong to {names}, so nothing is told apart: raise --threshold, or give a smaller --box."
        )


def _mask_of(run: SplatRun, wish: Wish) -> Mask:
    dataset = run.manager.train_dataset
    queries = encode_queries(wish.queries, run) if wish.queries else []
    labelled = _labels_of(run, wish.labels) if wish.labels else None

    def mask(index: int) -> Bool[np.ndarray, "h w"]:
        parts = [] if labelled is None else [labelled(index)]
        if queries:
            parts.append(match_pixels(run.model, dataset.cameras[index : index + 1], queries, wish.threshold))
        return np.logical_or.reduce(parts)

    return mask


def _labels_of(run: SplatRun, names: Sequence[str]) -> Mask:
    dataset = run.manager.train_dataset
    truth = CaptureGroundTruth(run.data)
    for name in names:
        if name not in truth.classes:
            known = f"choose from {', '.join(truth.classes)}" if truth.classes else "select by --text or --exemplar"
            raise ConfigError(f"The capture has no label images of {name!r}: {known}.")
    cameras = dataset.cameras
    if any(not lens.is_pinhole or lens.frame != view for lens, view in zip(dataset.lenses, dataset.views, strict=True)):
        raise ConfigError(
            "The photos have lens distortion, and label images are not undistorted for --label: lift the labels as a "
            "feature (`f3rm-ext features lift`), and select by --text."
        )

    def mask(index: int) -> Bool[np.ndarray, "h w"]:
        height, width = int(cameras.height[index].item()), int(cameras.width[index].item())
        view = truth.view(Path(dataset.image_filenames[index]), height, width)
        masks = {} if view is None else view.masks
        return np.logical_or.reduce([masks.get(name, np.zeros((height, width), dtype=bool)) for name in names])

    return mask


@torch.no_grad()
def _count_empty(
    run: SplatRun,
    chosen: Bool[Tensor, " gaussians"],
    views: PinholeCameras,
    masks: PackedMasks | None,
    on_view: Callable[[], None],
) -> tuple[int, int]:
    """Counts the pixels of the views that show the object, and those of them that show nothing without it.

    Without masks, it is what the object covers when it is alone.
    """
    splats, object_px, empty_px = run.splats(), 0, 0
    alone, rest = run.scene(splats[chosen]), run.scene(splats[~chosen])
    for index in range(len(views.viewmats)):
        view = views.take(slice(index, index + 1))
        if masks is None:
            shows = render(alone, view).rasterization.alpha >= MIN_ACCUMULATION
            on_view()
        else:
            shows = masks(index)[..., 0].to(splats.means.device)
        left = render(rest, view).rasterization.alpha
        object_px += int(shows.sum())
        empty_px += int((shows & (left < MIN_ACCUMULATION)).sum())
        on_view()
    return object_px, empty_px


def write_selection(
    run: SplatRun, load_config: Path, out: Path, selection: Selection, *, keep: bool, wish: Wish
) -> None:
    """Writes the object, or the scene without it, as a run; see :func:`~f3rm_ext.export.derived.write_derived`."""
    kept = selection.core if keep else ~selection.chosen
    removed, names = ~kept, ", ".join(selection.names)
    count = int(selection.chosen.sum())
    rows = [
        ("found in the training views", str(count - selection.hidden)),
        ("hidden within or behind it", str(selection.hidden)),
        ("others", str(len(kept) - count)),
    ]
    report = Report(
        title=f"{names} alone" if keep else f"The scene without {names}",
        lead=str(selection),
        keys=[
            (f"{int(kept.sum())}", "Gaussians stay"),
            (f"{int(removed.sum())}", "Gaussians go"),
            (f"{selection.empty_px / max(selection.object_px, 1):.1%}", f"of the pixels of {names} empty without it"),
        ],
        heading="Gaussians",
        table=Table(["Gaussians", "number"], rows, "lr"),
    )
    shares = selection.shares[removed].float().numpy()[:, None]
    scores = GaussianScores(("share",), shares, np.zeros(len(shares), dtype=np.int32))
    summary = {
        "selected": list(selection.names),
        "keep": keep,
        "threshold": wish.threshold,
        "box": wish.box,
        "kept": int(kept.sum()),
        "removed": int(removed.sum()),
        "hidden": selection.hidden,
        "object_px": selection.object_px,
        "empty_px": selection.empty_px,
    }
    write_derived(run, load_config, out, COMMAND, kept, scores, report, summary)
