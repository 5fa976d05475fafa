"""What commands share, imported in the process that they are forked from (:mod:`f3rm_ext.workflow.forks`)."""

import contextlib
import importlib
import os
import sys

from f3rm_ext.workflow.forks import die_with_parent

SHARED = ("nerfstudio.scripts.train", "nerfstudio.scripts.eval")
"""With them come PyTorch and the methods."""


def _prepare() -> None:
    die_with_parent()
    with open(os.devnull, "w") as nothing:  # what imports say would be in the way of the starter's own output
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    for name in SHARED:
        with contextlib.suppress(Exception):  # a command that needs it will say why it cannot be had
            importlib.import_module(name)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    _prepare()
