r"""How long charts take, sought on a whole mesh or piece by piece, and what pieces cost in the texture.

    python benchmarks/chart_pieces.py

Bumpy rings, as noisy depth gives them: each vertex is moved along its normal by chance. xatlas cuts them into charts
and packs these, once all triangles together and once divided as `f3rm-ext export texture` divides them. Times are
medians over turns that alternate, and *texels* is the share of the texture that charts cover. Written to
results/chart_pieces.json.
"""

import datetime
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
import tyro

from f3rm_ext.mesh.texture import atlas

HERE = Path(__file__).parent
WHOLE = 1 << 40
"""More triangles than any mesh has."""
ROUGHNESS = 1.0
"""Spread of the bumps, in lengths of an edge."""


def bumpy_torus(sections: int) -> trimesh.Trimesh:
    """A torus with sections² triangles."""
    torus = trimesh.creation.torus(1.0, 0.4, major_sections=sections, minor_sections=sections // 2)
    edge = float(torus.edges_unique_length.mean())
    bumps = np.random.default_rng(0).normal(0.0, ROUGHNESS * edge, len(torus.vertices))
    return trimesh.Trimesh(torus.vertices + bumps[:, None] * torus.vertex_normals, torus.faces, process=False)


def covered(made: atlas.Atlas) -> float:
    """Share of the texture on charts."""
    a, b, c = (made.pixels[made.mesh.faces[:, corner]] for corner in range(3))
    (ux, uy), (vx, vy) = (b - a).T, (c - a).T
    return float(np.abs(ux * vy - uy * vx).sum() / 2 / made.size_px**2)


@dataclass
class ChartPieces:
    """Times charts of whole meshes beside charts of pieces."""

    sections: tuple[int, ...] = (70, 100, 140, 200)
    """Sizes of the rings: n² triangles."""
    turns: int = 3
    """Turns of each, 1 or more."""
    size_px: int = 2048
    """Side of the texture."""
    out: Path = HERE / "results" / "chart_pieces.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Cuts and packs."""
        rows = []
        for sections in self.sections:
            mesh = bumpy_torus(sections)
            seconds: dict[str, list[float]] = {"whole": [], "pieces": []}
            row: dict[str, Any] = {"triangles": len(mesh.faces)}
            for _ in range(self.turns):
                for name, faces in (("whole", WHOLE), ("pieces", atlas.PIECE_FACES)):
                    began = time.perf_counter()
                    made = atlas.unwrap(mesh, self.size_px, 2, piece_faces=faces)
                    seconds[name].append(time.perf_counter() - began)
                    row[name] = {"charts": made.charts, "covered": covered(made)}
            for name, taken in seconds.items():
                row[name] |= {"s": statistics.median(taken), "spread_s": max(taken) - min(taken)}
            print(row, flush=True)
            rows.append(row)
        report = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "rows": rows}
        self.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(ChartPieces, description=__doc__).main()
