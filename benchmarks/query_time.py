"""CPU time of lifting features onto splats, of an example and of an answer, beside those of another commit.

Lifting also groups the Gaussians, and finds clusters of what the scene shows.

    git worktree add /tmp/before 9ee5a926
    python benchmarks/query_time.py --load-config RUN/config.yml --before /tmp/before

Both trees are measured in turn, by processes of their own, with their own code, on a copy of the run without groups,
which the code before does not know. Writes results/query_time.json.

Prediction: at most 2 × in all; the answer 1.2 × for ten times as many vectors, the example 5 ×, lifting 1.05 ×.
"""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from PIL import Image
from processes import write_report

HERE = Path(__file__).parent
PHOTOS = 4
"""Photos that are lifted."""


@dataclass
class QueryTime:
    """Measures this tree and another one."""

    load_config: Path
    """config.yml of a run of sugar-ext with lifted features."""
    before: Path | None = None
    """Tree of the other commit."""
    repeats: int = 3
    """Measurements of each tree, of which the medians count."""
    out: Path = HERE / "results" / "query_time.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Measures all trees in turn."""
        trees = {"now": HERE.parent, **({} if self.before is None else {"before": self.before.resolve()})}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        with tempfile.TemporaryDirectory() as folder:
            config = copy_without_groups(self.load_config, Path(folder))
            for _ in range(self.repeats):
                for name, tree in trees.items():
                    command = [sys.executable, __file__, "--measure", str(tree), str(config)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
                    print(name, found[name][-1], flush=True)
        rows = [
            {"code": name, **{key: statistics.median(each[key] for each in runs) for key in runs[0]}}
            for name, runs in found.items()
        ]
        write_report({"threads": os.environ.get("OMP_NUM_THREADS"), "rows": rows}, self.out)


def copy_without_groups(config: Path, folder: Path) -> Path:
    """Copies a run; its newest checkpoint loses what lifting finds beside features. Returns the copy's config."""
    from f3rm_ext.engine import checkpoint

    run = folder / config.resolve().parent.name
    shutil.copytree(config.resolve().parent, run)
    newest = max((run / "nerfstudio_models").glob("step-*.ckpt"))
    content = checkpoint.load(newest)
    state = {name: value for name, value in content["pipeline"].items() if not name.endswith((".groups", ".clusters"))}
    checkpoint.write({**content, "pipeline": state}, newest)
    return run / config.name


def measure(tree: Path, config: Path) -> dict[str, float]:
    """CPU seconds of the code in a tree."""
    sys.path.insert(0, str(tree))
    import f3rm_ext

    assert f3rm_ext.__file__ is not None and Path(f3rm_ext.__file__).is_relative_to(tree)
    methods = tree / "method_configs"
    spec = importlib.util.spec_from_file_location(
        "f3rm_ext.method_configs", methods / "__init__.py", submodule_search_locations=[str(methods)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from f3rm_ext.data.pinhole_cameras import PinholeCameras
    from f3rm_ext.query import run as run_module
    from f3rm_ext.query.embeddings import Query
    from f3rm_ext.query.encoders import ExampleEncoder
    from f3rm_ext.query.options import Region
    from f3rm_ext.query.queryable import get_head, score_image
    from f3rm_ext.splat.features import lifting

    run = run_module.load_run(config)
    head, model = get_head(run.model.query_heads(), ""), run.model
    views = PinholeCameras.of(run.cameras("train")).take(slice(0, PHOTOS))
    scene, encoder = model._scene(), ExampleEncoder(run, model.device)
    files = run.files("train")

    def find_clusters() -> Any:
        return run_module.view_clusters(model, head, run.cameras("train"))

    def lift(**options: Any) -> Any:
        return lifting.lift_maps(scene, views, head.dim, lambda i: run.feature_map("train", i, head.name), **options)

    def lift_and_group() -> None:
        if not hasattr(lifting, "group_gaussians"):
            lift()
            return
        seen = lifting.Seen(len(scene.gaussians), PHOTOS)
        codes = lift(on_weights=seen.add)
        figures["group"] = timed(lambda: lifting.group_gaussians(scene, codes, seen))

    def ask(photo: Path) -> Query:
        with Image.open(photo) as picture:
            middle = Region(photo.name, picture.width / 2, picture.height / 2)
        example = encoder.encode(head, middle)
        negatives = getattr(example, "negatives", None) or getattr(example, "background_clusters", None)
        assert negatives is not None
        return Query("thing", head.name, example.positives, negatives)

    score_image(model, run.cameras("test")[0:1], [ask(files[0])])  # compiles kernels
    lifting.lift_maps(scene, views.take(slice(0, 1)), head.dim, lambda i: run.feature_map("train", i, head.name))
    run._clusters = {}
    figures = {"group": 0.0, "clusters": 0.0}
    if hasattr(run_module, "view_clusters"):
        # As at the end of lifting, so that the first example finds them.
        figures["clusters"] = timed(lambda: setattr(head, "clusters", torch.from_numpy(find_clusters())))
    lifted = timed(lift_and_group) - figures["group"]
    figures["lift"] = lifted / PHOTOS * len(files)
    figures["first_example"] = timed(lambda: ask(files[1]))
    figures["example"] = timed(lambda: ask(files[2]))
    query = ask(files[3])
    figures["answer"] = timed(lambda: score_image(model, run.cameras("test")[1:2], [query]))
    return figures


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        tyro.cli(QueryTime).main()
