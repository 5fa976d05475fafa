"""Checks the options of a training before anything runs: ``python -m f3rm_ext.workflow.check METHOD OPTIONS``.

In a process of its own, since it imports what trainings import.
"""

import re
import sys
from collections.abc import Sequence

from f3rm_ext.errors import ConfigError, install_excepthook

_SENTENCE = re.compile(r"-{9} (.+?) -{9}")
"""What tyro says, in its frame."""


def check(method: str, arguments: Sequence[str]) -> None:
    """Parses the arguments of ``ns-train METHOD``, and lets the model check them.

    Args:
        method: name of a splatting method.
        arguments: its options, without those that say where files are.

    Raises:
        ConfigError: an option is unknown, or cannot work.
    """
    import contextlib
    import io

    import tyro
    from nerfstudio.configs.base_config import MachineConfig

    from f3rm_ext import compat
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    compat.join_help_lines()
    default = make_splat_config(method)
    default.machine = MachineConfig(device_type="cpu")  # the device is checked when the training begins
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            markers = tyro.conf.SuppressFixed[tyro.conf.FlagConversionOff[type(default)]]  # as nerfstudio has it
            config = tyro.cli(markers, default=default, prog=f"ns-train {method}", args=list(arguments))
    except SystemExit as leaving:
        found = _SENTENCE.search(" ".join(said.getvalue().replace("│", " ").split()))
        reason = found[1].strip() if found else "see the log"
        raise ConfigError(
            f"The options for {method} cannot be used ({reason}): `ns-train {method} --help` lists them."
        ) from leaving
    steps = getattr(config.pipeline.model, "refinement_time", None)
    if steps is not None and config.max_num_iterations != default.max_num_iterations:
        raise ConfigError(
            f"--refinement-time {steps} and --refine.max-num-iterations both say how long the refinement is: give one."
        )


if __name__ == "__main__":
    install_excepthook()
    check(sys.argv[1], sys.argv[2:])
