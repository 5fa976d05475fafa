"""Options of the chain and those passed on to single stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.sugar import Run
from f3rm_ext.workflow.chain import ChainRun
from f3rm_ext.workflow.options import ChainOptions, option_words, split_stage_options
from f3rm_ext.workflow.runner import EXIT_INTERRUPTED


def parse(*words: object) -> Run:
    return Run.parse(["run", "--data", "d", "--output", "o", *map(str, words)], "f3rm-ext sugar")


def test_options_of_stages_are_separated_from_own_ones() -> None:
    words = ["--coarse.a.b_c", "1", "-2", "--data", "x", "--refine.flag", "--mesh.crop-min=0", "-r", "sdf"]
    own, passed = split_stage_options(words)
    assert own == ["--data", "x", "-r", "sdf"]
    assert passed == {"coarse": {"a.b-c": ("1", "-2")}, "refine": {"flag": ("True",)}, "mesh": {"crop-min": ("0",)}}
    assert option_words(passed["coarse"]) == ("--a.b-c", "1", "-2")


def test_an_option_of_no_stage_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline\.model\.sh-degree"):
        split_stage_options(["--pipeline.model.sh-degree", "2"])


@pytest.mark.parametrize(
    "word",
    ["--coarse.load-config", "--refine.load_config=config.yml", "--mesh.out", "--texture.mesh=a.ply", "--page.out"],
)
def test_other_files_than_those_of_the_chain_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0].replace("_", "-")):
        split_stage_options([word, "config.yml"])


def test_the_spellings_of_the_guides() -> None:
    run = parse("--refinement_time", "short", "-r", "dn_consistency", "--optimize_memory", "True", "--sh_degree", 2)
    assert run.refinement_time == "short" and run.regularization == "dn_consistency"
    both = {"sh-degree": ("2",), "optimize-memory": ("True",)}
    assert run.stage_options("coarse") == both | {"regularization": ("dn_consistency",)}
    assert run.stage_options("refine") == both | {"refinement-time": ("short",)}
    run = parse("--skip_coarse", "True", "--coarse_checkpoint", "a.ply", "-r", "refinement")
    assert run.skip_coarse and run.coarse_checkpoint == Path("a.ply") and run.regularization is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--skip-coarse", "True"), "--coarse-checkpoint"),
        (("--coarse-checkpoint", "a.ply"), "--coarse-checkpoint"),
        (("--skip-coarse", "True", "--coarse-checkpoint", "a.ply", "-r", "sdf"), "--regularization"),
        (("-r", "refinement"), "--regularization refinement"),
        (("--from-stage", "texture", "--until-stage", "mesh"), "--from-stage texture .* --until-stage mesh"),
        (("--vertices", 3), "--vertices is 3"),
        (("--sh-degree", 4), "--sh-degree is 4"),
        (("--resolution-scale", 2), "--resolution-scale is 2"),
        (("--texture-size", 9), "--texture-size is 9"),
        (("--images", "photos"), "--data and --images"),
        (("--from-stage", "sfm"), "--images"),
        (
            ("--dense-points", "always", "--skip-coarse", "True", "--coarse-checkpoint", "a.ply"),
            "--dense-points",
        ),
        (("--sfm.max-size", 100), "--sfm.OPTION"),
        (("--mesh.min-views", 0), "--min-views is 0"),
        (("--page.max-mb", 0), "--max-mb is 0"),
        (("--page.text", "mug"), r"--page\.text .* --refine\.pipeline\.model\.features"),
        (("--skip-refine", "--page.text", "mug", "--refine.pipeline.model.features", "clip"), r"--coarse\.pipeline"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("--page.sh-degree", 0),
        ("--page.text", "mug", "--refine.pipeline.model.features", "clip"),
        ("--page.text", "mug", "--skip-page"),
        ("--page.text", "mug", "--skip-refine", "--skip-coarse", "--coarse-checkpoint", "run/config.yml"),
    ],
)
def test_pages_that_may_work(words: tuple[Any, ...]) -> None:
    assert parse(*words).passed_on["page"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--data nor --images"),
        (("--images", "NONE"), "--images is NONE"),
        (("--images", "HERE", "--sfm.feature-size", 1), "--feature-size is 1"),
        (("--images", "HERE", "--sfm.method", "magic"), "choose from auto, colmap"),
        (("--images", "HERE", "--sfm.video", "clip.mp4"), "--images and --video"),
        (("--images", "HERE", "--skip-coarse", "True", "--coarse-checkpoint", "a.ply"), "give --data"),
    ],
)
def test_mistakes_with_photos_are_told_before_anything_runs(words: tuple[Any, ...], says: str, tmp_path: Path) -> None:
    typed = [str(tmp_path) if word == "HERE" else str(word) for word in words]
    with pytest.raises(ConfigError, match=says):
        Run.parse(["run", "--output", "o", *typed], "f3rm-ext sugar")


def test_an_unknown_option_of_an_export_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse("--mesh.no-such-thing", 1)
    assert leaving.value.code == 2 and "no-such-thing" in capsys.readouterr().err


def test_only_run_is_a_command() -> None:
    with pytest.raises(ConfigError, match="sugar walk"):
        Run.parse(["walk"], "f3rm-ext sugar")


def test_what_is_passed_on_wins() -> None:
    options = ChainOptions(data=Path("d"), output=Path("o"), sh_degree=2, passed_on={"coarse": {"sh-degree": ("1",)}})
    assert options.stage_options("coarse") == {"sh-degree": ("1",)}
    assert options.stage_options("refine") == {"sh-degree": ("2",)}


def test_ctrl_c_between_two_commands_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
    set_command_line: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(_: ChainRun) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(ChainRun, "run", stop)
    set_command_line("f3rm-ext", "sugar", "run", "--data", "my room", "--from-stage", "mesh")
    assert parse("--output", "scan [final]").main() == EXIT_INTERRUPTED
    said = capsys.readouterr()
    assert "To resume: f3rm-ext sugar run --data 'my room'\n" in said.err
    assert "in scan [final]; logs in scan [final]/logs" in said.out
