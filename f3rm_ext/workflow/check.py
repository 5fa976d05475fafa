"""Checks the options of a training before anything runs: ``python -m f3rm_ext.workflow.check METHOD OPTIONS``.

In a process of its own, since it imports what trainings import.
"""

import contextlib
import io
import sys
from collections.abc import Sequence

from f3rm_ext.engine.arguments import find_option
from f3rm_ext.errors import ConfigError, install_excepthook


def check(method: str, arguments: Sequence[str]) -> None:
    """Parses the arguments of ``ns-train METHOD``, but for those that say where files are.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another.
    """
    from nerfstudio.configs.base_config import MachineConfig

    from f3rm_ext import compat
    from f3rm_ext.engine.arguments import parse_arguments
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    compat.join_help_lines()
    default = make_splat_config(method)
    default.machine = MachineConfig(device_type="cpu")  # the device is checked when the training begins
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            config = parse_arguments(method, default, arguments)
    except SystemExit as leaving:
        raise ConfigError(
            f"The options for {method} cannot be used; `ns-train {method} --help` lists them.\n{message.getvalue()}"
        ) from leaving
    steps = getattr(config.pipeline.model, "refinement_time", None)
    if steps is not None and find_option(arguments, "--max-num-iterations"):
        raise ConfigError(
            f"--refinement-time {steps} and --refine.max-num-iterations both set the length of the refinement: give "
            "one of them."
        )


if __name__ == "__main__":
    install_excepthook()
    check(sys.argv[1], sys.argv[2:])
