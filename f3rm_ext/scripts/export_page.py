"""``f3rm-ext export page``: splats or a mesh as a web page that can be turned, in one file."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.query.options import QueryInputs, parse_queries
from f3rm_ext.scripts.common import OutArg, SplatBudgetOptions, check_suffix, require_own_file
from f3rm_ext.utils.console import note, say

if TYPE_CHECKING:
    from f3rm_ext.query.embeddings import Query
    from f3rm_ext.query.run import Run


@dataclass(kw_only=True)
class Page(SplatBudgetOptions, QueryInputs):
    """Writes the splats of a run, or a mesh, as one HTML file that opens in a browser, without a network.

    The page of splats shows what was trained: drag to turn, jump to the cameras of the capture, fly and walk, save
    pictures and the splats themselves. It answers the questions that you give here: heat with a threshold, colours of
    all questions together, only the matches or all but them, and a list of the places where matches lie together. It
    shows notes, too. A question needs a feature on the Gaussians, which `f3rm-ext features lift` adds to a finished
    run. With --mesh the page shows a mesh, which answers no questions; --max-mb then reduces its texture. An existing
    file is replaced only if this program wrote it.

    Typical calls:
      f3rm-ext export page --load-config .../config.yml --out room.html
      f3rm-ext export page --load-config .../config.yml --out room.html --text "blue mug" "plant" --threshold 0.6
      f3rm-ext export page --load-config .../config.yml --out room.html --exemplar "mug=0001.jpg:250,300,80,80"
      f3rm-ext export page --load-config .../config.yml --out room.html --saved .../query --notes notes.json
      f3rm-ext export page --mesh textured.glb --load-config .../config.yml --out room.html
    """

    load_config: Path | None = None
    """config.yml of a run of sugar-ext. With --mesh it may be left out: only its cameras are taken."""
    mesh: Path | None = None
    """Show this textured mesh (.glb, .obj, .ply or .stl) instead of splats; it answers no questions."""
    out: Annotated[Path, OutArg]
    """The .html file to write."""
    saved: Path | None = None
    """Questions of an earlier `f3rm-ext query` to the same run, with their threshold: the folder that it wrote."""
    notes: Path | None = None
    """JSON file of notes to pin to places: a list of {"text": ..., "position": [x, y, z]}, in the frame of
    transforms.json, or {"text": ..., "query": NAME} for the largest place of a question."""
    title: str = ""
    """Headline of the page; by default the name of the capture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_suffix(self.out, ".html")
        self.check_budget()
        if self.mesh is None and self.load_config is None:
            raise ConfigError("A page shows the splats of a run or a mesh: give either --load-config or --mesh.")
        asked = {option.name: getattr(self, option.name) != option.default for option in fields(QueryInputs)}
        given = {f"--{name.replace('_', '-')}": is_given for name, is_given in asked.items()} | {
            "--saved": self.saved,
            "--notes": self.notes,
            "--sh-degree": self.sh_degree is not None,
            "--max-loss-db": self.max_loss_db is not None,
        }
        for option, value in given.items():
            if value and self.mesh is not None:
                raise ConfigError(f"{option} is for splats, but --mesh asks for a mesh: leave out one of the two.")

    def main(self) -> int:
        return self._export_splats() if self.mesh is None else self._export_mesh(self.mesh)

    def _export_mesh(self, mesh: Path) -> int:
        from f3rm_ext.html.content import capture_name
        from f3rm_ext.mesh.texture.photos import open_run_capture
        from f3rm_ext.preview.cameras import source_cameras
        from f3rm_ext.preview.content import MeshContent, open_content
        from f3rm_ext.preview.mesh_page import COMMAND, write_mesh_page

        require_own_file(self.out, COMMAND)
        content = open_content(mesh)
        if not isinstance(content, MeshContent):
            raise MeshError(f"{mesh} has {content.summary} but no triangles, so it is no mesh: give a mesh to --mesh.")
        source = None if self.load_config is None else open_run_capture(self.load_config)
        cameras = [] if source is None else source_cameras(source, content)
        title = self.title or (mesh.stem if source is None else capture_name(source.data))
        made = write_mesh_page(self.out, content, cameras, title, self.max_mb)
        if made.texture_px < made.given_px:
            limit = f" for --max-mb {self.max_mb:g}" if self.max_mb is not None else ""
            note(f"The texture is reduced from {made.given_px} to {made.texture_px} px{limit}.")
        say(f"{made.triangles} triangles are in {self.out} ({made.size_mib:.1f} MiB): open it in a browser.")
        return 0

    def _export_splats(self) -> int:
        import torch

        from f3rm_ext.export.notes import read_notes
        from f3rm_ext.export.page import COMMAND, PageContent, page_size, write_page
        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.html.content import capture_name
        from f3rm_ext.html.page import plural

        assert self.load_config is not None
        require_own_file(self.out, COMMAND)
        notes = [] if self.notes is None else read_notes(self.notes)
        run = load_splat_run(self.load_config)
        title = self.title or capture_name(run.data)
        content = PageContent.of_run(run, self._queries(run), title=title, notes=notes)
        if self.sh_degree is not None:
            content = content.take(torch.arange(len(content.gaussians)), self.sh_degree)

        # A page holds its splats as .spz.
        kept = self.reduce(
            run,
            lambda rows, degree: page_size(content.take(rows, degree), self.out.stem),
            self.out.with_suffix(".spz"),
        )
        if kept is not None:
            content = content.take(kept.rows, kept.sh_degree)
        made = write_page(self.out, content)
        asked = f" and {plural(len(content.questions), 'question')}" if content.questions else ""
        say(
            f"{made.count} Gaussians (SH degree {made.sh_degree}){asked} are in {self.out} ({made.size_mib:.1f} MiB): "
            "open it in a browser."
        )
        return 0

    def _queries(self, run: "Run") -> "list[tuple[Query, float]]":
        """The questions, saved ones first, and their thresholds.

        Raises:
            UserError: a question cannot be asked, is of another run, or has the name of another.
        """
        from f3rm_ext.query.builders import encode_queries, load_queries

        asked: list[tuple[Query, float]] = []
        if self.saved is not None:
            asked = load_queries(self.saved, run)
        asked += [(query, self.threshold) for query in encode_queries(parse_queries(self), run)]
        names = [query.name for query, _ in asked]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(f"Two questions are called {double!r}, a saved one and a new one: name it with NAME=....")
        return asked
