"""``f3rm-ext scene``: captures and pictures of a synthetic room."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from f3rm_ext.synthetic import PictureConfig, SynthConfig, synthesize, take_picture


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # the command would say that finished work is kept, but a capture is whole or not there
        print(f"Interrupted: {out} was not written.", file=sys.stderr)
        raise SystemExit(130) from None


@dataclass
class Synth:
    """Make a synthetic capture: a ray-traced room with exact depth, normals, labels and mesh."""

    out: tyro.conf.Positional[Path]
    """Folder for the capture, which must be new or empty."""
    config: Annotated[SynthConfig, tyro.conf.arg(name="")] = field(default_factory=SynthConfig)
    """Options of the capture."""

    def main(self) -> None:
        """Writes the capture and prints where it is."""
        with _interruptible(self.out):
            out = synthesize(self.out, self.config)
        train = f"ns-train f3rm-ext-lite --data {shlex.quote(str(out))}"
        print(f"Wrote {self.config.num_images} views to {out}. To train on them: {train}")


@dataclass
class Picture:
    """Render one large picture of the room."""

    out: tyro.conf.Positional[Path]
    """Image file to write, .jpg or .png, which must be new."""
    config: Annotated[PictureConfig, tyro.conf.arg(name="")] = field(default_factory=PictureConfig)
    """Options of the picture."""

    def main(self) -> None:
        """Writes the picture and prints where it is."""
        with _interruptible(self.out):
            print(f"Wrote {take_picture(self.out, self.config)}.")


SceneCommand = Annotated[Synth, tyro.conf.subcommand("synth")] | Annotated[Picture, tyro.conf.subcommand("picture")]
