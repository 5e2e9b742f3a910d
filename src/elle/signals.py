"""What signals do while a piece of work runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Within it `handler` handles these signals; nothing changes outside of the main thread, which alone may do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
