"""Nerfstudio's own start of several processes, whose work is only to wait for Ctrl-C."""

import functools
import signal
import sys
from pathlib import Path
from typing import Any


def wait_for_the_end(rank: int, *_: Any) -> None:
    """Ends as a rank that was asked to stop: it finishes a step and saves, whatever else it is told meanwhile."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(130)

    signal.signal(signal.SIGINT, stop)
    Path(sys.argv[1], str(rank)).touch()
    while True:
        signal.pause()


if __name__ == "__main__":
    from nerfstudio.configs.base_config import LoggingConfig
    from nerfstudio.engine.trainer import TrainerConfig
    from nerfstudio.scripts import train

    from f3rm_ext.engine import launch

    train._distributed_worker = wait_for_the_end
    train.mp.spawn = functools.partial(train.mp.start_processes, start_method="fork")  # without importing all again
    launch.remember_interruption()
    config = TrainerConfig(logging=LoggingConfig(profiler="none"))
    train.launch(print, num_devices_per_machine=2, device_type="cpu", config=config)
