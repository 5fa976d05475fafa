"""Signals that are handled for a while."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
