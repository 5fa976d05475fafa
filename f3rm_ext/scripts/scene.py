"""``f3rm-ext scene``: captures and pictures of a made-up room."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from f3rm_ext.scene import PictureConfig, SynthConfig, synthesize, take_picture


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"Interrupted: {out} was not written.", file=sys.stderr)
        raise SystemExit(130) from None


@dataclass
class Synth:
    """Make a synthetic capture: a ray-traced room with exact depth, normals, labels and mesh."""

    out: tyro.conf.Positional[Path]
    """Folder to write the capture to; it must be new or empty."""
    config: Annotated[SynthConfig, tyro.conf.arg(name="")] = field(default_factory=SynthConfig)
    """What to make."""

    def main(self) -> None:
        """Writes the capture and says where it is."""
        with _interruptible(self.out):
            out = synthesize(self.out, self.config)
        print(f"Wrote {self.config.num_images} views to {out}. To train on them: ns-train f3rm-ext-lite --data {out}")


@dataclass
class Picture:
    """Take one large picture of the room, to look at."""

    out: tyro.conf.Positional[Path]
    """Image file to write, .jpg or .png; it must be new."""
    config: Annotated[PictureConfig, tyro.conf.arg(name="")] = field(default_factory=PictureConfig)
    """What to show."""

    def main(self) -> None:
        """Writes the picture and says where it is."""
        with _interruptible(self.out):
            print(f"Wrote {take_picture(self.out, self.config)}.")


SceneCommand = Annotated[Synth, tyro.conf.subcommand("synth")] | Annotated[Picture, tyro.conf.subcommand("picture")]
