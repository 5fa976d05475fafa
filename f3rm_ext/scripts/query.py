"""``f3rm-ext query``: where in the scene something is, as pictures, videos and numbers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.options import QueryOptions

if TYPE_CHECKING:
    from f3rm_ext.query.run import Run
    from f3rm_ext.query.views import CameraPath, View


@dataclass(kw_only=True)
class Query(QueryOptions):
    """Asks a trained run where things are, by text, by example or by saved vectors.

    Writes to a folder: overview.png to look at; overlay/QUERY/VIEW.png, heat over each view; labels/VIEW.png, which
    query claims what, where there are several; scores/VIEW.npz, the scores themselves; QUERY.mp4 along a camera path;
    QUERY.npy, the vectors asked with, for --vector; and summary.json, with the best pixel of each query in each view
    and its place in the scene. Every file says which checkpoint and query it comes from.

    Typical calls:
      f3rm-ext query --load-config .../config.yml --text "blue mug" "fruit=banana | plantain"
      f3rm-ext query --load-config .../config.yml --exemplar face=0001.jpg:250,300,80,80
      f3rm-ext query --load-config .../config.yml --text fox --views camera-path.json --out answers
      f3rm-ext query --load-config .../config.yml --vector query/face.npy --views all --negative none
    """

    views: str = "test"
    """Where to look from: test, train or all photos, the name of one photo, or a camera path of the viewer (.json),
    which also gives videos."""
    out: Path | None = None
    """Folder for the answers; by default query beside the config. Files of other programs in it are left alone."""
    scale: float = 1.0
    """Factor of the image size, (0, 4]."""
    fps: float = 0.0
    """Frames per second of videos; 0 for what the camera path says."""
    save_scores: bool = True
    """Write the scores of each view."""
    save_depth: bool = False
    """Write the depth of each view beside its scores (along the ray, scene units)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.text or self.exemplar or self.vector):
            raise ConfigError("Nothing is asked: give --text, --exemplar or --vector.")
        if not 0 < self.scale <= 4:
            raise ConfigError(f"--scale is {self.scale}, outside (0, 4]: 1 keeps the size of the images.")
        if not (self.fps >= 0 and math.isfinite(self.fps)):
            raise ConfigError(f"--fps is {self.fps}, but it has to be 0 (as the camera path says) or above.")

    def main(self) -> int:
        """Asks and writes. Returns the exit code."""
        from f3rm_ext.query.parsing import build_queries
        from f3rm_ext.query.run import load_run
        from f3rm_ext.query.views import read_path
        from f3rm_ext.query.writer import QueryWriter
        from f3rm_ext.utils.console import console

        path = read_path(Path(self.views)) if self.views.endswith(".json") else None
        run = load_run(self.load_config)
        views = self._views(run, path)
        answering = QueryWriter(
            run,
            build_queries(self, run),
            views,
            self.out or self.load_config.parent / "query",
            threshold=self.threshold,
            fps=None if path is None else self.fps or path.fps,
            scores=self.save_scores,
            depth=self.save_depth,
        )
        written = answering.write()
        console().print(self._table(written.summary))
        console().print(f"Answers are in {written.folder}; look at {written.folder / 'overview.png'}.", soft_wrap=True)
        return 0

    def _views(self, run: "Run", path: "CameraPath | None") -> "list[View]":
        from f3rm_ext.query.views import photo_views
        from f3rm_ext.utils.console import console

        if path is None:
            return photo_views(run, self.views, self.scale)
        if path.has_crop:
            console().print("The camera path has a crop box, which queries do not know: all of the scene is asked.")
        return path.views(self.scale)

    def _table(self, summary: dict[str, Any]) -> Any:
        from rich.table import Table

        table = Table(title=f"Best of {len(summary['views'])} views")
        for column in ("query", "view", "x, y px", "score", "place in the capture"):
            table.add_column(column, justify="left" if column in ("query", "view") else "right")
        for name, best in summary["best"].items():
            place = best["best_at_capture"]
            x, y = best["best_px"]
            at = "-" if place is None else ", ".join(f"{value:.3f}" for value in place)
            table.add_row(name, best["view"], f"{x:g}, {y:g}", f"{best['best_score']:.3f}", at)
        return table
