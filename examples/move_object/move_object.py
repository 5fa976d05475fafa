"""Moves a part of a refined scene: the vertices in a box are turned and shifted, and the Gaussians on them follow.

    python examples/move_object/move_object.py --load-config RUN/config.yml --out moved.ply \
        --low -0.3 -0.3 0.7 --high 0.3 0.3 1.2 --shift 0 0 0.2 --turn-deg 30

The run is one of sugar-ext-refine. Box and shift are in the scene frame, with cameras within about ±1.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from f3rm_ext.export.splats import load_splat_run
from f3rm_ext.mesh.bound.model import BoundModel
from f3rm_ext.splat.files import SplatInfo, export_splats

Vector = tuple[float, float, float]


def moved(vertices: torch.Tensor, chosen: torch.Tensor, shift: Vector, turn_deg: float) -> torch.Tensor:
    """Returns vertices, (verts, 3), of which the chosen ones are turned about their vertical axis and shifted."""
    angle = torch.deg2rad(torch.tensor(turn_deg))
    cosine, sine = float(angle.cos()), float(angle.sin())
    turn = vertices.new_tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    part = vertices[chosen]
    centre = part.mean(dim=0)
    result = vertices.clone()
    result[chosen] = (part - centre) @ turn.T + centre + vertices.new_tensor(shift)
    return result


@dataclass
class MoveObject:
    """Moves what lies in a box, and writes the splats."""

    load_config: Path
    """config.yml of a run of sugar-ext-refine."""
    out: Path
    """File of splats to write: .ply, .compressed.ply, .spz or .splat."""
    low: Vector
    """Lowest x, y and z of the box, scene frame."""
    high: Vector
    """Highest x, y and z of the box, scene frame."""
    shift: Vector = (0.0, 0.0, 0.0)
    """How far to move the vertices, scene units."""
    turn_deg: float = 0.0
    """How far to turn them about the vertical axis through their centre, degrees, counter-clockwise from above."""

    def main(self) -> None:
        """Moves and writes."""
        run = load_splat_run(self.load_config)
        if not isinstance(run.model, BoundModel):
            raise SystemExit(f"{self.load_config} is of {run.config.method_name}: give a run of sugar-ext-refine.")
        with torch.no_grad():
            bound = run.model.bound
            low, high = (bound.vertices.new_tensor(corner) for corner in (self.low, self.high))
            chosen = ((bound.vertices >= low) & (bound.vertices <= high)).all(dim=1)
            if not bool(chosen.any()):
                raise SystemExit("No vertex lies in the box: choose it in the scene frame.")
            run.model.set_bound(bound.deform(moved(bound.vertices, chosen, self.shift, self.turn_deg)))
        render_mode = "mip" if run.model.config.mip.filter_2d else "default"
        record = {**run.describe(), "frame": "scene"}
        made = export_splats(run.splats(), self.out, SplatInfo(render_mode=render_mode), record)
        print(f"{int(chosen.sum())} of {len(chosen)} vertices moved; {made.count} Gaussians are in {self.out}.")


if __name__ == "__main__":
    tyro.cli(MoveObject).main()
