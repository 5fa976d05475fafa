"""``f3rm-ext scene``: captures made by the package itself."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from f3rm_ext.scene import SynthConfig, synthesize


@dataclass
class Synth(SynthConfig):
    """Makes a synthetic capture: a ray-traced room with exact depth, normals, labels and mesh."""

    out: tyro.conf.Positional[Path] = Path("synthetic-room")
    """Folder to write the capture to."""

    def main(self) -> None:
        """Writes the capture and says where it is."""
        options = {name: getattr(self, name) for name in SynthConfig.__dataclass_fields__}
        try:
            out = synthesize(self.out, SynthConfig(**options))
        except KeyboardInterrupt:
            print(f"Interrupted: {self.out} was not written.", file=sys.stderr)
            raise SystemExit(130) from None
        print(f"Wrote {self.num_images} views to {out}. Train on it: ns-train f3rm-ext-lite --data {out}")


SceneCommand = Annotated[Synth, tyro.conf.subcommand("synth")]
