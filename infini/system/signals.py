"""Signals that stop a command as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def as_interrupt(name: str, unless_handled: bool = False) -> Iterator[None]:
    """Treat a signal as Ctrl-C inside the block, in the main thread and where the system has it.

    unless_handled: an existing handler, as of a launcher, stays.
    """
    number: signal.Signals | None = getattr(signal, name, None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    if unless_handled and signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, before)
