"""config.yml of runs: everything nerfstudio writes is read, and nothing that a file names is run."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from nerfstudio.configs.dataparser_configs import all_dataparsers
from nerfstudio.configs.external_methods import ExternalMethodDummyTrainerConfig
from nerfstudio.configs.method_configs import all_methods

import f3rm_ext
from f3rm_ext.engine.config_file import read_config
from f3rm_ext.engine.opening import open_run
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.presets import make_config

METHODS = sorted(name for name, kind in all_methods.items() if not isinstance(kind, ExternalMethodDummyTrainerConfig))
OBJECT, NAME, CALL, NEW = (f"!!python/{kind}:" for kind in ("object", "name", "object/apply", "object/new"))


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Any]:
    """Reads a config.yml of this text."""

    def read_text(text: str) -> Any:
        path = tmp_path / "config.yml"
        path.write_text(text, "utf8")
        return read_config(path)

    return read_text


@pytest.fixture(scope="module")
def text() -> str:
    """A config.yml with everything plain a user may give."""
    config = make_config("f3rm-ext-lite")
    config.data, config.timestamp = Path("/data/fox"), "2026-01-01_000000"
    config.pipeline.datamanager.features.cache_dir = Path("cache")
    config.pipeline.datamanager.features.extractors = ("conse:top=3", "clip")
    config.experiment_name = "Füchse: №1 \n# no comment"
    return yaml.dump(config)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists only where a config.yml could have a command run."""
    return tmp_path / "executed"


@pytest.mark.parametrize("method", METHODS)
def test_configs_of_all_methods_are_read_as_they_were(read: Callable[[str], Any], method: str) -> None:
    config = all_methods[method]
    again = read(yaml.dump(config))
    assert again == config and yaml.dump(again) == yaml.dump(config)


@pytest.mark.parametrize("name", sorted(all_dataparsers))
def test_configs_with_any_dataparser_are_read_as_they_were(read: Callable[[str], Any], name: str) -> None:
    for method in ("f3rm-ext", "sugar-ext-lite"):
        config = copy.deepcopy(all_methods[method])
        config.pipeline.datamanager.dataparser = all_dataparsers[name]
        assert read(yaml.dump(config)) == config


def test_values_that_users_give_are_read(read: Callable[[str], Any], text: str) -> None:
    config = read(text)
    assert config.data == Path("/data/fox") and config.experiment_name == "Füchse: №1 \n# no comment"
    features = config.pipeline.datamanager.features
    assert features.cache_dir == Path("cache") and features.extractors == ("conse:top=3", "clip")


def test_members_of_enumerations_in_the_words_of_python_3_11_0(read: Callable[[str], Any], text: str) -> None:
    """Python 3.11.0 to 3.11.3 names members instead of their values."""
    name, value = f"{CALL}nerfstudio.utils.writer.EventName", "Test PSNR"
    before = re.search(rf"{name}\n +- {value}", text)
    theirs = f"{CALL}builtins.getattr [{NAME}nerfstudio.utils.writer.EventName '', CURR_TEST_PSNR]"
    assert before is not None
    assert read(text.replace(before[0], theirs)) == read(text)


def test_options_that_older_runs_lack_get_their_defaults(read: Callable[[str], Any], text: str) -> None:
    lines = [line for line in text.splitlines() if "steps_per_coverage" not in line and "init_density" not in line]
    config = read("\n".join(lines))
    assert config.pipeline.datamanager.steps_per_coverage == 500 and "init_density" in vars(config.pipeline.model)
    shorter = read(text[: text.index("\nviewer:")] + "\nvis: viewer\n")
    assert shorter.viewer == type(shorter)().viewer


def test_options_that_are_no_more_are_left_out(read: Callable[[str], Any], text: str) -> None:
    config = read(text + "option_of_yore: [1, 2]\nsetup: 3\n")
    assert not hasattr(config, "option_of_yore") and callable(config.setup)


def test_aliases_are_one_object(read: Callable[[str], Any]) -> None:
    config = copy.deepcopy(all_methods["f3rm-ext"])
    config.optimizers["fields"] = config.optimizers["feature_field"]
    assert "&id" in yaml.dump(config)
    optimizers = read(yaml.dump(config)).optimizers
    assert optimizers["fields"]["optimizer"] is optimizers["feature_field"]["optimizer"]


# What an option could be so that a command is run, by nerfstudio's loader or when the run is set up: {mark} is a file
# that the command writes.
COMMANDS = {
    "a call": f"{CALL}os.system ['touch {{mark}}']",
    "a call of posix": f"{CALL}posix.system ['touch {{mark}}']",
    "a call with keywords": f"{CALL}subprocess.run\n  kwds: {{{{args: [touch, '{{mark}}']}}}}",
    "an object made by a call": f"{CALL}subprocess.Popen [[touch, '{{mark}}']]",
    "a new object": f"{NEW}subprocess.Popen [[touch, '{{mark}}']]",
    "a new object with a state": f"{NEW}str\n  args: []\n  state: {{{{update: !!python/name:exec ''}}}}",
    "a new object that is extended": f"{NEW}type\n"
    "  args: [z, !!python/tuple [], {{extend: !!python/name:exec ''}}]\n"
    "  listitems: \"import os; os.system('touch {mark}')\"",
    "eval": f"{CALL}eval [\"__import__('os').system('touch {{mark}}')\"]",
    "builtins' eval": f"{CALL}builtins.eval [\"__import__('os').system('touch {{mark}}')\"]",
    "a tag written in full": "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {mark}']",
    "an escaped tag": "!!python/object/apply:os.s%79stem ['touch {mark}']",
    "a module that is imported": "!!python/module:antigravity ''",
    "a function": f"{NAME}os.system ''",
    "a function that a trusted module imported": f"{NAME}nerfstudio.utils.eval_utils.os.system ''",
    "a function of a trusted package": f"{NAME}nerfstudio.utils.scripts.run_command ''",
    "a call of a trusted package": f"{CALL}nerfstudio.utils.scripts.run_command ['touch {{mark}}']",
    "a class of a trusted package that is called": f"{CALL}nerfstudio.configs.base_config.MachineConfig []",
    "a getter": f"{CALL}_operator.getitem [{NAME}os.environ '', HOME]",
    "an attribute": f"{CALL}builtins.getattr [{NAME}os '', system]",
    "a path of something": f"{CALL}pathlib.PosixPath.home []",
    "inside of a list": f"[1, [{{{{a: {CALL}os.system ['touch {{mark}}']}}}}]]",
    "inside of a tuple": f"!!python/tuple [{CALL}os.system ['touch {{mark}}']]",
    "inside of a path": f"{CALL}pathlib.PosixPath [{CALL}os.system ['touch {{mark}}']]",
    "a key": f"{{{{? {CALL}os.system ['touch {{mark}}'] : 1}}}}",
    "inside of a set": f"!!set {{{{? {CALL}os.system ['touch {{mark}}']}}}}",
    "an object of a foreign class": f"{OBJECT}subprocess.Popen {{{{}}}}",
    "an object that is no config": f"{OBJECT}nerfstudio.engine.trainer.Trainer {{{{}}}}",
    "a type nobody knows": "!command 'touch {mark}'",
}


@pytest.mark.parametrize("field", ["data", "option_of_yore"])
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_run(read: Callable[[str], Any], text: str, mark: Path, field: str, command: str) -> None:
    bad = f"{text.splitlines()[0]}\n{field}: {COMMANDS[command].format(mark=mark)}"
    why = r"is (refused, because line \d+ asks for|not understood \(line \d+ names) .*: give the config\.yml"
    with pytest.raises(ConfigError, match=why) as error:
        read(bad)
    assert not mark.exists() and str(error.value).isprintable()


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.hub.load",
        "torch.nn.modules.linear.Linear",
        "pathlib.PosixPath",
        "nerfstudio.utils.scripts.run_command",
        "nerfstudio.utils.writer.LocalWriter",
        "nerfstudio.engine.trainer.Path",
        "nerfstudio.configs.base_config.InstantiateConfig",
        "f3rm_ext.workflow.commands.run",
    ],
)
def test_what_is_built_later_is_of_the_kind_that_belongs_there(
    read: Callable[[str], Any], text: str, target: str
) -> None:
    right = f"{NAME}f3rm_ext.query.pipeline.FeaturePipeline ''"
    assert right in text
    with pytest.raises(ConfigError, match=r"line \d+"):
        read(text.replace(right, f"{NAME}{target} ''"))


def test_what_is_built_later_may_be_another_of_its_kind(read: Callable[[str], Any], text: str) -> None:
    from nerfstudio.pipelines.dynamic_batch import DynamicBatchPipeline
    from torch.optim import SGD

    changed = text.replace(
        "f3rm_ext.query.pipeline.FeaturePipeline ''", "nerfstudio.pipelines.dynamic_batch.DynamicBatchPipeline ''"
    )
    changed = changed.replace("torch.optim.adam.Adam ''", "torch.optim.sgd.SGD ''")
    config = read(changed)
    assert config.pipeline._target is DynamicBatchPipeline
    assert config.optimizers["fields"]["optimizer"]._target is SGD


@pytest.mark.parametrize("change", ["collate_fn", "model", "machine"])
def test_other_fields_keep_their_kind(read: Callable[[str], Any], text: str, change: str) -> None:
    before, after = {
        "collate_fn": ("nerfstudio.data.utils.nerfstudio_collate.nerfstudio_collate ''", "os.system ''"),
        "model": (f"{OBJECT}f3rm_ext.nerf.model.F3rmModelConfig", f"{OBJECT}f3rm_ext.nerf.fields.GridOptions"),
        "machine": (f"{OBJECT}nerfstudio.configs.base_config.MachineConfig", "!!map"),
    }[change]
    assert before in text
    with pytest.raises(ConfigError, match=r"line \d+"):
        read(text.replace(before, after))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "holds no options"),
        ("a: 1", "holds no options"),
        (": : :\n\t-", "Error"),
        (f"{OBJECT}nerfstudio.configs.base_config.MachineConfig {{}}", "holds no options"),
        (f"{OBJECT}f3rm_ext.Missing {{}}", "line 1 names f3rm_ext.Missing, which is not here"),
        (f"{OBJECT}f3rm_ext.missing.Config {{}}", "which is not here"),
        (f"{OBJECT}f3rm_ext.engine.trainer.F3rmTrainerConfig &a {{data: *a}}", "contains itself"),
        (f"{OBJECT}f3rm_ext.engine.trainer.F3rmTrainerConfig {{1: 2}}", "is no option"),
        (f"{OBJECT}f3rm_ext.engine.trainer.F3rmTrainerConfig {{data: !!int x}}", "has no value"),
        (f"{OBJECT}nerfstudio.utils.writer.EventName {{}}", "asks for"),
        (f"{CALL}nerfstudio.utils.writer.EventName [nothing]", "is no EventName"),
        (f"{CALL}builtins.getattr [{NAME}nerfstudio.utils.writer.EventName '', nothing]", "is no EventName"),
        (f"{CALL}builtins.getattr [{NAME}nerfstudio.utils.writer.EventName '', __class__]", "is no EventName"),
        (f"{CALL}builtins.getattr [{NAME}nerfstudio.utils.writer.Writer '', write_image]", "asks for"),
        (f"{CALL}builtins.getattr [nerfstudio, utils]", "asks for"),
        (f"{CALL}pathlib.PosixPath [1]", "is no path"),
        ("[" * 100_000, "RecursionError"),
        ("a: \x00", "ReaderError"),
    ],
)
def test_what_is_no_config_is_not_understood(read: Callable[[str], Any], bad: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"give the config\.yml") as error:
        read(bad)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_not_understood(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not understood"):
        read_config(tmp_path / "config.yml")


def test_another_file_in_place_of_a_config_is_named_before_checkpoints_are_missed(tmp_path: Path) -> None:
    (tmp_path / "splats.ply").write_bytes(b"ply\nformat binary_little_endian 1.0\nend_header\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"splats\.ply is not understood"):
        open_run(tmp_path / "splats.ply", lambda config: True, "")
    with pytest.raises(ConfigError, match=r"folder.*config\.yml"):
        open_run(tmp_path, lambda config: True, "")


def test_ns_train_of_our_methods_refuses_another_config_that_runs_code(tmp_path: Path, mark: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(f"{CALL}os.system ['touch {mark}']")
    with pytest.raises(ConfigError, match=r"asks for os\.system"):
        tyro.cli(F3rmTrainerConfig, default=make_config("f3rm-ext-lite"), args=["--load-config", str(path)])
    assert not mark.exists()


def test_a_name_cannot_write_to_the_terminal(read: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="is refused") as error:
        read("!!python/object/apply:os.%1B%5B2Jsystem%0AError [x]")
    assert str(error.value).isprintable()


def test_modules_of_packages_without_methods_are_not_imported(
    read: Callable[[str], Any], tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for tag in (f"{OBJECT}stranger.Config {{}}", f"{NAME}stranger.Config ''", f"{CALL}stranger.Config []"):
        with pytest.raises(ConfigError, match=r"asks for stranger\.Config"):
            read(tag)
    assert not mark.exists()


def test_nerfstudios_methods_are_imported_for_their_own_configs_only(tmp_path: Path) -> None:
    methods = ("f3rm-ext", "nerfacto")
    for method in methods:
        (tmp_path / f"{method}.yml").write_text(yaml.dump(all_methods[method]))
    code = f"""
import pathlib, sys
from f3rm_ext import compat
compat.shorten_imports()  # of the viewer and torch's compiler, which no config needs
from f3rm_ext.engine.config_file import read_config
for method in {methods!r}:
    print(read_config(pathlib.Path({str(tmp_path)!r}, method + ".yml")).method_name)
    print("nerfstudio.models.nerfacto" in sys.modules, "nerfstudio.configs.method_configs" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["f3rm-ext", "False", "False", "nerfacto", "True", "False"], done.stderr


UNSAFE = re.compile(
    r"\beval_setup\(|import .*\beval_setup\b|yaml\.(unsafe_|full_)?load(_all)?\(|(Unsafe|Full)Loader|yaml\.C?Loader\b"
    r"|pickle\.loads?\(|weights_only=False|allow_pickle=True"
)


def test_no_module_reads_files_in_a_way_that_runs_code() -> None:
    root = Path(f3rm_ext.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text("utf8").splitlines()
        if UNSAFE.search(line.partition("#")[0])
    ]
    assert not found, f"use read_config, open_run or weights_only=True: {found}"
    assert UNSAFE.search("    from nerfstudio.utils.eval_utils import eval_setup"), "the pattern finds what it is for"
