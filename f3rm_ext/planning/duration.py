"""Says how long a training takes here: ``python -m f3rm_ext.planning.duration METHOD OPTIONS``, as for ``ns-train``.

In a process of its own, since it trains a few steps.
"""

import sys
from collections.abc import Sequence

from f3rm_ext import events
from f3rm_ext.errors import install_excepthook
from f3rm_ext.planning.arguments import parse
from f3rm_ext.planning.throughput import probe

STEPS = 5
"""Timed in each stage of the training: the answer is to take seconds."""


def main(words: Sequence[str]) -> None:
    """Prints the steps and the seconds of a training, and tells them as its result.

    Args:
        words: the method, and arguments of ``ns-train``.

    Raises:
        UserError: the training cannot begin.
    """
    config = parse(words[0], words[1:])
    events.progress(events.STEPS, 0, 1)
    steps = config.max_num_iterations
    seconds = probe(config, STEPS).duration_s(steps)
    events.result(steps=steps, seconds=seconds)
    print(f"Steps: {steps}, seconds: {seconds:.1f}", flush=True)


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
