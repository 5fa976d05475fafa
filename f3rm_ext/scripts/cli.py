"""The command ``f3rm-ext``: finds the group of commands that is asked for and hands over to it.

A group is imported only when it is used, so that help comes at once and a broken part keeps no other from working.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from f3rm_ext import __version__, errors, threads
from f3rm_ext.errors import ConfigError, UserError

PROGRAM = "f3rm-ext"
INTERRUPTED = 130


@dataclass(frozen=True)
class Group:
    """A group of commands: a dataclass, or a union of them, with a method ``main`` that may return an exit code."""

    module: str
    """Where it is defined."""
    attribute: str
    """Its name there."""
    help: str
    """One line for ``f3rm-ext --help``."""

    def load(self, name: str) -> Any:
        """Imports the group.

        Raises:
            ConfigError: It cannot be imported.
        """
        try:
            return getattr(importlib.import_module(self.module), self.attribute)
        except UserError:
            raise
        except Exception as error:  # a broken package can raise anything when imported
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"`{PROGRAM} {name}` cannot be used here ({type(error).__name__}: {reason}): "
                f"run `{PROGRAM} doctor` to see what is missing."
            ) from error


GROUPS = {
    "demo": Group(
        "f3rm_ext.scripts.demo", "Demo", "Train, evaluate, query and report, on a made-up scene or a capture."
    ),
    "doctor": Group(
        "f3rm_ext.scripts.doctor", "Doctor", "Say what is installed and found, and what to do about the rest."
    ),
    "eval-query": Group("f3rm_ext.scripts.eval_query", "EvalQuery", "Compare queries with the labels of a capture."),
    "eval-scales": Group(
        "f3rm_ext.scripts.eval_scales", "EvalScales", "Compare splats with photos of larger and smaller sizes."
    ),
    "export": Group("f3rm_ext.scripts.export", "ExportCommand", "Write the scene for other programs."),
    "features": Group("f3rm_ext.scripts.features", "FeaturesCommand", "Extract, list and verify 2D features."),
    "query": Group("f3rm_ext.scripts.query", "Query", "Show where things are: by text, by example, by vectors."),
    "scene": Group("f3rm_ext.scripts.scene", "SceneCommand", "Write a synthetic capture with exact ground truth."),
}


def overview() -> str:
    """What ``f3rm-ext --help`` prints."""
    width = max(map(len, GROUPS))
    lines = [f"  {name:<{width}}  {group.help}" for name, group in GROUPS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} [-h] [--version] COMMAND ...",
            "",
            "Feature fields for Nerfstudio: tools around `ns-train f3rm-ext`.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` explains a command. For completion of commands and options in the shell:",
            f"`{PROGRAM} --tyro-write-completion bash FILE`.",
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: Command line without the program's name.

    Returns:
        Exit code of the command.

    Raises:
        UserError: Whatever the user can put right.
        SystemExit: From tyro, for help (0) and for wrong options (2).
    """
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print(overview())
        return 0
    if first == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if first.startswith("--tyro-"):
        return _complete(arguments)
    if first not in GROUPS:
        raise ConfigError(f"There is no command `{first}`: choose from {', '.join(GROUPS)}.")
    import tyro

    command = tyro.cli(GROUPS[first].load(first), prog=f"{PROGRAM} {first}", args=list(arguments[1:]))
    return command.main() or 0


def _complete(arguments: Sequence[str]) -> int:
    """Lets tyro write a shell's completion script, for which it has to see every group at once."""
    import tyro

    found = {}
    for name, group in GROUPS.items():
        try:
            found[name] = group.load(name)
        except UserError as error:
            print(f"Warning: {error}", file=sys.stderr)
    tyro.extras.subcommand_cli_from_dict(found, prog=PROGRAM, args=list(arguments))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: errors as one sentence, exit code 2; Ctrl-C gives 130."""
    threads.prepare_environment()
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        errors.report(error)
        return errors.EXIT_CODE
    except KeyboardInterrupt:
        print("\nStopped; what was finished is kept.", file=sys.stderr)
        return INTERRUPTED
