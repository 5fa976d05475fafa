"""The command f3rm-ext: hands over, fails in one sentence, and helps at once."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import f3rm_ext
from f3rm_ext.errors import CaptureError
from f3rm_ext.scripts import cli
from f3rm_ext.scripts.common import print_training

GROUPS = cli.GROUPS


@dataclass
class Greet:
    """Says hello."""

    name: str = "you"
    """Whom to greet."""
    code: int = 0
    """Exit code."""

    def main(self) -> int:
        if self.name == "nobody":
            raise CaptureError("There is nobody: name somebody.")
        if self.name == "locked":
            raise PermissionError(13, "Permission denied", "/locked/photo.jpg")
        if self.name == "impatient":
            raise KeyboardInterrupt
        print(f"hello {self.name}")
        return self.code


@dataclass
class Part:
    """Says bye."""

    def main(self) -> None:
        print("bye")


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, cli.Group]]:
    """Small groups in place of the real ones: one command, two commands, one that cannot be imported."""
    module = ModuleType("greetings")
    module.Greet = Greet  # type: ignore[attr-defined]
    module.Both = Greet | Part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "greetings", module)
    made = {
        "greet": cli.Group("greetings", "Greet", "Say hello."),
        "both": cli.Group("greetings", "Both", "Say things."),
        "broken": cli.Group("no_such_module_at_all", "X", "Cannot work."),
    }
    monkeypatch.setattr(cli, "GROUPS", made)
    yield made


def test_hands_over_to_the_command_of_a_group(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["greet", "--name", "fox", "--code", "1"]) == 1
    assert cli.main(["both", "part"]) == 0
    assert cli.main(["both", "greet", "--name", "you"]) == 0
    assert capsys.readouterr().out == "hello fox\nbye\nhello you\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["greet", "--name", "nobody"], 2, r"Error: There is nobody: name somebody\.\n"),
        (["greet", "--name", "locked"], 2, r"Error: /locked/photo\.jpg cannot be used \(Permission denied\).*"),
        (["greet", "--name", "impatient"], 130, r"\nStopped.*"),
        (["dance"], 2, r"Error: There is no command `dance`: choose from greet, both, broken\.\n"),
        (["broken"], 2, r"Error: `f3rm-ext broken` cannot be used here \(ModuleNotFoundError.*f3rm-ext doctor.*"),
        *(([f"eval-{kind}"], 2, f".*`f3rm-ext eval {kind}`.*") for kind in ("mesh", "query", "scales", "texture")),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(words) == code
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(said, captured.err, re.DOTALL)


def test_wrong_option_has_exit_code_2(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["greet", "--nmae", "x"])
    assert leaving.value.code == 2


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_overview(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "greet " in out and "Say hello." in out and "broken" in out


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"f3rm-ext {f3rm_ext.__version__}\n"


def test_completion_covers_what_can_be_imported(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--tyro-print-completion", "bash"])
    captured = capsys.readouterr()
    assert leaving.value.code in (0, None)
    assert "greet" in captured.out and "--name" in captured.out
    assert "`f3rm-ext broken` cannot be used" in captured.err


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from f3rm_ext.scripts.cli import main; main(['--help']);"
        "print(sorted({'torch', 'nerfstudio', 'numpy', 'tyro', 'rich'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_deprecations_in_other_packages_are_not_shown() -> None:
    code = "from f3rm_ext.scripts.cli import main; main(['--version']); import nerfstudio.engine.trainer"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""


def test_the_manual_shows_every_group() -> None:
    root = Path(__file__).parents[3]
    manual = "\n".join(page.read_text() for page in [root / "README.md", *(root / "docs").glob("*.md")])
    assert GROUPS and [group for group in GROUPS if f"f3rm-ext {group} " not in manual] == []


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_the_reader_of_the_output_leaves(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from f3rm_ext.scripts.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=200,
    )
    os.close(writing)
    assert done.returncode == cli.READER_LEFT and not done.stderr


def test_another_pipe_that_breaks_is_no_reader_that_left(
    groups: dict[str, cli.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(command: Greet) -> int:
        raise BrokenPipeError("of a program that we write to")

    monkeypatch.setattr(Greet, "main", write)
    with pytest.raises(BrokenPipeError):
        cli.main(["greet"])


@pytest.mark.parametrize(("has_gpu", "method"), [(False, "sugar-ext-lite"), (True, "sugar-ext")])
def test_the_methods_that_commands_name_are_those_for_the_machine(
    pretend_gpus: Callable[[int], None], capsys: pytest.CaptureFixture[str], has_gpu: bool, method: str
) -> None:
    pretend_gpus(int(has_gpu))
    print_training(Path("a room"), "f3rm-ext", "sugar-ext")
    assert f"ns-train {method} --data 'a room'" in capsys.readouterr().out
