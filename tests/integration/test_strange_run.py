"""A run folder from somebody else: its config.yml is read by our commands, and nothing that it names is run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALL = "!!python/object/apply:os.system ['touch {mark}']"
TARGET = "_target: !!python/name:f3rm_ext.query.pipeline.FeaturePipeline ''"
CHANGES = {
    "a call": ("project_name: nerfstudio-project", f"project_name: {CALL}"),
    "a call where nothing belongs": ("\ndata: ", f"\noption_of_yore: {CALL}\ndata: "),
    "a call for a name": ("\ndata: ", f"\n? {CALL}\n: 1\ndata: "),
    "a function to set up": (TARGET, "_target: !!python/name:os.system ''"),
    "a class to set up": (TARGET, "_target: !!python/name:subprocess.Popen ''"),
}
COMMANDS = {
    "query": ("--text", "mug"),
    "eval query": (),
    "eval scales": (),
    "export features": (),
    "export splats": (),
    "features lift": ("--extractors", "dense-daisy"),
}


@pytest.fixture
def strange(untrained: Any, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A copy of a run whose config.yml would have a command run; and the file that the command would write."""

    def make(change: str) -> tuple[Path, Path]:
        mark = tmp_path / "executed"
        before, after = (part.replace("{mark}", str(mark)) for part in CHANGES[change])
        shutil.copytree(untrained.folder, tmp_path / "run")
        config = tmp_path / "run" / "config.yml"
        text = config.read_text()
        assert before in text
        config.write_text(text.replace(before, after, 1))
        return config, mark

    return make


@pytest.mark.parametrize("change", CHANGES)
def test_a_command_in_config_yml_is_refused_and_not_run(
    f3rm_ext: Callable[..., Any], strange: Callable[[str], tuple[Path, Path]], tmp_path: Path, change: str
) -> None:
    config, mark = strange(change)
    said = f3rm_ext("query", "--load-config", config, "--out", tmp_path / "out", "--text", "mug").refuses()
    assert "config.yml is refused, because line" in said and ("os.system" in said or "subprocess.Popen" in said)
    assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_it(
    f3rm_ext: Callable[..., Any], strange: Callable[[str], tuple[Path, Path]], tmp_path: Path, command: str
) -> None:
    config, mark = strange("a call")
    kind = {"eval scales": ".json", "export features": ".ply", "export splats": ".ply"}.get(command, "")
    out = () if command == "features lift" else ("--out", tmp_path / f"out{kind}")
    said = f3rm_ext(*command.split(), "--load-config", config, *out, *COMMANDS[command]).refuses()
    assert "config.yml is refused, because line" in said and "os.system" in said
    assert not mark.exists()
