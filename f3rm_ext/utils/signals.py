"""Signals that are handled for a while."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Interrupt:
    """The signal, Ctrl-C or SIGTERM, that asks a training to stop."""

    alone: bool
    """Whether no other process would wait for this one."""
    number: int = 0
    """The signal; 0 for none."""

    def on_signal(self, number: int, _frame: Any) -> None:
        """Makes the first signal stop the training between two steps, and the second stop it at once."""
        if self.number and self.alone:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def handle_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handles signals in a block. Only the main thread can; in another one they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
