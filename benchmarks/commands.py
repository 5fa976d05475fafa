"""Running the commands of this environment as a user types them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BIN = Path(sys.executable).parent


def call(command: Sequence[object]) -> None:
    """Runs a command beside this Python; what it says goes to standard error, and a failure is raised."""
    name, *arguments = map(str, command)
    subprocess.run([str(BIN / name), *arguments], check=True, env=dict(os.environ), stdout=sys.stderr)
