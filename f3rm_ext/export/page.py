"""A web page of splats: one HTML file with the Gaussians, the capture's cameras and the answers to questions."""

import base64
import gzip
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, UInt8
from torch import Tensor

from f3rm_ext import __version__
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.page import Picture, render_page
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, Scorer, get_head
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.files.checks import check_values
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.files.packing import morton_order
from f3rm_ext.splat.files.spz import TO_RUB, write_spz
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.camera import MIN_ALPHA
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, render
from f3rm_ext.utils.colormaps import heat_stops, heat_table, label_hex, label_table
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.pictures import to_bytes
from f3rm_ext.utils.provenance import sign_text

COMMAND = "f3rm-ext export page"
MAX_QUESTIONS = 16
"""The page's shader has as many colours."""
SCORE_LEVELS = 85
"""Steps of a stored score. 255 is a multiple, so a step is a whole number of the bytes that the shader reads."""
_MAX_LOGIT = 8.0
"""Relevancies nearer to 0 and 1 than its sigmoid are stored as that."""
_MAX_CAMERAS = 120
_MAX_PLACES = 5
_MIN_SHARE = 0.04
"""Smallest share of a question's matches that makes a place."""
_LINKS = 8
"""Neighbours that a Gaussian may be joined with to one place."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Place:
    """Where a question's matches lie together. Axes of .spz files."""

    at: tuple[float, float, float]
    """Weighted mean of the matches, scene units."""
    size: float
    """Distance from there within which nine tenths of the matches lie, scene units."""
    camera: int
    """Index of the camera that shows it best."""
    label: str
    """Text beside its button, such as its width."""


@dataclass(frozen=True)
class Question:
    """A question and the score of every Gaussian.

    A page blends what it stores over the Gaussians of a pixel. Relevancies are stored as logits, which are linear in
    the features but for their norm, so that a blend of them is nearly the score of the blended features. A blend of
    relevancies is not: outlines move.
    """

    name: str
    scores: Float32[np.ndarray, " gaussians"]
    threshold: float
    """Scores from here upwards match."""
    is_relevancy: bool = False
    """Whether scores are relevancies, 0 to 1, rather than cosines."""

    @cached_property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value that is stored."""
        values, threshold = self._values(self.scores), float(self._values(np.float64(self.threshold)))
        return min(float(values.min()), threshold - 1e-3), max(float(values.max()), threshold + 1e-3)

    def matches(self) -> Bool[np.ndarray, " gaussians"]:
        """Returns which Gaussians match."""
        return self.scores >= self.threshold

    def to_bytes(self) -> UInt8[np.ndarray, " gaussians"]:
        """Returns the scores in steps; rounding moves none across the threshold."""
        low, high = self.range
        levels = np.rint((self._values(self.scores) - low) / (high - low) * SCORE_LEVELS)
        first = np.ceil((self._values(np.float64(self.threshold)) - low) / (high - low) * SCORE_LEVELS)
        levels = np.where(self.matches(), np.maximum(levels, first), np.minimum(levels, first - 1))
        return (np.clip(levels, 0, SCORE_LEVELS) * (255 // SCORE_LEVELS)).astype(np.uint8)

    def _values(self, scores: Any) -> Any:
        if not self.is_relevancy:
            return scores
        shares = np.clip(np.asarray(scores, np.float64), 1e-9, 1 - 1e-9)  # in float32 the upper end would be 1
        return np.clip(np.log(shares / (1 - shares)), -_MAX_LOGIT, _MAX_LOGIT)


@dataclass(frozen=True)
class PageInfo:
    """Size and content of a page that was written."""

    count: int
    """Number of Gaussians."""
    sh_degree: int
    size_mib: float


@torch.inference_mode()
def score_gaussians(model: Queryable, query: Query) -> Float32[np.ndarray, " gaussians"]:
    """Returns the scores of the Gaussians' own features, chunk by chunk.

    Args:
        model: splats with features.

    Raises:
        ConfigError: see :meth:`~f3rm_ext.query.queryable.Scorer.from_model`.
    """
    scorer, head = Scorer.from_model(model, [query]), get_head(model.query_heads(), query.head)
    assert isinstance(head, LiftedHead)
    chunks = head.codes.split(_CHUNK)
    return torch.cat([scorer(lambda _, part=part: part.float())[:, 0].cpu() for part in chunks]).float().numpy()


def find_places(
    gaussians: Gaussians, matches: Bool[np.ndarray, " gaussians"], cameras: PinholeCameras, scale: float
) -> list[Place]:
    """Finds where Gaussians that match lie together, the place with the largest area first.

    Neighbours are joined that are no farther apart than three times the usual distance between matches.

    Args:
        gaussians: on the CPU, scene frame.
        matches: which of them match.
        cameras: of the capture, scene frame.
        scale: scene units per unit of the capture, in which sizes are told.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    chosen = gaussians[torch.from_numpy(matches)]
    if not len(chosen):
        return []
    means = chosen.means.numpy().astype(np.float64)
    weights = (chosen.alphas() * chosen.sizes().sort(dim=1).values[:, 1:].prod(dim=1)).numpy().astype(np.float64)
    neighbours = min(_LINKS + 1, len(means))
    apart, near = KDTree(means).query(means, k=neighbours)
    apart, near = apart.reshape(len(means), -1), near.reshape(len(means), -1)
    linked = apart <= 3 * np.median(apart[:, -1])
    rows = np.repeat(np.arange(len(means)), neighbours).reshape(near.shape)
    graph = coo_matrix((np.ones(int(linked.sum())), (rows[linked], near[linked])), shape=(len(means),) * 2)
    _, component = connected_components(graph, directed=False)
    totals = np.bincount(component, weights)
    places = []
    for number in np.argsort(-totals)[:_MAX_PLACES]:
        share = totals[number] / totals.sum()
        if share < _MIN_SHARE:
            break
        inside = component == number
        middle = np.average(means[inside], axis=0, weights=weights[inside] + 1e-30)
        radius = float(np.quantile(np.linalg.norm(means[inside] - middle, axis=1), 0.9)) or 1e-3
        x, y, z = (middle * TO_RUB).tolist()
        label = f"{2 * radius / scale:.2g} wide, {share:.0%} of the matches"
        places.append(Place((x, y, z), radius, _best_camera(torch.from_numpy(middle), cameras), label))
    return places


def _best_camera(point: Float[Tensor, "3"], cameras: PinholeCameras) -> int:
    """The camera that shows a point nearest to the middle of its image, and from near by."""
    at = torch.einsum("nij,j->ni", cameras.viewmats[:, :3, :3], point.float()) + cameras.viewmats[:, :3, 3]
    depth = at[:, 2]
    pixels = torch.einsum("nij,nj->ni", cameras.Ks, at)[:, :2] / depth.clamp_min(1e-6)[:, None]
    sides = torch.stack([cameras.widths, cameras.heights], dim=1)
    off = ((pixels / sides - 0.5).abs().amax(dim=1) * 2).clamp_max(1e3)
    cost = depth / depth.clamp_min(1e-6).median() + torch.where(off < 0.9, 0.5 * off, 100.0 * off)
    return int(torch.where(depth > 0, cost, torch.inf).argmin())


@dataclass(frozen=True)
class PageContent:
    """Everything that goes into a page."""

    title: str
    gaussians: Gaussians
    """Scene frame, with the 3D filter in them; on the CPU."""
    cameras: PinholeCameras
    """Of the capture, one or more; scene frame, on the CPU."""
    names: Sequence[str]
    """Names of the cameras."""
    poster: UInt8[np.ndarray, "h w 3"]
    """Picture of the scene for browsers without WebGL2."""
    blur_px2: float
    """Variance that the rasteriser adds, px²."""
    antialiased: bool
    """Whether the rasteriser compensates opacities for the blur."""
    questions: Sequence[Question] = ()
    """At most :data:`MAX_QUESTIONS`."""
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """RGB, 0 to 1."""
    scale: float = 1.0
    """Scene units per unit of the capture."""
    origin: str = ""
    """Where the scene comes from, for the foot of the page."""

    @classmethod
    def of_run(
        cls, run: SplatRun, queries: Sequence[Query], threshold: float, *, title: str, frame: CaptureFrame
    ) -> "PageContent":
        """Collects the content of a run.

        Args:
            queries: the questions that the page answers; the run needs their features.
            threshold: scores from here upwards match at first.
            title: headline.
            frame: of the capture.

        Raises:
            ConfigError: the run has no such feature.
        """
        model, mip = run.model, run.model.config.mip
        assert isinstance(model, Queryable)
        gaussians = run.splats()
        view = PinholeCameras.to_render(run.manager.train_dataset.cameras[0:1], model.device)
        scene = SplatScene(gaussians, gaussians.means.new_zeros(len(gaussians)), replace(mip, filter_3d=False))
        with torch.inference_mode():
            picture = render(scene, view, gaussians.sh_degree, model.background, RenderSettings())
        cameras, names = _cameras(run)
        red, green, blue = model.background.tolist()
        return cls(
            title=title,
            gaussians=gaussians.to("cpu"),
            cameras=cameras,
            names=names,
            poster=to_bytes(picture.rasterization.colors.clamp(0, 1).cpu().numpy()),
            blur_px2=mip.eps2d,
            antialiased=mip.antialiased,
            questions=[
                Question(query.name, score_gaussians(model, query), threshold, query.is_relevancy) for query in queries
            ],
            background=(red, green, blue),
            scale=frame.scale,
            origin=f"{run.config.method_name}, step {run.step}",
        )

    def take(self, rows: Int[Tensor, " kept"], sh_degree: int) -> "PageContent":
        """Returns the content with some of the Gaussians and at most this degree of harmonics."""
        gaussians = self.gaussians[rows]
        questions = [replace(question, scores=question.scores[rows.numpy()]) for question in self.questions]
        gaussians = gaussians.to_sh_degree(min(sh_degree, gaussians.sh_degree))
        return replace(self, gaussians=gaussians, questions=questions)


def page_size(content: PageContent) -> int:
    """Returns the size of the page in bytes, but for the list of places."""
    return len(_draw(content, "page", [[] for _ in content.questions]))


def write_page(out: Path, content: PageContent) -> PageInfo:
    """Writes a page, completely or not at all.

    Args:
        out: an .html file.
        content: what it shows.

    Raises:
        ConfigError: there are too many questions, or the file cannot be written.
        SplatFileError: the Gaussians have values that are NaN or infinite.
    """
    if len(content.questions) > MAX_QUESTIONS:
        raise ConfigError(
            f"A page holds at most {MAX_QUESTIONS} questions, but there are {len(content.questions)}: ask fewer."
        )
    gaussians, _ = check_values(content.gaussians, out, action="would get")
    content = content.take(torch.nonzero(gaussians.alphas() >= MIN_ALPHA)[:, 0], gaussians.sh_degree)
    places = [
        find_places(content.gaussians, question.matches(), content.cameras, content.scale)
        for question in content.questions
    ]
    page = _draw(content, out.stem, places)
    with replace_file(out) as stream:
        stream.write(page)
    return PageInfo(len(content.gaussians), content.gaussians.sh_degree, len(page) / 2**20)


def _draw(content: PageContent, name: str, places: Sequence[Sequence[Place]]) -> bytes:
    """The page. Neighbours are stored side by side, which gzip compresses better."""
    content = content.take(morton_order(content.gaussians), content.gaussians.sh_degree)
    packed = io.BytesIO()
    write_spz(packed, content.gaussians, SplatInfo(render_mode="mip" if content.antialiased else "default"))
    scores = b"".join(question.to_bytes().tobytes() for question in content.questions)
    text = render_page(
        "splats.html",
        title=content.title,
        content={
            "name": name,
            "up": (np.array([0.0, 0.0, 1.0]) * TO_RUB).tolist(),
            "radius": content.cameras.radius(),
            "blur": content.blur_px2,
            "background": content.background,
            "heat": heat_table(9).tolist(),
            "palette": label_table(MAX_QUESTIONS)[:MAX_QUESTIONS].tolist(),
            "cameras": _describe_cameras(content.cameras, content.names),
            "questions": [
                {
                    "name": question.name,
                    "threshold": question.threshold,
                    "curve": "logit" if question.is_relevancy else "linear",
                    "low": question.range[0],
                    "high": question.range[1],
                    "places": [asdict(place) for place in where],
                }
                for question, where in zip(content.questions, places, strict=True)
            ],
        },
        colors=[label_hex(i) for i in range(len(content.questions))],
        heat_stops=heat_stops(),
        poster=Picture.from_array(content.poster),
        splats=base64.b64encode(packed.getvalue()).decode("ascii"),
        scores=base64.b64encode(gzip.compress(scores, 6, mtime=0)).decode("ascii"),
        footer=f"f3rm_ext {__version__}{content.origin and ', '}{content.origin}: {len(content.gaussians)} Gaussians.",
    )
    return sign_text(text, COMMAND)


def _cameras(run: SplatRun) -> tuple[PinholeCameras, list[str]]:
    """The cameras of all photos and the names of these, spread evenly where there are many; on the CPU."""
    datasets = [run.manager.train_dataset, *([] if run.manager.eval_dataset is None else [run.manager.eval_dataset])]
    parts = [PinholeCameras.of(dataset.cameras.to(torch.device("cpu"))) for dataset in datasets]
    names = [Path(name).name for dataset in datasets for name in dataset.image_filenames]
    joined = PinholeCameras(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    spread = np.unique(np.linspace(0, len(names) - 1, min(len(names), _MAX_CAMERAS)).round().astype(int))
    chosen = np.argsort(names, kind="stable")[spread]
    return joined.take(torch.from_numpy(chosen)), [names[i] for i in chosen]


def _describe_cameras(cameras: PinholeCameras, names: Sequence[str]) -> list[dict[str, object]]:
    """The cameras as the page's script takes them: rows of ``turn`` are right, down and forward."""
    flip, focus = torch.from_numpy(TO_RUB).float(), cameras.focus()
    reach = ((focus - cameras.positions) * cameras.forward).sum(dim=1).clamp_min(0.1 * cameras.radius())
    described = []
    for i, name in enumerate(names):
        K = cameras.Ks[i]
        described.append(
            {
                "name": name,
                "position": [round(float(value), 6) for value in cameras.positions[i] * flip],
                "turn": [[round(float(v), 7) for v in row * flip] for row in cameras.viewmats[i, :3, :3]],
                "fx": float(K[0, 0]), "fy": float(K[1, 1]), "cx": float(K[0, 2]), "cy": float(K[1, 2]),
                "width": int(cameras.widths[i]), "height": int(cameras.heights[i]),
                "reach": float(reach[i]),
            }
        )  # fmt: skip
    return described
