"""The panel's status: a few lines of markdown."""

import math
import re
import time
from collections.abc import Callable, Iterable

import torch
from nerfstudio.viewer.viewer_elements import ViewerElement
from viser import GuiMarkdownHandle, ViserServer

from f3rm_ext.errors import UserError, reason_of
from f3rm_ext.features.extractors.registry import understands_text, weights_status
from f3rm_ext.profiling.memory import describe_use
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import GroupedPoints, QueryHead
from f3rm_ext.utils.colormaps import label_hex

_LONGEST, _LONGEST_WORD = 400, 24
_BREAK = "<wbr/>"
_MOST_NAMES = 5
_MEMORY_PERIOD_S = 1.0


class StatusLine(ViewerElement[str]):
    """Read-only text in the panel; ``on_install`` is called before it is first shown."""

    def __init__(self, on_install: Callable[[], None], name: str = "Status") -> None:
        super().__init__(name)
        self.content = ""
        self._on_install = on_install
        self._handle: GuiMarkdownHandle | None = None

    def _create_gui_handle(self, viser_server: ViserServer) -> None:
        self._handle = viser_server.gui.add_markdown(self.content)

    def install(self, viser_server: ViserServer) -> None:
        self._on_install()
        self._create_gui_handle(viser_server)

    @property
    def is_installed(self) -> bool:
        return self._handle is not None

    def show(self, content: str) -> None:
        """Replaces the text, which is markdown."""
        self.content = content
        if self._handle is not None:
            self._handle.content = content


class MemoryLine(StatusLine):
    """Says how much memory is in use, anew with every picture, but at most once a second."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        super().__init__(self.update, "Memory")
        self._device, self._shown_s = device, -math.inf

    def update(self) -> None:
        if time.monotonic() - self._shown_s >= _MEMORY_PERIOD_S:
            self._shown_s = time.monotonic()
            self.show(f"**Memory** {describe_use(torch.device(self._device()))}")


def plain(text: str) -> str:
    """Escapes a text so that the viewer shows it as it is, whatever markdown, braces or angle brackets it contains.

    Long texts are cut. Long words, such as paths, may wrap, since they would make the panel wider than the page.

    >>> plain("*not* bold")
    '&#42;not&#42; bold'
    """
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return " ".join(_BREAK.join(map(_escape, _pieces(word))) for word in text.split(" "))


def _escape(text: str) -> str:
    return re.sub(r"[^\w\s.,:;'/…×°“”’-]", lambda mark: f"&#{ord(mark.group())};", text).replace("_", "&#95;")


def _pieces(word: str) -> list[str]:
    """Splits a word that is too long for a line, after punctuation where possible."""
    if len(word) <= _LONGEST_WORD:
        return [word]
    return [
        piece[i : i + _LONGEST_WORD]
        for piece in re.split(r"(?<=\W|_)", word)
        for i in range(0, len(piece), _LONGEST_WORD)
    ]


def describe_feature(head: QueryHead | None) -> str:
    """Names the extractor of a feature and says whether it can be queried by text, or what to do so that it can."""
    if head is None:
        return "**No features** in this model: train with some to query it."
    try:
        if understands_text(head.extractor):
            advice = weights_status(head.extractor).advice
        else:
            advice = "understands no text, so query by click."
    except Exception as error:  # also of an extractor of another package
        advice = sentence(error)
    extractor = re.sub(r"[^=,+]*[/\\]", "", head.extractor)  # files are named without their folders
    return f"**Feature** {plain(extractor)}: {plain(advice)}"


def describe_query(query: Query | None, threshold: float) -> str:
    """Lists the positives and negatives of a query, and from which score on it finds; empty without a query."""
    if query is None:
        return ""
    found = f"found from {threshold:.2f}"
    if not query.is_relevancy:
        return f"**Query** {_names(query.positives.sources)} (plain cosine: no negatives), {found}"
    return f"**Query** {_names(query.positives.sources)} against {_names(query.negatives.sources)}, {found}"


def describe_group(group: tuple[str, int] | None, points: GroupedPoints | None) -> str:
    """Says which group is lit and how large it is; empty without one."""
    if group is None or points is None:
        return ""
    count = int((points.groups == group[1]).sum())
    return f"**Group** {group[1]} of {int(points.groups.max()) + 1}: {count:,} Gaussians"


def describe_labels(queries: Iterable[Query]) -> str:
    """Returns the legend of the label map; the viewer shows a chip of the colour beside each colour code."""
    entries = [f"`{label_hex(index)}` {plain(query.name)}" for index, query in enumerate(queries)]
    return f"**Named** {', '.join(entries)}" if entries else ""


def sentence(error: BaseException) -> str:
    """Returns the message of a :class:`UserError`, or the type and first line of any other error."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {reason_of(error)}"


def _names(sources: tuple[str, ...]) -> str:
    # Of an example and what it is told from, there are several directions each.
    names = list(dict.fromkeys(re.sub(r", (cluster|part) \d+$", "", source) for source in sources))
    shown = [f"“{plain(name)}”" for name in names[:_MOST_NAMES]]
    return ", ".join([*shown, "…"] if len(names) > _MOST_NAMES else shown)
