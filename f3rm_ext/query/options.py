"""Queries as a user types them, and what each of them means. Imports no torch, so that ``--help`` comes at once."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

ALTERNATIVES = "|"
"""Separates alternatives in what the user types: ``mug | cup``."""
NO_NEGATIVES = "none"
"""Typed in place of negatives: scores are plain cosines."""
_NAME = re.compile(r"[^/\\:|]+")
"""Names of queries: what stands before ``=``, unless it is part of a path, a place or an alternative."""


@dataclass(frozen=True)
class Region:
    """A place in an image: a point, a box, or the whole image.

    Positions are continuous: (0, 0) is the top left corner of the image and (0.5, 0.5) the centre of its first pixel.
    """

    image: str
    """Name of a photo of the capture, or path of an image file."""
    x_px: float | None = None
    """The point, or the left edge of the box, to the right; None for the whole image."""
    y_px: float | None = None
    """The point, or the top edge of the box, downwards; None for the whole image."""
    width_px: float | None = None
    """Width of the box; None for a point."""
    height_px: float | None = None
    """Height of the box; None for a point."""

    @classmethod
    def parse(cls, text: str) -> "Region":
        """Reads ``IMAGE``, ``IMAGE:x,y`` or ``IMAGE:x,y,w,h``.

        >>> Region.parse("0001.jpg:250,300,80,80")
        Region(image='0001.jpg', x_px=250.0, y_px=300.0, width_px=80.0, height_px=80.0)
        >>> Region.parse("0001.jpg:250,300").is_point
        True

        Raises:
            ConfigError: the text has none of these forms, or the box is empty.
        """
        image, colon, numbers = text.rpartition(":")
        if not colon or "/" in numbers or "\\" in numbers:
            image, numbers = text, ""
        try:
            values = [float(part) for part in numbers.split(",")] if numbers else []
        except ValueError:
            values = [math.nan]
        if not image or len(values) not in (0, 2, 4) or not all(map(math.isfinite, values)):
            raise ConfigError(
                f"The exemplar {text!r} is not understood: give an image and a place in it in pixels, "
                "IMAGE:x,y for a point or IMAGE:x,y,w,h for a box, or an image alone."
            )
        if len(values) == 4 and min(values[2:]) <= 0:
            raise ConfigError(f"The box of the exemplar {text!r} is empty: its width and height must be above 0.")
        return cls(image, *values)

    def __str__(self) -> str:
        values = [value for value in (self.x_px, self.y_px, self.width_px, self.height_px) if value is not None]
        return f"{self.image}:{','.join(f'{value:g}' for value in values)}" if values else self.image

    def scale(self, by_x: float, by_y: float) -> "Region":
        """The same place in the image at another size."""
        x, y, width, height = (
            None if value is None else value * by
            for value, by in ((self.x_px, by_x), (self.y_px, by_y), (self.width_px, by_x), (self.height_px, by_y))
        )
        return Region(self.image, x, y, width, height)

    @property
    def is_point(self) -> bool:
        return self.x_px is not None and self.width_px is None

    def box_px(self, width_px: int, height_px: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in an image of this size; without extent for a point."""
        if self.x_px is None or self.y_px is None:
            return 0.0, 0.0, float(width_px), float(height_px)
        return self.x_px, self.y_px, self.x_px + (self.width_px or 0.0), self.y_px + (self.height_px or 0.0)

    def middle_px(self, width_px: int, height_px: int) -> tuple[float, float]:
        """Returns the middle (x, y) in an image of this size, pixels."""
        left, top, right, bottom = self.box_px(width_px, height_px)
        return (left + right) / 2, (top + bottom) / 2

    def require_inside(self, width_px: int, height_px: int) -> None:
        """Raises ConfigError where any part of it lies outside an image of this size."""
        left, top, right, bottom = self.box_px(width_px, height_px)
        if not (0 <= left <= right <= width_px and 0 <= top <= bottom <= height_px):
            raise ConfigError(
                f"The exemplar {self} lies outside the image, which has {width_px} x {height_px} pixels: "
                "choose a place inside."
            )


@dataclass(frozen=True)
class QuerySpec:
    """One query as it was typed; :func:`~f3rm_ext.query.builders.encode_queries` turns it into embeddings."""

    name: str
    """Name in results and files."""
    positives: tuple[str, ...] | tuple[Region, ...] | Path
    """What to look for: texts that mean the same, places in images that show the same, or a file of vectors."""
    negatives: tuple[str, ...] = ()
    """Texts to tell it from; :data:`NO_NEGATIVES` alone for none, empty for the default of its kind."""
    negative_examples: tuple[Region, ...] = ()
    """Places in images to tell it from, beside the other negatives."""
    feature: str = ""
    """The distilled feature to query; empty for the first."""
    temperature: float = 0.1


@dataclass
class QueryTarget:
    """Options of the commands that query a run or a mesh."""

    load_config: Path | None = None
    """config.yml of the run."""
    mesh: Path | None = None
    """Mesh with features (from `f3rm-ext features lift-mesh`) to query instead of a run."""
    data: Path | None = None
    """Folder of the mesh's capture; by default the folder it was in when features were lifted."""

    def __post_init__(self) -> None:
        if (self.load_config is None) == (self.mesh is None):
            raise ConfigError("A query needs a run or a mesh with features: give either --load-config or --mesh.")
        if self.mesh is None and self.data is not None:
            raise ConfigError("--data only works with --mesh, because a run knows its capture: leave it out.")

    def target_folder(self) -> Path:
        """Returns the folder of the run or of the mesh, where results go by default."""
        place = self.mesh or self.load_config
        assert place is not None
        return place.parent


@dataclass(kw_only=True)
class QueryInputs:
    """What to look for, and which scores count as a match."""

    text: tuple[str, ...] = ()
    """Texts to look for, each a query of its own: "blue mug", "banana | plantain" for alternatives, or
    "fruit=banana | plantain" to name the query. The feature must understand text, as clip does."""
    exemplar: tuple[str, ...] = ()
    """Queries by example: IMAGE:x,y for a point, IMAGE:x,y,w,h for a box, IMAGE for the whole image, in pixels of the
    image file. IMAGE is the name of a photo of the capture, or any image file. NAME=IMAGE:... names the query, and
    "NAME=IMAGE:x,y | IMAGE:x,y" gives it several examples."""
    vector: tuple[str, ...] = ()
    """Queries by saved vectors: .npy files that this command or another program wrote. NAME=FILE names the query."""
    negative: tuple[str, ...] = ()
    """Texts that every query is compared with, or none for plain cosines. By default, texts are compared with
    `object`, `things`, `stuff` and `texture`, examples with what else the scene and their photo show (whole images: the
    scene alone), and vectors with the mean of all photos."""
    negative_exemplar: tuple[str, ...] = ()
    """Places in images that no query means, written as for --exemplar; compared with beside the other negatives."""
    feature: str = ""
    """The distilled feature to query; by default the first."""
    temperature: Positive = 0.1
    """Temperature of the relevancy, above 0: small values push scores towards 0 and 1."""
    threshold: Annotated[float, Range(-1, 1)] = 0.5
    """Scores from this value upwards count as a match, -1 to 1."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not all(text.strip() for text in self.negative):
            raise ConfigError("A text after --negative is empty: write a phrase, or `--negative none`.")
        if NO_NEGATIVES in self.negative and len(self.negative) + len(self.negative_exemplar) > 1:
            raise ConfigError("--negative none excludes other negatives: give either none or texts and examples.")
        parse_queries(self)


@dataclass(kw_only=True)
class QueryOptions(QueryInputs, QueryTarget):
    """Options of the commands that run queries on a run or a mesh."""

    def __post_init__(self) -> None:
        QueryTarget.__post_init__(self)
        QueryInputs.__post_init__(self)


def parse_queries(options: QueryInputs) -> list[QuerySpec]:
    """The queries that were typed, in the order texts, examples, vectors.

    Raises:
        ConfigError: a query is not understood, or two have the same name.
    """
    typed = [
        *map(_parse_text, options.text),
        *map(_parse_exemplar, options.exemplar),
        *map(_parse_vector, options.vector),
    ]
    names = [name for name, _ in typed]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two queries are called {name!r}: name them with NAME=... to tell them apart.")
    unlike = tuple(map(Region.parse, options.negative_exemplar))
    return [
        QuerySpec(name, positives, options.negative, unlike, options.feature, options.temperature)
        for name, positives in typed
    ]


def split_prompts(text: str) -> list[str]:
    """The alternatives in a text that a person typed.

    >>> split_prompts("mug | coffee cup")
    ['mug', 'coffee cup']

    Raises:
        ConfigError: an alternative is empty.
    """
    prompts = [part.strip() for part in text.split(ALTERNATIVES)]
    if not all(prompts):
        raise ConfigError(
            "The text to look for is empty: write a word or a phrase such as `blue mug`, or alternatives "
            f"`mug {ALTERNATIVES} cup`."
        )
    return prompts


def _parse_text(typed: str) -> tuple[str, tuple[str, ...]]:
    name, content = _split_name(typed)
    prompts = tuple(split_prompts(content))
    return name or prompts[0], prompts


def _parse_exemplar(typed: str) -> tuple[str, tuple[Region, ...]]:
    name, content = _split_name(typed)
    regions = tuple(Region.parse(part.strip()) for part in content.split(ALTERNATIVES))
    return name or str(replace(regions[0], image=Path(regions[0].image).name)), regions


def _parse_vector(typed: str) -> tuple[str, Path]:
    name, content = _split_name(typed)
    if not content:
        raise ConfigError(f"The vector {typed!r} names no file: give FILE or NAME=FILE.")
    return name or Path(content).stem, Path(content)


def _split_name(typed: str) -> tuple[str, str]:
    """Splits ``NAME=CONTENT``; the name is empty where there is none."""
    name, equals, content = typed.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()):
        return "", typed
    return name.strip(), content.strip()
