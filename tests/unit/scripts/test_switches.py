"""Both forms of switches, on the commands as they are."""

from pathlib import Path

import pytest

from f3rm_ext.scripts import cli
from f3rm_ext.scripts.export import ExportCommand
from f3rm_ext.scripts.moco import MocoCommand
from f3rm_ext.scripts.plan import Plan
from f3rm_ext.scripts.sfm import SfmCommand
from f3rm_ext.scripts.sugar import Run
from f3rm_ext.scripts.switches import parse_command, plain_switches
from f3rm_ext.workflow.options import split_stage_options

MESH = ["mesh", "--load-config", "config.yml", "--out", "mesh.ply"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["--thin-parts"], True),
        (["--no-thin-parts"], False),
        (["--thin-parts", "True"], True),
        (["--thin-parts", "False"], False),
        (["--thin_parts", "false"], False),
        (["--thin-parts=False"], False),
        (["--no-thin-parts", "False"], True),
    ],
)
def test_a_switch_has_two_forms(words: list[str], value: bool) -> None:
    assert parse_command(ExportCommand, "export", [*MESH, *words]).extraction.thin_parts is value


def test_only_a_literal_true_or_false_is_the_value_of_a_switch() -> None:
    words = ["--json", "True.ply", "--name", "False", "--json", "False", "--", "--json", "True"]
    assert plain_switches(Plan, words) == ["--json", "True.ply", "--name", "False", "--no-json", "--", "--json", "True"]
    with pytest.raises(SystemExit):
        parse_command(ExportCommand, "export", [*MESH, "--thin-parts", "yes"])
    with pytest.raises(SystemExit):
        parse_command(ExportCommand, "export", [*MESH, "--thin-parts=perhaps"])


def test_switches_of_options_within_a_command() -> None:
    words = ["process", "--images", "photos", "--output", "out", "--undistort", "True"]
    assert parse_command(SfmCommand, "sfm", words).config.undistort is True
    train = ["train", "--data", "tiles", "--output", "run"]
    for form, value in (
        ([], None),
        (["--use-amp"], True),
        (["--use-amp", "True"], True),
        (["--use-amp", "None"], None),
        (["--no-use-amp"], False),
    ):
        assert parse_command(MocoCommand, "moco", [*train, *form]).config.use_amp is value
    assert parse_command(MocoCommand, "moco", [*train, "--batch-negatives", "False"]).config.batch_negatives is False
    evaluate = ["eval", "--data", "tiles", "--weights", "backbone.safetensors"]
    for table in ([], ["--table", "tiles.md"]):
        assert parse_command(MocoCommand, "moco", [*evaluate, *table, "--json", "True"]).json is True


def test_commands_that_pass_options_on(tmp_path: Path) -> None:
    run = Run.parse(["run", "--data", "room", "--output", "o", "--skip-refine", "--skip-eval", "False"], "sugar")
    assert run.skip_refine and not run.skip_eval
    run = Run.parse(["run", "--data", "room", "--output", "o", "--mesh.unbounded", "--mesh.thin-parts", "False"], "s")
    assert run.passed_on == {"mesh": {"unbounded": (), "thin-parts": ("False",)}}
    plan = Plan.parse(["sugar-ext", "--json", "True", "--probe", "False", "--optimize-memory", "True"], "plan")
    assert plan.json and not plan.probe and plan.words == ("sugar-ext", "--optimize-memory", "True")
    assert split_stage_options(["--refine.optimize-memory", "--refine.logging", "x"])[1] == {
        "refine": {"optimize-memory": ("True",), "logging": ("x",)}
    }


@pytest.mark.parametrize("name", cli.GROUPS)
def test_help_shows_one_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = cli.GROUPS[name].load(name)
    kinds = [kind] if isinstance(kind, type) else [getattr(member, "__origin__", member) for member in kind.__args__]
    for command in kinds:
        with pytest.raises(SystemExit):
            parse_command(command, name, ["--help"])
        assert "{True,False}" not in capsys.readouterr().out
