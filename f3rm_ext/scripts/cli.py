"""The command ``f3rm-ext``: imports the chosen group of commands and runs it.

A group is imported only when it is used, so that help appears at once and a broken part breaks no other.
"""

import errno
import importlib
import io
import os
import select
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from f3rm_ext import __version__, compat, errors
from f3rm_ext.errors import ConfigError, UserError, library_advice, reason_of
from f3rm_ext.utils import threads

PROGRAM = "f3rm-ext"
INTERRUPTED = 130
READER_LEFT = 141
"""Exit code where the reader of the output has gone: that of a program that SIGPIPE ends."""


@dataclass(frozen=True)
class Group:
    """A group of commands: a dataclass or a union of dataclasses, whose method ``main`` may return an exit code."""

    module: str
    attribute: str
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
        except Exception as error:  # importing a broken package can raise anything
            advice = library_advice(error) or f"run `{PROGRAM} doctor` to see what is missing"
            raise ConfigError(
                f"`{PROGRAM} {name}` cannot be used here ({type(error).__name__}: {reason_of(error)}): {advice}."
            ) from error


GROUPS = {
    name: Group(f"f3rm_ext.scripts.{name}", attribute, text)
    for name, attribute, text in (
        ("bench", "BenchCommand", "Measure runs, record them, and compare them with a baseline."),
        ("demo", "Demo", "Train, evaluate, query and report, on a synthetic scene or a capture."),
        ("doctor", "Doctor", "Report what is installed, and how to get what is missing."),
        ("eval", "EvalCommand", "Score meshes, queries, splats at several sizes, and textures."),
        ("export", "ExportCommand", "Export a scene to files for other programs."),
        ("features", "FeaturesCommand", "Extract, lift, list and verify 2D features."),
        ("moco", "MocoCommand", "Pre-train an image backbone on your own pictures."),
        ("plan", "Plan", "Estimate memory and time of a run; say what to change."),
        ("profile", "Profile", "Explain what the memory of a run is made of, and what to change."),
        ("query", "Query", "Find things by text, by example or by vectors, and write pictures of where they are."),
        ("scene", "SceneCommand", "Write a synthetic capture with exact ground truth, or a picture of its room."),
        ("sfm", "SfmCommand", "Find camera poses from photos or a video, measure poses, train DiffusionSfM."),
        ("splats", "SplatsCommand", "Remove floaters from splats, select objects, or show where to take more photos."),
        ("sugar", "Run", "Make a textured mesh of a capture: splats, mesh, refinement, texture, report."),
        ("view", "View", "Show a file of splats, a mesh or points in the browser."),
    )
}

RENAMED = {f"eval-{kind}": f"eval {kind}" for kind in ("mesh", "query", "scales", "texture")}
"""Former names of commands, and their present ones."""


def overview() -> str:
    """Returns what ``f3rm-ext --help`` prints."""
    width = max(map(len, GROUPS))
    commands = "\n".join(f"  {name:<{width}}  {group.help}" for name, group in GROUPS.items())
    return f"""usage: {PROGRAM} [-h] [--version] COMMAND ...

Feature fields and splats for Nerfstudio: tools for runs of `ns-train f3rm-ext` and `ns-train sugar-ext`.

commands:
{commands}

`{PROGRAM} COMMAND --help` explains a command.
`{PROGRAM} --tyro-write-completion bash FILE` writes a completion script for the shell."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command of a command line without the program's name, and returns its exit code.

    Raises:
        UserError: Something that the user can put right.
        SystemExit: From tyro, after help (0) or wrong options (2).
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
    if first in RENAMED:
        raise ConfigError(f"`{PROGRAM} {first}` is now `{PROGRAM} {RENAMED[first]}`, with the same options.")
    if first not in GROUPS:
        raise ConfigError(f"There is no command `{first}`: choose from {', '.join(GROUPS)}.")
    from f3rm_ext.scripts.switches import parse_command

    compat.join_help_lines()
    kind, prog = GROUPS[first].load(first), f"{PROGRAM} {first}"
    if hasattr(kind, "parse"):  # a command that passes options on
        command = kind.parse(arguments[1:], prog)
    else:
        command = parse_command(kind, prog, arguments[1:])
    return command.main() or 0


def _complete(arguments: Sequence[str]) -> int:
    """Lets tyro write a completion script, which needs all groups at once."""
    import tyro

    commands = {}
    for name, group in GROUPS.items():
        try:
            commands[name] = group.load(name)
        except UserError as error:
            print(f"Warning: {error}", file=sys.stderr)
    tyro.extras.subcommand_cli_from_dict(commands, prog=PROGRAM, args=list(arguments))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Errors are one sentence, mostly with exit code 2; Ctrl-C gives exit code 130. If the program that reads the output
    has ended (``| head``), the command ends too, without a word.
    """
    threads.prepare_environment()
    if not sys.warnoptions:
        # What other packages are warned of is their developers' business, not the user's.
        for category in (FutureWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", category=category, module="(?!f3rm_ext)")
        compat.quiet_known_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        errors.report(error)
        return error.exit_code
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return READER_LEFT
    except OSError as error:
        if error.filename is None or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        advice = "change its permissions, or choose another place"
        errors.report(ConfigError(f"{error.filename} cannot be used ({error.strerror}): {advice}."))
        return errors.EXIT_CODE
    except KeyboardInterrupt:
        print("\nStopped; finished work is kept.", file=sys.stderr)
        return INTERRUPTED


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more; pipes to other programs break, too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
