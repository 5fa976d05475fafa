"""What a user types to ask. Cheap to import, so that help comes at once."""

from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError

NO_NEGATIVES = "none"


@dataclass(kw_only=True)
class QueryOptions:
    """Options of commands that ask."""

    load_config: Path
    """config.yml of the run."""
    text: tuple[str, ...] = ()
    """What to look for, each a query of its own: "blue mug", alternatives "banana | plantain", or with a name for the
    files "fruit=banana | plantain". Needs a feature that understands text, such as clip."""
    exemplar: tuple[str, ...] = ()
    """Queries by example: IMAGE:x,y for a point, IMAGE:x,y,w,h for a box, IMAGE for all of it, in pixels of the image
    file; IMAGE is the name of a photo of the capture or any image file. NAME=IMAGE:... gives a name."""
    vector: tuple[str, ...] = ()
    """Queries by saved vectors: .npy files of this command or of another program. NAME=FILE gives a name."""
    negative: tuple[str, ...] = ()
    """What the queries are told from, as texts; none for plain cosines. By default, texts are told from `object`,
    `things`, `stuff` and `texture`, examples from what else their photo shows, vectors from the mean of all photos."""
    feature: str = ""
    """Which distilled feature to ask; by default the first."""
    temperature: float = 0.1
    """Of the relevancy, above 0: small values make it all or nothing."""
    threshold: float = 0.5
    """Score from which on a pixel or a point counts as found, -1 to 1."""

    def __post_init__(self) -> None:
        """Checks what can be checked without opening the run.

        Raises:
            ConfigError: an option cannot work.
        """
        from f3rm_ext.query.parsing import parse_queries
        from f3rm_ext.query.relevancy import check_temperature

        check_temperature(self.temperature)
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"--threshold is {self.threshold}, outside -1 to 1: relevancy lies between 0 and 1.")
        if not all(text.strip() for text in self.negative):
            raise ConfigError("A text after --negative is empty: write a phrase, or `--negative none`.")
        if NO_NEGATIVES in self.negative and len(self.negative) > 1:
            raise ConfigError("--negative none goes with no other negatives: give one or the other.")
        parse_queries(self)
