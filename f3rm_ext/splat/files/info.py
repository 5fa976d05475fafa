"""What is known of a file of splats besides the Gaussians, and how files of several formats say it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Format = Literal["ply", "compressed-ply", "spz", "splat"]
RenderMode = Literal["mip", "default"]
"""How to draw: with the opacity compensation of mip-splatting (gsplat's ``antialiased``), or without (``classic``)."""

RENDER_MODE = "SplatRenderMode"
"""Tag of the render mode in comments, as in Brush and as proposed for nerfstudio (#3773) and gsplat (#1036)."""
FILTER = "filter_3d"
"""Our tag in comments: ``fused`` or ``none``."""
MADE_BY = "made_by"
_MODES: dict[str, RenderMode] = {"mip": "mip", "default": "default"}
_POSTSHOT: dict[str, RenderMode] = {"antialiased 1": "mip", "antialiased 0": "default"}


@dataclass(frozen=True)
class SplatInfo:
    """What a file says of its Gaussians. Writers take the render mode, the filters and the comments from it."""

    format: Format = "ply"
    """Format of the file."""
    render_mode: RenderMode | None = None
    """How to draw; None where the file does not say, which viewers take for ``default``."""
    filters_fused: bool | None = None
    """Whether the 3D smoothing filter is in the sizes and opacities; None where the file does not say."""
    sh_degree: int = 0
    """Of the Gaussians in the file, 0 to 3; writers take it from the Gaussians."""
    count: int = 0
    """Number of Gaussians; writers take it from the Gaussians."""
    comments: tuple[str, ...] = ()
    """Further comments of the file: where it comes from."""
    notices: tuple[str, ...] = ()
    """Sentences for the user on what was left out or changed while reading; never written."""


def read_tags(comments: Iterable[str]) -> tuple[RenderMode | None, bool | None, tuple[str, ...]]:
    """Render mode, whether filters are fused, and the other comments. The last tag of a kind counts.

    Args:
        comments: of a file; ``antialiased 1`` is Postshot's way to say ``SplatRenderMode: mip``.
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


def tagged(info: SplatInfo) -> list[str]:
    """The comments to write: further ones first, then the tags that are known."""
    comments = list(info.comments)
    if info.filters_fused is not None:
        comments.append(f"{FILTER}: {'fused' if info.filters_fused else 'none'}")
    if info.render_mode is not None:
        comments.append(f"{RENDER_MODE}: {info.render_mode}")
    return comments


def maker_of(comments: Iterable[str]) -> str | None:
    """The command that made a file, from its comments; None where they do not say."""
    for comment in comments:
        if comment.startswith(f"{MADE_BY}: "):
            return comment.removeprefix(f"{MADE_BY}: ")
    return None


def provenance_of(origin: SplatInfo, record: Mapping[str, object]) -> tuple[str, ...]:
    """Comments for a file made from another: what made it, and after that what the other said of itself.

    Args:
        origin: of the other file; who made it becomes ``origin_made_by``.
        record: entries for the new file; ``made_by`` among them.
    """
    made_by = [f"{key}: {value}" for key, value in record.items()]
    told = [f"origin_{line}" if line.startswith(f"{MADE_BY}: ") else line for line in origin.comments]
    return (*made_by, *(line for line in told if line not in made_by))
