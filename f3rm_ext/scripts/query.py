"""``f3rm-ext query``: where in the scene something is, as pictures, videos and numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.options import QueryOptions, parse_queries
from f3rm_ext.scripts.common import OutArg
from f3rm_ext.utils.console import console, say
from f3rm_ext.utils.ranges import Range

if TYPE_CHECKING:
    import numpy as np

    from f3rm_ext.query import embeddings
    from f3rm_ext.query.run import CameraPath, Photos, View
    from f3rm_ext.query.writer import QueryResult, QueryWriter


@dataclass(kw_only=True)
class Query(QueryOptions):
    """Finds things in a trained scene, or on a mesh with features, by text, by example or by saved vectors.

    Writes a folder with overview.png, a sheet of all results; overlay/QUERY/VIEW.png, heat over each view;
    labels/VIEW.png, which query fits each pixel best, if there are several queries; scores/VIEW.npz, the scores;
    QUERY.mp4, a video along a camera path; QUERY.npy, the vectors of a query, for --vector; and summary.json, the best
    pixel of each query in each view and its place in the scene. Every file names the checkpoint and the queries it
    comes from. With --mesh there is also heat/QUERY.ply, the mesh with heat as vertex colours; `f3rm-ext export part`
    cuts out what is found.

    Typical calls:
      f3rm-ext query --load-config .../config.yml --text "blue mug" "fruit=banana | plantain"
      f3rm-ext query --load-config .../config.yml --exemplar face=0001.jpg:250,300,80,80
      f3rm-ext query --load-config .../config.yml --text fox --views camera-path.json --out fox
      f3rm-ext query --load-config .../config.yml --vector query/face.npy --views all --negative none
      f3rm-ext query --mesh room.ply --text "blue mug"
      f3rm-ext query --load-config .../config.yml --list
    """

    list_groups: Annotated[bool, tyro.conf.arg(name="list")] = False
    """List the groups that the Gaussians of a run, the vertices of a mesh or the surfaces of a field form, things and
    parts of things, instead of a query: a table, groups.png, and groups.ply for a mesh. --text gives texts to name them
    after, if the feature understands text."""
    views: str = "auto"
    """Views to score: the test, train or all photos, the name of one photo, or a camera path of the viewer (.json),
    which also gives videos; auto takes the test photos, or those of training where none is held out."""
    out: Annotated[Path | None, OutArg] = None
    """Folder for the results; by default query, beside the config or the mesh. Files of other programs in it are left
    alone."""
    scale: Annotated[float, Range(0, 4, above=True)] = 1.0
    """Scale of the rendered images, above 0 to 4; 1 keeps the size of the photos."""
    fps: Annotated[float, Range(0)] = 0.0
    """Frame rate of videos, frames per second; 0 takes the rate of the camera path."""
    save_scores: bool = True
    """Write the scores of each view."""
    save_depth: bool = False
    """Write the depth of each view beside its scores (distance along the ray, scene units)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.list_groups and (self.exemplar or self.vector or self.views.endswith(".json")):
            raise ConfigError("--list only takes texts and views of photos: leave out --exemplar, --vector and paths.")
        if not (self.list_groups or self.text or self.exemplar or self.vector):
            raise ConfigError("There is no query: give --text, --exemplar or --vector.")

    def main(self) -> int:
        from f3rm_ext.html.page import plural
        from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.query.render import score_views
        from f3rm_ext.query.run import read_camera_path
        from f3rm_ext.query.writer import QueryWriter

        if self.list_groups:
            return self._list_groups()
        path = read_camera_path(Path(self.views)) if self.views.endswith(".json") else None
        specs = parse_queries(self)
        run = open_run_or_mesh(self.load_config, self.mesh, self.data)
        views = self._views(run, path)
        queries = encode_queries(specs, run)
        for query in queries:
            say(
                f"{query.name}: {plural(len(query.positives), 'direction')} to find, {len(query.negatives)} to tell "
                f"from; scores from {self.threshold:g} match."
            )
        writer = QueryWriter(
            run,
            queries,
            views,
            self.out or self.target_folder() / "query",
            threshold=self.threshold,
            fps=None if path is None else self.fps or path.fps,
            save_scores=self.save_scores,
            save_depth=self.save_depth,
        )
        result = writer.write(score_views(run.model, views, queries))
        if self.mesh is not None:
            self._write_heat_meshes(run, queries, writer, result)
        console().print(self._table(result.summary))
        for name, best in result.summary["best"].items():
            if best["best_score"] < self.threshold:
                say(f"{name}: nothing matches; the place above is only where the score is highest.")
        overview = result.folder / "overview.png"
        say(f"The results are in {result.folder}; begin with {overview}.")
        return 0

    def _list_groups(self) -> int:
        """Lists the groups of a run."""
        from f3rm_ext.export.surface_groups import group_surfaces
        from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
        from f3rm_ext.query.group_list import PICTURE, list_groups, tabulate
        from f3rm_ext.query.queryable import HasGroups, get_head

        run, out = open_run_or_mesh(self.load_config, self.mesh, self.data), self.out or self.target_folder() / "groups"
        views, grouped, head = self._views(run, None), run.model, get_head(run.model.query_heads(), self.feature)
        if not isinstance(grouped, HasGroups) or grouped.grouped_points(head.name) is None:
            grouped = group_surfaces(run.model, head, run.cameras("train"))
        groups = list_groups(run, grouped, views, head, self.text, out)
        if self.mesh is not None and grouped is run.model:
            self._write_group_mesh(run, head.name, out)
        say(tabulate(groups).text(), f"{len(groups)} groups; {out / PICTURE} shows them.")
        return 0

    def _views(self, run: "Photos", path: "CameraPath | None") -> "list[View]":
        from f3rm_ext.query.run import photo_views

        if path is None:
            return photo_views(run, self.views, self.scale)
        if path.has_crop:
            console().print("The camera path has a crop box, which queries ignore: they score the whole scene.")
        return path.views(self.scale)

    def _write_heat_meshes(
        self, run: "Photos", queries: "list[embeddings.Query]", writer: "QueryWriter", result: "QueryResult"
    ) -> None:
        """Writes the mesh with heat as vertex colours, in the frame of the capture, one file for each query."""
        import torch

        from f3rm_ext.utils.colormaps import heat_overlay

        scores, colors = torch.from_numpy(run.model.score_vertices(queries)), run.model.vertex_colors()
        for index, query in enumerate(queries):
            path = result.folder / "heat" / f"{writer.slugs[query.name]}.ply"
            limits = result.summary["heat"][query.name]
            heat = heat_overlay(torch.from_numpy(colors).float(), scores[:, index], *limits)
            _write_colored_mesh(path, run, heat.numpy(), {**writer.provenance, "query": query.name})

    def _write_group_mesh(self, run: "Photos", feature: str, folder: Path) -> None:
        """Writes the mesh with the colours of its groups."""
        from f3rm_ext.query.writer import provenance
        from f3rm_ext.utils.colormaps import label_colors

        groups = run.model.grouped_points(feature).groups.long()
        colors = label_colors(groups, int(groups.max()) + 1).numpy()
        _write_colored_mesh(folder / "groups.ply", run, colors, provenance("query --list", run, [], 0.0))

    def _table(self, summary: dict[str, Any]) -> Any:
        from rich.table import Table
        from rich.text import Text

        from f3rm_ext.html.page import plural

        table = Table(title=f"Best of {plural(len(summary['views']), 'view')}")
        for column in ("query", "view", "x, y px", "score", "place in the capture"):
            table.add_column(column, justify="left" if column in ("query", "view") else "right")
        for name, best in summary["best"].items():
            place = best["best_at_capture"]
            x, y = best["best_px"]
            coordinates = "-" if place is None else ", ".join(f"{value:.3f}" for value in place)
            table.add_row(Text(name), Text(best["view"]), f"{x:g}, {y:g}", f"{best['best_score']:.3f}", coordinates)
        return table


def _write_colored_mesh(path: Path, run: "Photos", colors: "np.ndarray", record: dict[str, object]) -> None:
    """Writes the mesh of a run with colours of its vertices, 0 to 1, in the frame of the capture."""
    import trimesh

    from f3rm_ext.mesh.mesh_files import require_replaceable, write_mesh
    from f3rm_ext.utils.pictures import to_bytes

    frame = run.frame
    vertices = frame.to_capture(run.model.mesh.vertices)
    require_replaceable(path)
    made = trimesh.Trimesh(vertices, run.model.mesh.faces, vertex_colors=to_bytes(colors), process=False)
    write_mesh(path, made, {**record, "frame": "capture", **frame.describe()})
