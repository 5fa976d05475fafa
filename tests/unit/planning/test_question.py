"""Arguments of ns-train, parsed and replaced."""

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.planning.question import (
    has_capture,
    methods,
    option_names,
    parse,
    replace_options,
    split_arguments,
)

OWN = {"gpu": True, "vram-gib": True, "json": False}


def test_every_method_of_ours_can_be_planned() -> None:
    fields, splats = ["f3rm-ext", "f3rm-ext-big", "f3rm-ext-lite"], ["sugar-ext", "sugar-ext-lite", "sugar-ext-refine"]
    assert sorted(methods()) == fields + splats
    with pytest.raises(ConfigError, match=r"'nerfacto'.*f3rm-ext,"):
        parse("nerfacto", [])


def test_options_mean_what_they_mean_to_ns_train() -> None:
    config = parse("f3rm-ext", ["--max_num_iterations", "7", "--data", "there", "f3rm-ext-data", "--eval-mode", "all"])
    assert config.max_num_iterations == 7 and str(config.pipeline.datamanager.data) == "there"
    assert config.pipeline.datamanager.dataparser.eval_mode == "all"  # type: ignore[attr-defined]
    assert parse("f3rm-ext", []) == make_config("f3rm-ext"), "the defaults are not changed by earlier parsing"


def test_the_length_of_a_refinement_is_that_of_the_run() -> None:
    assert parse("sugar-ext-refine", ["--refinement-time", "short"]).max_num_iterations == 2000
    with pytest.raises(ConfigError, match="one of the two"):
        parse("sugar-ext-refine", ["--refinement-time", "short", "--max-num-iterations", "9"])


@pytest.mark.parametrize("arguments", [["--sh-degree", "3"], ["--max-num-iterations", "many"]])
def test_wrong_options_end_as_in_ns_train(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as raised:
        parse("f3rm-ext", arguments)
    assert raised.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"), [([], False), (["--data", "x"], True), (["colmap", "--data", "x"], True)]
)
def test_a_capture_may_be_named_in_two_ways(arguments: list[str], expected: bool) -> None:
    assert has_capture(parse("sugar-ext", arguments)) is expected


def test_short_names_are_known() -> None:
    config = methods()["sugar-ext"]
    assert "sh-degree" in option_names(config, "pipeline.model.sh-degree")
    assert "optimize-memory" in option_names(config, "pipeline.model.optimize-memory"), "in a part without a name"
    assert "resolution-scale" in option_names(config, "pipeline.datamanager.camera-res-scale-factor")


def test_replaced_options_are_not_given_twice_and_stand_before_the_dataparser() -> None:
    typed = ["--sh_degree", "3", "--pipeline.model.optimize-memory=False", "--vis", "viewer", "colmap", "--data", "x"]
    degree = "pipeline.model.sh-degree"
    words = replace_options(
        "sugar-ext",
        typed,
        [
            (degree, "1"),
            ("pipeline.model.optimize-memory", "True"),
            (degree, "2"),
        ],
    )
    assert words == ("--optimize-memory", "True", "--sh-degree", "2", "--vis", "viewer", "colmap", "--data", "x")
    model = parse("sugar-ext", words).pipeline.model
    assert (model.sh_degree, model.memory.optimize_memory) == (2, True)  # type: ignore[attr-defined]


def test_own_options_may_stand_anywhere() -> None:
    typed = ["--gpu=4090", "f3rm-ext", "--json", "--vis", "viewer", "--vram_gib", "8", "colmap"]
    assert split_arguments(typed, OWN) == (
        ["--gpu=4090", "--json", "--vram_gib", "8"],
        ["f3rm-ext", "--vis", "viewer", "colmap"],
    )
