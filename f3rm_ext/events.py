"""What a command tells the program that started it: JSON objects, one a line, on a file descriptor.

The starter makes an :class:`EventPipe` and gives the command its descriptor and :data:`VARIABLE`. The command calls
:func:`progress`, :func:`note`, :func:`result` and :func:`error`, which do nothing where the variable is not set.
"""

import json
import os
import time
from typing import Any

VARIABLE = "F3RM_EXT_EVENTS"
"""Variable of the environment: ``DESCRIPTOR:INODE:STARTER``, where STARTER is the process that holds the descriptor."""
STEPS = "Steps"
"""Stage of progress that follows all preparations, such as the steps of a training. Time limits count from it on."""
_EVERY_S = 0.2
_descriptors: dict[str, int] = {}
"""What the values of the variable led to; -1 where there is no such pipe."""
_sent_s: dict[str, float] = {}
"""Time of the last progress of each stage."""


def progress(stage: str, done: int | float, total: int | float) -> None:
    """Tells how far a stage of the work is. Of quick updates only some are sent, among them the first and the last."""
    now = time.monotonic()
    if VARIABLE in os.environ and (done >= total or now - _sent_s.get(stage, -_EVERY_S) >= _EVERY_S):
        _sent_s[stage] = now
        _send({"event": "progress", "stage": stage, "done": done, "total": total})


def note(sentence: str) -> None:
    """Tells a sentence that the user should read."""
    _send({"event": "note", "text": sentence})


def result(**values: Any) -> None:
    """Tells the values that the command was run for."""
    _send({"event": "result", "values": values})


def error(sentence: str) -> None:
    """Tells why the command ends."""
    _send({"event": "error", "text": sentence})


def _send(event: dict[str, Any]) -> None:
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    if place not in _descriptors:
        _descriptors[place] = _find(place)
    if _descriptors[place] >= 0:
        try:
            os.write(_descriptors[place], json.dumps(event).encode() + b"\n")
        except OSError:  # the starter was killed
            _descriptors[place] = -1


def _find(place: str) -> int:
    """Returns the descriptor of the pipe. A child that did not inherit it opens it anew where the system has /proc."""
    try:
        number, inode, starter = map(int, place.split(":"))
    except ValueError:
        return -1
    if _is_pipe(number, inode):
        return number
    try:
        # Where the reader is gone, opening a pipe would otherwise wait for one.
        opened = os.open(f"/proc/{starter}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1
    if not _is_pipe(opened, inode):
        os.close(opened)
        return -1
    os.set_blocking(opened, True)
    return opened


def _is_pipe(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


class EventPipe:
    """The starter's side."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.variable = {VARIABLE: f"{self.writer}:{os.fstat(self.writer).st_ino}:{os.getpid()}"}
        """For the environment of the command, which also has to inherit :attr:`writer`."""
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Returns the events that have arrived since the last call."""
        while True:
            try:
                self._rest += os.read(self.reader, 1 << 16)
            except BlockingIOError:
                break
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Closes both ends."""
        os.close(self.reader)
        os.close(self.writer)
