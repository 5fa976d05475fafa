"""A web page of splats: one HTML file with the Gaussians, the capture's cameras and the answers to questions."""

import base64
import gzip
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from f3rm_ext import __version__
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.images import tell_apart
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.export.notes import Note
from f3rm_ext.export.questions import MAX_PLACES, Place, Question, best_camera, find_places, score_gaussians
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.html.page import MAX_CAMERAS, Picture, render_page
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, get_head
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.files.checks import check_values
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.files.packing import morton_order
from f3rm_ext.splat.files.spz import TO_RUB, write_spz
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize.camera import MIN_ALPHA
from f3rm_ext.splat.rendering import render
from f3rm_ext.utils.colormaps import heat_stops, heat_table, label_hex, label_table
from f3rm_ext.utils.output_file import write_file
from f3rm_ext.utils.pictures import pick_evenly, to_bytes
from f3rm_ext.utils.provenance import sign_text

COMMAND = "f3rm-ext export page"
MAX_QUESTIONS = 16
"""The page's shader has as many colours."""

_LONG = -1 / 3e5
"""Stands for a number of unknown length: in JSON it has 23 characters, as many as any."""
_LONGEST_PLACE = Place((_LONG, _LONG, _LONG), _LONG, MAX_CAMERAS, "0.00012 wide, 100% of the matches")


@dataclass(frozen=True)
class PageInfo:
    """Size and content of a page that was written."""

    count: int
    sh_degree: int
    size_mib: float


@dataclass(frozen=True)
class PageContent:
    """Everything that goes into a page."""

    title: str
    gaussians: Gaussians
    """Scene frame, with the 3D filter in them; on the CPU."""
    cameras: PinholeCameras
    """Of the capture, one or more; scene frame, on the CPU."""
    names: Sequence[str]
    poster: UInt8[np.ndarray, "h w 3"]
    """Picture of the scene for browsers without WebGL2."""
    blur_px2: float
    """Variance that the rasteriser adds, px²."""
    antialiased: bool
    """Whether the rasteriser compensates opacities for the blur."""
    near: float = 0.01
    """Depth from which on Gaussians are drawn, scene units."""
    questions: Sequence[Question] = ()
    """At most :data:`MAX_QUESTIONS`, all of one feature."""
    lengths: Float32[np.ndarray, " gaussians"] | None = None
    """Norms of the Gaussians' features, by which scores are weighted; None: all are 1."""
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """RGB, 0 to 1."""
    frame: CaptureFrame = field(default_factory=lambda: CaptureFrame(np.eye(3), np.zeros(3), 1.0))
    """Of the capture, in whose units sizes are told."""
    notes: Sequence[Note] = ()
    origin: str = ""
    """Where the scene comes from, for the foot of the page."""

    def __post_init__(self) -> None:
        """Raises ConfigError if there are too many questions."""
        if len(self.questions) > MAX_QUESTIONS:
            raise ConfigError(
                f"A page holds at most {MAX_QUESTIONS} questions, but there are {len(self.questions)}: leave out "
                f"{', '.join(repr(question.name) for question in self.questions[MAX_QUESTIONS:])}, or others."
            )

    @classmethod
    def of_run(
        cls,
        run: SplatRun,
        queries: Sequence[tuple[Query, float]],
        *,
        title: str,
        notes: Sequence[Note] = (),
    ) -> "PageContent":
        """Collects the content of a run.

        Args:
            queries: the questions that the page answers, all of one feature of the run; and the threshold of each,
                the score from which upwards it matches at first.

        Raises:
            ConfigError: the run has no such feature, or the questions are too many or of several.
        """
        model, mip = run.model, run.model.config.mip
        assert isinstance(model, Queryable)
        gaussians = run.splats()
        view = PinholeCameras.to_render(run.manager.train_dataset.cameras[0:1], model.device)
        with torch.inference_mode():
            picture = render(run.scene(gaussians), view)
        cameras, names = _cameras(run)
        features = sorted({query.head for query, _ in queries})
        if len(features) > 1:
            raise ConfigError(
                f"The questions of a page are of one feature, not of {' and '.join(features)}: ask fewer."
            )
        head = get_head(model.query_heads(), features[0]) if features else None
        assert head is None or isinstance(head, LiftedHead)
        red, green, blue = model.background.tolist()
        return cls(
            title=title,
            gaussians=gaussians.to("cpu"),
            cameras=cameras,
            names=names,
            poster=to_bytes(picture.rasterization.colors.clamp(0, 1).cpu().numpy()),
            blur_px2=mip.eps2d,
            antialiased=mip.filter_2d,
            near=model.config.near_plane,
            questions=[
                Question(query.name, score_gaussians(model, query), threshold, query.is_relevancy)
                for query, threshold in queries
            ],
            lengths=None if head is None else head.codes.float().norm(dim=1).cpu().numpy(),
            background=(red, green, blue),
            frame=run.frame,
            notes=notes,
            origin=f"{run.config.method_name}, step {run.step}",
        )

    def take(self, rows: Int[Tensor, " kept"], sh_degree: int) -> "PageContent":
        """Returns the content with some of the Gaussians and at most this degree of harmonics."""
        gaussians = self.gaussians[rows]
        questions = [replace(question, scores=question.scores[rows.numpy()]) for question in self.questions]
        gaussians = gaussians.to_sh_degree(min(sh_degree, gaussians.sh_degree))
        lengths = None if self.lengths is None else self.lengths[rows.numpy()]
        return replace(self, gaussians=gaussians, questions=questions, lengths=lengths)

    def drop_faint(self) -> "PageContent":
        """Returns the content without Gaussians that the page's shader does not draw; all where it draws none."""
        rows = torch.nonzero(self.gaussians.alphas() >= MIN_ALPHA)[:, 0]
        return self.take(rows, self.gaussians.sh_degree) if len(rows) else self

    def to_score_bytes(self) -> bytes:
        """Returns the scores of all questions, and then the weights of the Gaussians in 255ths of the largest."""
        if not self.questions:
            return b""
        lengths = np.ones(len(self.gaussians)) if self.lengths is None else self.lengths
        weights = np.rint(255 * lengths / max(float(lengths.max(initial=0.0)), 1e-12)).astype(np.uint8)
        return b"".join([*(question.to_bytes().tobytes() for question in self.questions), weights.tobytes()])


def page_size(content: PageContent, name: str) -> int:
    """Returns the size in bytes of the page of this name, or a little more: its places are found at last, and are
    counted as long as any."""
    places = [[_LONGEST_PLACE] * MAX_PLACES for _ in content.questions]
    return len(_draw(content.drop_faint(), name, places))


def write_page(out: Path, content: PageContent) -> PageInfo:
    """Writes a page, an .html file, completely or not at all.

    Raises:
        ConfigError: a note has no place, or the file cannot be written.
        SplatFileError: the Gaussians have values that are NaN or infinite.
    """
    check_values(content.gaussians, out, action="would get")
    content = content.drop_faint()
    places = [
        find_places(content.gaussians, question.matches(), content.cameras, content.frame.scale)
        for question in content.questions
    ]
    page = _draw(content, out.stem, places)
    write_file(out, page)
    return PageInfo(len(content.gaussians), content.gaussians.sh_degree, len(page) / 2**20)


def _draw(content: PageContent, name: str, places: Sequence[Sequence[Place]]) -> bytes:
    """The page. Neighbours are stored side by side, which gzip compresses better."""
    content = content.take(morton_order(content.gaussians), content.gaussians.sh_degree)
    packed = io.BytesIO()
    reach, radius = content.cameras.orbit(content.gaussians.means)
    write_spz(packed, content.gaussians, SplatInfo(render_mode="mip" if content.antialiased else "default"))
    text = render_page(
        "splats.html",
        title=content.title,
        content={
            "name": name,
            "up": (np.array([0.0, 0.0, 1.0]) * TO_RUB).tolist(),
            "radius": radius,
            "blur": content.blur_px2,
            "near": content.near,
            "background": content.background,
            "heat": heat_table(9).tolist(),
            "palette": label_table(MAX_QUESTIONS)[:MAX_QUESTIONS].tolist(),
            "cameras": _describe_cameras(content.cameras, content.names, reach),
            "notes": _pin_notes(content, places),
            "capture": _capture_from_page(content.frame),
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
        scores=base64.b64encode(gzip.compress(content.to_score_bytes(), 6, mtime=0)).decode("ascii"),
        footer=f"f3rm_ext {__version__}{content.origin and ', '}{content.origin}: {len(content.gaussians)} Gaussians.",
    )
    return sign_text(text, COMMAND)


def _pin_notes(content: PageContent, places: Sequence[Sequence[Place]]) -> list[dict[str, object]]:
    """The notes with their places in the axes of .spz files, and the camera that shows each best."""
    largest = {question.name: where[0] for question, where in zip(content.questions, places, strict=True) if where}
    pinned = []
    for note in content.notes:
        if note.position is not None:
            scene = content.frame.to_scene(np.array(note.position))
            at, camera = (scene * TO_RUB).tolist(), best_camera(torch.from_numpy(scene), content.cameras)
        elif note.query in largest:
            at, camera = largest[note.query].at, largest[note.query].camera
        else:
            asked = ", ".join(largest) or "none"
            raise ConfigError(
                f"The note {note.text!r} is pinned to the query {note.query!r}, which is no question of the page or "
                f"finds nothing: name one of those that find something ({asked}), or give a position."
            )
        pinned.append({"text": note.text, "at": at, "camera": camera, "size": 0})
    return pinned


def _capture_from_page(frame: CaptureFrame) -> list[list[float]]:
    """The map from the axes of .spz files to the frame of transforms.json: rows of a matrix, 3 x 4."""
    offset = frame.to_capture(np.zeros(3))
    return np.column_stack([(frame.to_capture(np.diag(TO_RUB).astype(float)) - offset).T, offset]).tolist()


def _cameras(run: SplatRun) -> tuple[PinholeCameras, list[str]]:
    """The cameras of all photos and the names of these, spread evenly where there are many; on the CPU."""
    datasets = [run.manager.train_dataset, *([] if run.manager.eval_dataset is None else [run.manager.eval_dataset])]
    parts = [PinholeCameras.of(dataset.cameras.to(torch.device("cpu"))) for dataset in datasets]
    names = tell_apart([file for dataset in datasets for file in dataset.image_filenames])
    joined = PinholeCameras(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    chosen = np.argsort(names, kind="stable")[pick_evenly(len(names), MAX_CAMERAS)]
    return joined.take(torch.from_numpy(chosen)), [names[i] for i in chosen]


def _describe_cameras(
    cameras: PinholeCameras, names: Sequence[str], reach: Float[Tensor, " cams"]
) -> list[dict[str, object]]:
    """The cameras as the page's script takes them: rows of ``turn`` are right, down and forward."""
    flip = torch.from_numpy(TO_RUB).float()
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
