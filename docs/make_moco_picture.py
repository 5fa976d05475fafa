"""Draws what one example finds in several features: a held-out view, and the relevancy in each feature over it.

python docs/make_moco_picture.py CONFIG.yml --thing pear --view 008.jpg --heads moco dense-daisy dinov2 --out OUT.jpg

CONFIG is of a run on a capture with labels that distils the features, such as that of benchmarks/moco_distilled.py. The
example is one pixel in a training photo, as `f3rm-ext eval query --by example` chooses it; it is compared with the rest
of that photo and with the other things.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
from f3rm_ext.query.builders import exemplar_queries
from f3rm_ext.query.queryable import checked_head, score_image
from f3rm_ext.query.run import photo_views
from f3rm_ext.query.visualization import resized
from f3rm_ext.utils.colormaps import heat_overlay_bytes
from f3rm_ext.utils.pictures import to_bytes

GAP_PX = 6


@dataclass
class Options:
    """What to draw."""

    config: tyro.conf.Positional[Path]
    """config.yml of the run."""
    thing: str = "pear"
    """Class that is asked for."""
    view: str = "008.jpg"
    """Held-out photo."""
    heads: tuple[str, ...] = ("moco", "dense-daisy", "dinov2")
    """Features, from left to right."""
    skip: tuple[str, ...] = ("table",)
    """Classes that are not asked for."""
    scale: float = 1.0
    """Factor on the run's pictures for the rendering."""
    height_px: int = 300
    """Height of the picture."""
    out: Path = Path(__file__).parent / "images" / "moco-example.jpg"
    """Where it goes."""


def main(options: Options) -> None:
    """Writes the picture."""
    run = open_run_or_mesh(options.config, None, None)
    truth = CaptureGroundTruth(run.data)
    (view,) = photo_views(run, options.view, options.scale)
    assert view.photo is not None
    names = [name for name in truth.classes if name not in options.skip]
    panels = [np.asarray(run.photo(*view.photo))]
    for name in options.heads:
        head = checked_head(run.model.query_heads(), name)
        queries = exemplar_queries(run, head, truth, names, "both")
        (query,) = [each for each in queries if each.name == options.thing]
        scores, outputs = score_image(run.model, view.camera, [query])
        print(name, query.positives.sources, f"{scores.min():.2f} to {scores.max():.2f}")
        panels.append(
            heat_overlay_bytes(to_bytes(outputs["rgb"].cpu().numpy()), scores[..., 0].cpu().numpy(), 0.0, 1.0)
        )
    width = round(options.height_px * panels[1].shape[1] / panels[1].shape[0])
    strip = np.full((options.height_px, len(panels) * (width + GAP_PX) - GAP_PX, 3), 255, dtype=np.uint8)
    for index, panel in enumerate(panels):
        left = index * (width + GAP_PX)
        strip[:, left : left + width] = resized(panel, options.height_px, width)
    Image.fromarray(strip).save(options.out, quality=88)


if __name__ == "__main__":
    main(tyro.cli(Options))
