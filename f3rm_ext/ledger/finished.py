"""Adding finished runs to the ledger: what their files say and an evaluation shows, and nothing else."""

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.ledger.conditions import hardware
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.ledger.runs import Bench
from f3rm_ext.workflow.records import read_scalars

LAST_LOSSES = 5
"""The loss is the mean of this many values at the end of TensorBoard's curve."""


def add_runs(
    ledger: Ledger,
    bench: Bench,
    runs: Sequence[Path],
    *,
    name: str = "",
    train_views: int,
    trained_here: bool = False,
    note: str = "",
) -> str:
    """Adds finished runs as repeats of a new entry.

    Args:
        ledger: where they go.
        bench: evaluates them.
        runs: their run folders or config.yml, alike in method, options and steps.
        name: of the entry; if empty, the method's with a number.
        train_views: training views to evaluate.
        trained_here: whether they were trained on this machine.
        note: a first note.

    Returns:
        The entry's name.

    Raises:
        ConfigError: there is no such run, or they are not alike.
        CommandError: a run cannot be evaluated.
        LedgerError: the ledger cannot be written, or the name is taken.
    """
    configs = [_config_of(run) for run in runs]
    ledger.require_new(name)
    found = [bench.evaluate(config, train_views) for config in configs]
    kinds = [_kind(result, trained_here) for result in found]
    for config, kind in zip(configs, kinds, strict=True):
        if kind != kinds[0]:
            raise ConfigError(
                f"{config} was not trained and evaluated like {configs[0]} (method, options, steps or capture differ), "
                "so they are not repeats of one benchmark: add them one by one."
            )
    method, conditions, origin = kinds[0]
    name = ledger.add(name, method, conditions=conditions, origin=origin, note=note)
    for config, result in zip(configs, found, strict=True):
        values = result["values"] | training_figures(result["cost"], read_scalars(config.parent))
        ledger.add_repeat(name, values, session=bench.session, seed=result["seed"])
    return name


def _config_of(run: Path) -> Path:
    path = run / "config.yml" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"There is no file {path}: give the config.yml that ns-train wrote for a run, or its folder.")
    return path


def _kind(result: Mapping[str, Any], trained_here: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Method, conditions and origin of a run."""
    conditions = dict(result["conditions"])
    if trained_here:
        conditions["hardware"] = hardware(conditions["device"])
    return result["method"], conditions, result["origin"]


def training_figures(
    cost: Mapping[str, float], curves: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, float]:
    """Returns the figures of a training that was not measured by a benchmark; without those that nothing tells.

    Args:
        cost: ``train_it_per_s`` and ``train_peak_memory_mib`` as our models report them; empty for others.
        curves: TensorBoard's scalars, (step, value) by tag.
    """
    found = {}
    for key, name in (("train_it_per_s", "it_per_s"), ("train_peak_memory_mib", "train_peak_mib")):
        if cost.get(key, 0.0) > 0:  # 0 means that it was not measured
            found[name] = cost[key]
    durations = [value for _, value in curves.get("Train Iter (time)", ()) if value > 0]
    if "it_per_s" not in found and durations:
        found["it_per_s"] = 1 / median(durations)
    speeds = [value for _, value in curves.get("Train Rays / Sec", ()) if value > 0]
    if speeds:
        found["rays_per_s"] = median(speeds)
    losses = [value for _, value in curves.get("Train Loss", ())][-LAST_LOSSES:]
    if losses:
        found["loss"] = fsum(losses) / len(losses)
    return found
