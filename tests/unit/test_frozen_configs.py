"""config.yml of every method as it was written once: its class paths and options have to be understood for ever.

A failure means that runs people have trained would no longer open. Let the old name go on working; do not change the
frozen file. A new option needs no change here, a new class in config.yml a line of its own in the frozen file.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from f3rm_ext.engine.config_file import read_config
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config

FROZEN = sorted((Path(__file__).parent / "frozen_configs").glob("*.yml"))


def config_of(method: str) -> Any:
    return make_splat_config(method) if method.startswith("sugar") else make_config(method)


def options(config: Any, prefix: str = "") -> dict[str, Any]:
    """All plain options by their path."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= options(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def class_paths(text: str) -> set[str]:
    return set(re.findall(r"f3rm_ext\.[\w.]+", text))


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_it_is_read_as_it_was_meant(path: Path) -> None:
    then, now = options(read_config(path)), options(config_of(path.stem))
    assert then.keys() == now.keys()
    assert then["timestamp"] == "t" and str(then["pipeline.datamanager.data"]) == "capture"
    free = {"data", "pipeline.datamanager.data", "experiment_name", "timestamp", "machine.device_type"}
    free |= {name for name, value in now.items() if value == "auto"}  # a run writes what these became
    kinds = ({name: type(value) for name, value in part.items() if name not in free} for part in (then, now))
    assert next(kinds) == next(kinds)


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_nerfstudio_reads_it(path: Path) -> None:
    """``ns-eval``, ``ns-viewer`` and ``ns-render`` build the classes that the file names."""
    frozen = yaml.load(path.read_text("utf8"), Loader=yaml.Loader)
    now = config_of(path.stem)
    assert type(frozen) is type(now) and frozen.method_name == path.stem
    for part in ("pipeline", "pipeline.model", "pipeline.datamanager", "pipeline.datamanager.dataparser"):
        old, new = frozen, now
        for name in part.split("."):
            old, new = getattr(old, name), getattr(new, name)
        assert type(old) is type(new) and old._target is new._target, part


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_every_class_it_may_name_is_frozen(path: Path) -> None:
    assert class_paths(yaml.dump(config_of(path.stem))) <= class_paths(path.read_text("utf8"))


def test_every_method_is_frozen() -> None:
    from f3rm_ext.method_configs.nerf import PRESETS
    from f3rm_ext.method_configs.splat import PRESETS as SPLAT_PRESETS
    from f3rm_ext.method_configs.splat import REFINEMENT

    assert {path.stem for path in FROZEN} == {*PRESETS, *SPLAT_PRESETS, *REFINEMENT}
