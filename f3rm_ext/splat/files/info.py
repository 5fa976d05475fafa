"""Information about a file of splats besides the Gaussians, and how the formats record it in comments."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Bool, Int
from torch import Tensor

from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.utils.provenance import MADE_BY

Format = Literal["ply", "compressed-ply", "spz", "sog", "splat", "gltf", "usd", "ksplat"]
RenderMode = Literal["mip", "default"]
"""How to render: with Mip-Splatting's opacity compensation (gsplat's ``antialiased``) or without it (``classic``)."""

RENDER_MODE = "SplatRenderMode"
"""Tag of the render mode in comments, as in Brush, and as proposed for nerfstudio (#3773) and gsplat (#1036)."""
FILTER = "filter_3d"
"""Tag of this package in comments: ``fused`` or ``none``."""
_MODES: dict[str, RenderMode] = {"mip": "mip", "default": "default"}
_POSTSHOT: dict[str, RenderMode] = {"antialiased 1": "mip", "antialiased 0": "default"}


@dataclass(frozen=True)
class SplatInfo:
    """Information about the Gaussians of a file. Writers use its render mode, filters and comments."""

    format: Format = "ply"
    """Format of the file."""
    render_mode: RenderMode | None = None
    """How to render; None if the file does not say, which viewers treat as ``default``."""
    filters_fused: bool | None = None
    """Whether sizes and opacities include the 3D filter; None if the file does not say."""
    sh_degree: int = 0
    """SH degree, 0 to 3; writers take it from the Gaussians."""
    count: int = 0
    """Number of Gaussians; writers take it from the Gaussians."""
    comments: tuple[str, ...] = ()
    """Further comments: where the file comes from."""
    notices: tuple[str, ...] = ()
    """Sentences for the user on what was left out or changed; never written to files."""
    version: int | None = None
    """Version of the format of an ``.spz`` file."""

    scores: GaussianScores | None = field(default=None, compare=False)
    """Scores of queries on the Gaussians."""

    @property
    def format_name(self) -> str:
        """Format, with its version where there are several."""
        return self.format if self.version is None else f"{self.format} version {self.version}"

    def take_scores(self, rows: Int[Tensor, " kept"] | Bool[Tensor, " all"]) -> "SplatInfo":
        """Returns the information with the scores of some Gaussians, where there are scores."""
        return self if self.scores is None else replace(self, scores=self.scores.take(rows))


def read_tags(comments: Iterable[str]) -> tuple[RenderMode | None, bool | None, tuple[str, ...]]:
    """Returns the render mode, whether filters are fused, and the other comments. The last tag of a kind counts.

    >>> read_tags(["SplatRenderMode: mip", "filter_3d: fused", "made on Monday"])
    ('mip', True, ('made on Monday',))
    """
    mode: RenderMode | None = None
    fused: bool | None = None
    others = []
    for comment in comments:
        key, colon, value = (part.strip().lower() for part in comment.partition(":"))
        plain = " ".join(comment.lower().split())
        if colon and key == RENDER_MODE.lower() and value in _MODES:
            mode = _MODES[value]
        elif plain in _POSTSHOT:
            mode = _POSTSHOT[plain]
        elif colon and key == FILTER and value in ("fused", "none"):
            fused = value == "fused"
        else:
            others.append(comment)
    return mode, fused, tuple(others)


def tag_comments(info: SplatInfo) -> list[str]:
    """Returns the comments to write: further comments first, then the known tags."""
    comments = [*info.comments, *([] if info.scores is None else info.scores.comments())]
    if info.filters_fused is not None:
        comments.append(f"{FILTER}: {'fused' if info.filters_fused else 'none'}")
    if info.render_mode is not None:
        comments.append(f"{RENDER_MODE}: {info.render_mode}")
    return comments


def find_maker(comments: Iterable[str]) -> str | None:
    """Returns the command that made a file, from its comments; None if they do not say."""
    start = f"{MADE_BY}: "
    return next((comment.removeprefix(start) for comment in comments if comment.startswith(start)), None)


def combine_provenance(origin: SplatInfo, record: Mapping[str, object]) -> tuple[str, ...]:
    """Returns comments for a file made from another one: the new entries, then the comments of the original.

    Args:
        origin: information about the original file; its ``made_by`` becomes ``origin_made_by``.
        record: entries for the new file, including ``made_by``.
    """
    entries = [f"{key}: {value}" for key, value in record.items()]
    earlier = [f"origin_{line}" if line.startswith(f"{MADE_BY}: ") else line for line in origin.comments]
    return (*entries, *(line for line in earlier if line not in entries))
