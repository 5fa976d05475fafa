"""Makes pictures of the documentation that show several images side by side, or a report.

python docs/make_pictures.py mesh CAPTURE MESH PHOTO
"""

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image
from tyro.conf import Positional, subcommand

IMAGES = Path(__file__).parent / "images"
DRIVER = Path(__file__).parents[1] / "tests" / "e2e" / "viewer_page.py"
PART_WIDTH_PX = 420
PART_MARGIN = 1.25
"""Side of the enlarged part's picture over that of the part in it."""


@dataclass
class Overview:
    """Photo, rendering, depth and features of a held-out view, from the pictures of `ns-eval --render-output-path`."""

    folder: Positional[Path]
    """Folder of ns-eval's pictures."""
    view: int = 0
    """Number of the held-out view."""
    height_px: int = 420
    """Height of the picture."""
    out: Path = IMAGES / "overview.jpg"
    """File to write."""

    def main(self) -> None:

        def picture(name: str) -> np.ndarray:
            return np.asarray(Image.open(self.folder / f"eval_{name}_{self.view:04d}.png").convert("RGB"))

        photo, rendering = np.array_split(picture("img"), 2, axis=1)
        features = np.array_split(picture("feature_pca"), 2, axis=1)[1]
        write_strip([photo, rendering, picture("depth"), features], self.height_px, self.out, gap_px=8)


@dataclass
class Mesh:
    """A photo, a mesh with its colours from the same place, and the mesh alone, shaded."""

    capture: Positional[Path]
    """Folder with transforms.json."""
    mesh: Positional[Path]
    """Mesh in the frame of the capture."""
    photo: Positional[str]
    """Name of a training photo."""
    height_px: int = 360
    """Height of the picture."""
    out: Path = IMAGES / "mesh-room.jpg"
    """File to write."""

    def main(self) -> None:
        import trimesh

        from f3rm_ext.mesh.mesh_files import read_mesh

        camera, photo = photo_camera(self.capture, self.photo)
        mesh = read_mesh(self.mesh)
        ahead = np.asarray(mesh.vertices) - camera.center
        ahead /= np.maximum(np.linalg.norm(ahead, axis=1, keepdims=True), 1e-9)
        facing = np.abs((np.asarray(mesh.vertex_normals) * ahead).sum(axis=1))
        shades = np.repeat(40 + 200 * facing[:, None] ** 0.8, 3, axis=1).astype(np.uint8)
        shaded = trimesh.Trimesh(mesh.vertices, mesh.faces, vertex_colors=shades, process=False)
        write_strip([photo, *(on_white(part, camera) for part in (mesh, shaded))], self.height_px, self.out)


@dataclass
class Part:
    """A query on a mesh: the mesh, its heat, and the part that was cut out, enlarged, seen by the camera of a photo."""

    capture: Positional[Path]
    """Folder with transforms.json."""
    mesh: Positional[Path]
    """Mesh in the frame of the capture."""
    heat: Positional[Path]
    """Mesh that `f3rm-ext query` has coloured."""
    part: Positional[Path]
    """Mesh of `f3rm-ext export part`."""
    photo: Positional[str]
    """Name of a training photo."""
    out: Path = IMAGES / "mesh-part.jpg"
    """File to write."""

    def main(self) -> None:
        from f3rm_ext.mesh.mesh_files import read_mesh

        camera, _ = photo_camera(self.capture, self.photo)
        factor = PART_WIDTH_PX / camera.width
        height_px = round(camera.height * factor)
        camera = camera._replace(
            focal=factor * camera.focal, middle=factor * camera.middle, width=PART_WIDTH_PX, height=height_px
        )
        mesh, heat, part = map(read_mesh, (self.mesh, self.heat, self.part))
        at, _ = camera.project(np.asarray(part.vertices))
        low, high = at.min(axis=0), at.max(axis=0)
        size = np.array([camera.width, camera.height])
        zoom = float((size / (PART_MARGIN * (high - low))).min())
        close = camera._replace(focal=zoom * camera.focal, middle=zoom * (camera.middle - (low + high) / 2) + size / 2)
        pictures = [on_white(mesh, camera), on_white(heat, camera), on_white(part, close)]
        write_strip(pictures, height_px, self.out)


@dataclass
class Texture:
    """Pictures of `f3rm-ext eval texture --pictures`, one below the other: the textured mesh beside the photo."""

    pictures: Positional[tuple[Path, ...]]
    """Files to show."""
    width_px: int = 960
    """Width of the picture."""
    out: Path = IMAGES / "texture-room.jpg"
    """File to write."""

    def main(self) -> None:
        rows = [Image.open(path).convert("RGB") for path in self.pictures]
        rows = [row.resize((self.width_px, round(row.height * self.width_px / row.width)), LANCZOS) for row in rows]
        Image.fromarray(np.concatenate(list(map(np.asarray, rows)))).save(self.out, quality=88)


@dataclass
class Moco:
    """What one example finds in several features: a held-out view, and the relevancy in each feature over it.

    The run is on a capture with labels and distils the features, such as the one in docs/benchmarks.md. The
    example is one pixel in a training photo, as `f3rm-ext eval query --by example` chooses it; it is compared with the
    rest of that photo and with the other classes.
    """

    config: Positional[Path]
    """config.yml of the run."""
    thing: str = "pear"
    """Class to ask for."""
    view: str = "008.jpg"
    """Held-out photo."""
    heads: tuple[str, ...] = ("moco", "dense-daisy", "dinov2")
    """Features, from left to right."""
    skip: tuple[str, ...] = ("table",)
    """Classes that are not asked for."""
    scale: float = 1.0
    """Factor on the run's image size for the rendering."""
    height_px: int = 300
    """Height of the picture."""
    out: Path = IMAGES / "moco-example.jpg"
    """File to write."""

    def main(self) -> None:
        from f3rm_ext.capture.ground_truth import CaptureGroundTruth
        from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
        from f3rm_ext.query.builders import draw_places, exemplar_queries
        from f3rm_ext.query.queryable import get_head, score_image
        from f3rm_ext.query.run import photo_views
        from f3rm_ext.utils.colormaps import heat_overlay_bytes
        from f3rm_ext.utils.pictures import to_bytes

        run = open_run_or_mesh(self.config, None, None)
        truth = CaptureGroundTruth(run.data)
        (view,) = photo_views(run, self.view, self.scale)
        assert view.photo is not None
        names = [name for name in truth.classes if name not in self.skip]
        panels = [np.asarray(run.photo(*view.photo))]
        places = draw_places(run, truth, names)
        for name in self.heads:
            (queries,) = exemplar_queries(run, get_head(run.model.query_heads(), name), places, "both")
            (query,) = [each for each in queries if each.name == self.thing]
            scores, outputs = score_image(run.model, view.camera, [query])
            print(name, query.positives.sources, f"{scores.min():.2f} to {scores.max():.2f}")
            rgb = to_bytes(outputs["rgb"].cpu().numpy())
            panels.append(heat_overlay_bytes(rgb, scores[..., 0].cpu().numpy(), 0.0, 1.0))
        write_strip(panels, self.height_px, self.out, gap_px=6)


@dataclass
class Report:
    """The report of `f3rm-ext sugar run` in headless Chromium. Needs `pip install f3rm-ext[e2e]` and a `chromium`."""

    page: Positional[Path]
    """The .html file."""
    width_px: int = 1180
    """Width of the window."""
    height_px: int = 1780
    """Height of the window."""
    scale: float = 0.75
    """Factor on the size of the picture."""
    out: Path = IMAGES / "sugar-run-report.jpg"
    """File to write."""

    def main(self) -> None:
        driver = browser_driver()
        if reason := driver.why_not():
            raise SystemExit(reason)
        with driver.chromium() as browser:
            page = browser.new_page(viewport={"width": self.width_px, "height": self.height_px})
            page.goto(self.page.resolve().as_uri())
            page.locator("[data-state=shown]").first.wait_for(timeout=driver.TIMEOUT_MS)
            self.prepare(page)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        size = (round(picture.width * self.scale), round(picture.height * self.scale))
        picture.resize(size, LANCZOS).save(self.out, quality=86)

    def prepare(self, page: Any) -> None:
        """Does what a reader would do before the picture is taken."""


@dataclass(kw_only=True)
class SplatPage(Report):
    """A page of `f3rm-ext export page` that is asked a question, in headless Chromium."""

    question: str
    """Name of the question."""
    camera: str
    """Name of the photo to look from."""
    width_px: int = 1280
    """Width of the window."""
    height_px: int = 800
    """Height of the window."""
    out: Path = IMAGES / "splat-page.jpg"
    """File to write."""

    def prepare(self, page: Any) -> None:
        """Chooses the camera and the question."""
        page.locator("#cameras").select_option(label=self.camera)
        page.get_by_role("button", name=self.question, exact=True).click()
        page.evaluate("async () => { await f3rm.settled; }")


LANCZOS = Image.Resampling.LANCZOS


def write_strip(pictures: Sequence[np.ndarray], height_px: int, out: Path, gap_px: int = 0) -> None:
    """Writes RGB images side by side as JPEG, all of one height, on white."""
    panels = [Image.fromarray(picture) for picture in pictures]
    panels = [panel.resize((round(panel.width * height_px / panel.height), height_px), LANCZOS) for panel in panels]
    strip = Image.new("RGB", (sum(panel.width + gap_px for panel in panels) - gap_px, height_px), "white")
    left = 0
    for panel in panels:
        strip.paste(panel, (left, 0))
        left += panel.width + gap_px
    strip.save(out, quality=88)


def photo_camera(capture: Path, name: str) -> tuple[Any, np.ndarray]:
    """Returns the camera of a training photo, and its pixels."""
    from f3rm_ext.mesh.texture.photos import open_capture

    source = open_capture(capture)
    files = source.parser.get_dataparser_outputs("train").image_filenames
    index = [Path(file).name for file in files].index(name)
    camera = source.photos("train", "capture").cameras[index]
    return camera, np.asarray(Image.open(files[index]).convert("RGB"))


def on_white(mesh: Any, camera: Any) -> np.ndarray:
    """Renders a coloured mesh before white; pixels that it covers only in part are white too."""
    from f3rm_ext.mesh.texture.rendering import MeshRenderer

    picture = MeshRenderer(mesh).render(camera)
    return np.where(picture.covered[..., None], np.rint(picture.colors), 255).astype(np.uint8)


def browser_driver() -> Any:
    """Returns the module that drives Chromium in the tests."""
    spec = importlib.util.spec_from_file_location("viewer_page", DRIVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Picture = (
    Annotated[Overview, subcommand("overview")]
    | Annotated[Mesh, subcommand("mesh")]
    | Annotated[Part, subcommand("part")]
    | Annotated[Texture, subcommand("texture")]
    | Annotated[Moco, subcommand("moco")]
    | Annotated[Report, subcommand("report")]
    | Annotated[SplatPage, subcommand("page")]
)

if __name__ == "__main__":
    tyro.cli(Picture, description=__doc__).main()  # type: ignore[arg-type]
