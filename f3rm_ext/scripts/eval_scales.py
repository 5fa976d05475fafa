"""``f3rm-ext eval scales``: image quality of splats at resolutions above and below that of training."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.common import OutArg, check_suffix, require_own_file, write_json
from f3rm_ext.utils.console import image_progress, say
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.export.splats import SplatRun
    from f3rm_ext.splat.multiscale_eval import ScaleResult

COMMAND = "f3rm-ext eval scales"
Switch = Literal["as-trained", "on", "off"]
_SWITCHES: dict[Switch, bool | None] = {"as-trained": None, "on": True, "off": False}


@dataclass
class EvalScales:
    """Compares renderings at several resolutions, above and below that of training, with the held-out photos.

    Lower resolutions stand for views from farther away; the photos are averaged over the area of each pixel. Higher
    resolutions stand for views from nearer and need photos larger than those of training; scales beyond the size of
    the files are left out. The command writes the metrics (scales.json) and one view at all scales, each photo above
    its rendering (scales.png), beside the config.

    The filter options switch the filters of a model that was trained with or without them. To measure their benefit,
    train twice: with and without --pipeline.model.mip.filter-2d and --pipeline.model.mip.filter-3d.

    Typical calls:
      ns-train sugar-ext --data room --pipeline.datamanager.camera-res-scale-factor 0.125
      f3rm-ext eval scales --load-config .../config.yml
      f3rm-ext eval scales --load-config .../config.yml --filter-3d off --scales 1 2 4
    """

    load_config: Path
    """config.yml of the run."""
    scales: tuple[Positive, ...] = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    """Scales to compare, as ratios to the training resolution, above 0."""
    filter_2d: Switch = "as-trained"
    """Whether to render with Mip-Splatting's 2D filter (on) or 3DGS's dilation (off)."""
    filter_3d: Switch = "as-trained"
    """Whether to render with the 3D filter; on computes it if the run was trained without."""
    view: Annotated[int, Range(0)] = 0
    """Index of the held-out photo to show in scales.png, 0 or more."""
    out: Annotated[Path | None, OutArg] = None
    """JSON file for the metrics; the image gets the same name with .png. By default scales.json beside the config, with
    switched filters in its name."""

    def __post_init__(self) -> None:
        if not self.scales:
            raise ConfigError("There are no scales to compare: give some, e.g. --scales 0.5 1 2.")
        check_ranges(self)
        check_suffix(self.out, ".json")

    def main(self) -> int:
        from nerfstudio.utils.rich_utils import CONSOLE

        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.splat.multiscale_eval import evaluate_scales, select_scales, strip_png
        from f3rm_ext.utils.output_file import write_file
        from f3rm_ext.utils.provenance import sign_png

        run = load_splat_run(self.load_config)
        photos = run.photos
        if self.view >= len(photos):
            raise ConfigError(
                f"--view is {self.view}, but there are {len(photos)} held-out photos: use 0 to {len(photos) - 1}."
            )
        scales, left_out = select_scales(self.scales, photos.views, photos.scale_factor)
        say(*left_out)
        if not scales:
            raise ConfigError("None of the --scales can be compared, for the reasons above: choose others.")
        out = self.out or self.load_config.parent / self._name()
        picture = out.with_suffix(".png")
        for path in (out, picture):
            require_own_file(path, COMMAND)
        trained = self._filters(run)
        run.set_filters(_SWITCHES[self.filter_2d], _SWITCHES[self.filter_3d])
        with image_progress("images") as progress:
            task = progress.add_task("Scales", total=len(scales) * len(photos))
            results = evaluate_scales(run.model, photos, scales, self.view, lambda: progress.update(task, advance=1))
        record = {
            "made_by": COMMAND,
            **run.describe(),
            "trained_at": photos.scale_factor,
            "trained_with": trained,
            "drawn_with": self._filters(run),
            "gaussians": run.model.num_gaussians,
            "view": self.view,
            "scales": [result.record() for result in results],
            "left_out": left_out,
        }
        write_json(out, record)
        write_file(picture, sign_png(strip_png(results), {"made_by": COMMAND}))
        CONSOLE.print(self._table(results))
        say(f"Metrics are in {out}, images in {picture}.")
        return 0

    @staticmethod
    def _filters(run: "SplatRun") -> dict[str, bool]:
        mip = run.model.config.mip
        return {"filter_2d": mip.filter_2d, "filter_3d": mip.filter_3d}

    def _name(self) -> str:
        switched = {"2d": self.filter_2d, "3d": self.filter_3d}
        parts = [f"{name}-{switch}" for name, switch in switched.items() if switch != "as-trained"]
        return "-".join(["scales", *parts]) + ".json"

    @staticmethod
    def _table(results: "list[ScaleResult]") -> Any:
        from rich.table import Table

        from f3rm_ext.splat.multiscale_eval import METRICS

        table = Table(title="Held-out photos at several scales (×1: as trained)")
        for column in ("scale", "size, px", *(name.upper() for name in METRICS)):
            table.add_column(column, justify="right")
        digits = {"psnr": 2, "ssim": 4, "lpips": 4, "l1": 4}
        for result in results:
            means = result.means()
            cells = [f"{means[name]:.{digits[name]}f}" if name in means else "-" for name in METRICS]
            table.add_row(f"×{result.scale:g}", f"{result.width_px} × {result.height_px}", *cells)
        return table
