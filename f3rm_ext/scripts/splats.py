"""``f3rm-ext splats``: what can be done to a finished run of splats."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.options import QueryInputs, parse_queries
from f3rm_ext.scripts.common import OutArg
from f3rm_ext.utils.console import note, say
from f3rm_ext.utils.ranges import Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.export.splats import SplatRun


@dataclass(kw_only=True)
class Clean:
    """Removes floaters from a finished run of sugar-ext, and says why each of them went.

    The evidence comes from the training views and from the other Gaussians; docs/splats-clean.md explains it. If more
    than 0.05 dB would be lost on held-out photos (on training photos where the run holds out none), reasons are
    withdrawn, costliest first. The run itself stays as it is. What remains is a run of its own, with the features of
    the Gaussians, for every command that takes --load-config; beside its config.yml are removed.ply, the splats that
    went with their reasons, and report.html, with pictures before and after. To train on, start a run from it with
    --pipeline.model.start-from.

    Typical calls:
      f3rm-ext splats clean --load-config .../config.yml
      f3rm-ext splats clean --load-config .../config.yml --dry-run
      f3rm-ext splats clean --load-config .../config.yml --out .../sugar-ext/clean
    """

    load_config: Path
    """config.yml of the run."""
    out: Annotated[Path | None, OutArg] = None
    """Folder of the new run; by default beside the old one, with -clean at the end of its name. It must be new or of
    this command."""
    dry_run: bool = False
    """Only say what would be removed, and what it costs."""

    def main(self) -> int:
        from f3rm_ext.export.clean import COMMAND, clean_splats, write_cleaned

        run_folder = self.load_config.resolve().parent
        out = self.out or run_folder.with_name(f"{run_folder.name}-clean")
        run = _open_run(self.load_config, None if self.dry_run else out, COMMAND)
        cleaning = clean_splats(run)
        note(str(cleaning))
        if self.dry_run:
            return 0
        write_cleaned(run, self.load_config, out, cleaning)
        say(f"The run without them is {out / 'config.yml'}; {out / 'report.html'} shows the difference.")
        return 0


@dataclass(kw_only=True)
class Select(QueryInputs):
    """Lifts an object out of a finished run of sugar-ext, or takes it away.

    The training views are searched as `f3rm-ext query` does, and each Gaussian is judged by where it shows: it belongs
    to the object if at least half of its weight in all of these views lies on it. So do Gaussians that come to light
    where the object was. What no view saw behind the object is empty; the command says how much that is. The run itself
    stays as it is. The result is a run of its own, for every command that takes --load-config; beside its config.yml
    are removed.ply, the splats that went, and report.html, with pictures before and after. In `ns-viewer`, buttons do
    the same step by step.

    Typical calls:
      f3rm-ext splats select --load-config .../config.yml --text banana --keep
      f3rm-ext splats select --load-config .../config.yml --exemplar 0001.jpg:250,300 --remove
      f3rm-ext splats select --load-config .../config.yml --label "blue cup" --remove --out .../sugar-ext/no-cup
      f3rm-ext splats select --load-config .../config.yml --box -0.5 -0.5 -0.2 0.5 0.5 0.4 --keep
    """

    load_config: Path
    """config.yml of the run."""
    keep: bool = False
    """Keep only the object."""
    remove: bool = False
    """Keep the scene without the object."""
    label: tuple[str, ...] = ()
    """Classes of the capture's label images."""
    box: tuple[float, float, float, float, float, float] | None = None
    """Least x, y, z and greatest x, y, z, scene units: the object ends there. Alone, it is all that lies inside."""
    out: Annotated[Path | None, OutArg] = None
    """Folder of the new run; by default beside the old one, with -keep or -remove and the object at the end of its
    name. It must be new or of this command."""
    dry_run: bool = False
    """Only say what would be selected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == self.remove:
            raise ConfigError("An object is lifted out or taken away: give either --keep or --remove.")
        if not (self.text or self.exemplar or self.vector or self.label or self.box):
            raise ConfigError("Nothing is selected: give --text, --exemplar, --vector, --label or --box.")
        if self.box is not None and not all(self.box[axis] < self.box[axis + 3] for axis in range(3)):
            raise ConfigError("The --box is empty: give the least x, y, z first, then the greatest x, y, z.")

    def main(self) -> int:
        from f3rm_ext.export.select import COMMAND, Wish, select_splats, write_selection
        from f3rm_ext.utils.output_folder import file_names

        wish = Wish(parse_queries(self), self.threshold, self.label, self.box)
        run_folder = self.load_config.resolve().parent
        (what,) = file_names(["-".join(["keep" if self.keep else "remove", *wish.names])])
        out = self.out or run_folder.with_name(f"{run_folder.name}-{what}")
        run = _open_run(self.load_config, None if self.dry_run else out, COMMAND)
        selection = select_splats(run, wish)
        note(str(selection))
        if self.dry_run:
            return 0
        write_selection(run, self.load_config, out, selection, keep=self.keep, wish=wish)
        say(f"The run {'of it' if self.keep else 'without it'} is {out / 'config.yml'}; see {out / 'report.html'}.")
        return 0


@dataclass(kw_only=True)
class Confidence:
    """Measures how well the photos fix each Gaussian, and says where to stand for the next photos.

    Confidence, 0 to 1, counts the views that agree on where a Gaussian is, by the angles between them;
    docs/splats-confidence.md explains it. It goes into the newest checkpoint of the run, so that the viewer and
    ns-render have the output confidence, and `f3rm-ext export splats` writes it into .ply, .glb and .usda. Further
    training drops it. The next photos are those that would lower the uncertainty of the visible surface most, from
    places that the photos show to be free. They are told in words and pictures in report.html, and as poses in
    next_photos.json (transforms.json's form) and camera_path.json (for the viewer, ns-render and f3rm-ext query).

    Typical calls:
      f3rm-ext splats confidence --load-config .../config.yml
      f3rm-ext splats confidence --load-config .../config.yml --photos 5
    """

    load_config: Path
    """config.yml of the run."""
    photos: Annotated[int, Range(0, 1000)] = 10
    """Maximum number of photos to suggest; 0 only measures confidence."""
    out: Annotated[Path | None, OutArg] = None
    """Folder of the report; by default beside the run, with -confidence at the end of its name. It must be new or of
    this command."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def main(self) -> int:
        from f3rm_ext.export.confidence import COMMAND, measure_confidence, save_confidence, write_measurement
        from f3rm_ext.export.derived import require_own_run
        from f3rm_ext.export.splats import load_splat_run

        run_folder = self.load_config.resolve().parent
        out = self.out or run_folder.with_name(f"{run_folder.name}-confidence")
        require_own_run(out, run_folder, COMMAND)
        run = load_splat_run(self.load_config)
        measured = measure_confidence(run, self.photos)
        save_confidence(run.checkpoint, measured.confidence)
        write_measurement(run, out, measured)
        note(str(measured))
        for number, advice in enumerate(measured.advice, start=1):
            say(f"{number}. {advice.words}")
        say(f"The confidence is in {run.checkpoint}, and the report in {out / 'report.html'}.")
        return 0


def _open_run(load_config: Path, out: Path | None, command: str) -> "SplatRun":
    """Opens a run whose Gaussians can go one by one; checks first whether a folder may become the run without them."""
    from f3rm_ext.export.derived import require_divisible, require_own_run
    from f3rm_ext.export.splats import load_splat_run

    if out is not None:
        require_own_run(out, load_config.resolve().parent, command)
    run = load_splat_run(load_config)
    require_divisible(run)
    return run


SplatsCommand = Clean | Select | Confidence
