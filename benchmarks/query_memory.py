"""Peak memory of a query over a large image, beside the naive way, which keeps the features of all pixels.

    python benchmarks/query_memory.py

renders 1920 × 1080 pixels of an untrained, tiny field (so that it takes minutes; what is measured depends on the
pixels and on the features' dimension, not on the field) and asks one query with two positives and four negatives:

- *chunked*: `score_image`, as all commands and the viewer do it,
- *naive*: the features of the whole image, their cosines, then the pairwise softmax; on fewer rows of the image.

Each runs in a process of its own; counted is what the peak of resident memory is above what was there before the
rendering. Prints a Markdown table and writes results/query_memory.json.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from processes import print_table, report_result, require_result, write_report


@dataclass
class QueryMemory:
    """Measures memory of queries."""

    width: int = 1920
    """Pixels of a row."""
    height: int = 1080
    """Rows."""
    naive_rows: int = 135
    """Rows of the naive way."""
    dims: tuple[int, ...] = (64, 768)
    """Dimensions of the features."""
    out: Path = Path(__file__).parent / "results" / "query_memory.json"
    """Where to write."""
    one: tuple[Literal["chunked", "naive"], int, int] | None = None
    """Way, dimension and rows: measures only that, in this process."""

    def main(self) -> None:
        """Measures all, or one."""
        if self.one is not None:
            report_result(self._measure(*self.one))
            return
        wanted = [("chunked", dim, rows) for rows in (self.naive_rows, self.height) for dim in self.dims]
        wanted += [("naive", dim, self.naive_rows) for dim in self.dims]
        rows = [self._in_a_process(*entry) for entry in wanted]
        import torch

        report = {
            "torch": torch.__version__,
            "width": self.width,
            "height": self.height,
            "rows": rows,
        }
        print_table("query_memory", report)
        write_report(report, self.out)

    def _in_a_process(self, way: str, dim: int, rows: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--width", str(self.width), "--one", way, str(dim), str(rows)]
        # Freed memory goes back at once, so that the peak is that of what was in use.
        environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
        return require_result(command, environment)

    def _measure(self, way: str, dim: int, rows: int) -> dict[str, Any]:
        import torch

        from f3rm_ext.engine.cost import MIB, peak_mib, reset_peak
        from f3rm_ext.profiling.memory import resident_bytes
        from f3rm_ext.query.embeddings import Embeddings, Query
        from f3rm_ext.query.queryable import score_image
        from f3rm_ext.query.relevancy import relevancy_reference

        model, camera = _model(dim, keep=way == "naive"), _camera(self.width, rows)
        vectors = Embeddings.from_full(torch.randn(6, dim), tuple("abcdef"))
        positives = Embeddings(vectors.values[:2], vectors.sources[:2])
        negatives = Embeddings(vectors.values[2:], vectors.sources[2:])
        queries = [Query("a", "feature", positives, negatives)]
        # Warm-up: compiles the kernels.
        score_image(model, _camera(64, 64), queries)
        before = resident_bytes() / MIB
        reset_peak(model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            if way == "chunked":
                scores = score_image(model, camera, queries)[0][..., 0]
            else:
                features = model.render_camera(camera, {})["feature"]
                cosines = torch.nn.functional.normalize(features, dim=-1) @ vectors.values.T
                scores = relevancy_reference(cosines[..., :2], cosines[..., 2:], 0.1)
        assert scores.shape == (rows, self.width)
        peak = peak_mib(model.device) - before
        return {
            "way": way,
            "dim": dim,
            "rows": rows,
            "peak_mib": round(peak, 1),
            "before_mib": round(before, 1),
            "s": round(time.perf_counter() - start, 1),
        }


def _model(dim: int, keep: bool) -> Any:
    """A field of few samples whose features have so many dimensions."""
    import torch
    from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
    from nerfstudio.data.scene_box import SceneBox

    from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
    from f3rm_ext.nerf.fields import GridOptions
    from f3rm_ext.nerf.model import F3rmModelConfig, ProposalOptions

    torch.manual_seed(0)
    grid = GridOptions(num_levels=2, features_per_level=2, base_res=4, max_res=16, log2_hashmap_size=10)
    config = F3rmModelConfig(
        grid=grid,
        feature_grid=grid,
        proposals=(ProposalOptions(num_samples=4, hidden_dim=8, grid=grid),),
        num_samples=4,
        hidden_dim=8,
        color_hidden_dim=8,
        appearance_dim=0,
        feature_pe_frequencies=0,
        feature_samples_per_ray=2,
        camera_optimizer=CameraOptimizerConfig(mode="off"),
        output_features=keep,
    )
    display = DisplayBasis(torch.zeros(dim), torch.eye(3, dim), -torch.ones(3), torch.ones(3))
    spec = FeatureSpec(name="feature", dim=dim, extractor="feature", identity={}, display=display)
    model = config.setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
        num_train_data=1,
        metadata={"feature_specs": (spec,)},
    )
    return model.eval()


def _camera(width_px: int, height_px: int) -> Any:
    import torch
    from nerfstudio.cameras.cameras import Cameras

    pose = torch.eye(4)[None, :3]
    pose[0, 2, 3] = 0.8
    focal = float(width_px)
    return Cameras(pose, fx=focal, fy=focal, cx=width_px / 2, cy=height_px / 2, width=width_px, height=height_px)


if __name__ == "__main__":
    tyro.cli(QueryMemory).main()
