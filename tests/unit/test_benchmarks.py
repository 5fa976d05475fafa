"""Every benchmark still finds what it imports: renamed parts are noticed here, not on the day they are wanted."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


def _imported(script: Path) -> list[tuple[str, str]]:
    """Module and name of every `from … import …` of our package and of nerfstudio, also within functions."""
    found = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("f3rm_ext", "nerfstudio")):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    missing = []
    for module, name in _imported(script):
        if not hasattr(importlib.import_module(module), name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{module}.{name}")
    assert not missing


def test_nerfacto_is_measured_with_the_samples_and_the_batch_of_lite(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from f3rm_ext.method_configs.presets import make_config

    cpu_training, train_once = map(load, ("cpu_training", "train_once"))
    runs: list[Any] = []

    def measure(command: list[str], _: dict[str, str]) -> dict[str, Any]:
        run = train_once.tyro.cli(train_once.TrainOnce, args=command[2:])
        runs.append(run)
        cpu_ms = 100.0 if run.method == "nerfacto" else 10.0
        return (
            {"config": "", "steps": run.steps, "rays_per_step": run.rays, "train_s": 1.0, "rays_per_s": 1.0}
            | {f"step_{name}": cpu_ms for name in ("ms_median", "ms_q1", "ms_q3", "cpu_ms_median")}
            | {"train_cpu_s": cpu_ms / 1e3 * run.steps, "rays_per_cpu_s": 1.0, "peak_rss_mib": 1}
        )

    monkeypatch.setattr(cpu_training, "require_result", measure)
    monkeypatch.setattr(cpu_training, "evaluate", lambda config, environment: {"psnr": 1.0})
    cpu_training.CpuTraining(data=tmp_path, steps=50, out=tmp_path / "out.json").main()

    lite: Any = make_config("f3rm-ext-lite").pipeline
    matched = [run.make_config().pipeline for run in runs if run.method == "nerfacto" and run.change]
    assert matched
    for peer in matched:
        assert peer.datamanager.train_num_rays_per_batch == lite.datamanager.train_num_rays_per_batch
        assert peer.model.num_nerf_samples_per_ray == lite.model.num_samples
        assert list(peer.model.num_proposal_samples_per_ray) == [p.num_samples for p in lite.model.proposals]
        assert peer.model.num_proposal_iterations == len(lite.model.proposals)
    bare = matched[-1].model
    assert bare.camera_optimizer.mode == lite.model.camera_optimizer.mode == "off"
    assert not bare.use_appearance_embedding and not lite.model.appearance_dim
    assert runs[-1].steps == 50 and max(run.steps for run in runs) == 500  # as many as the time of the first allows
