"""Signals that stop a command as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
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

    before = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def redirected_interrupts(act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yields a function. After it is called, until the end of the block, signals that raise KeyboardInterrupt at the
    start of the block call act() instead. Nothing happens in other threads than the main one.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in signal.Signals}
        raising = (signal.default_int_handler, _interrupt)
        before = {number: handler for number, handler in handlers.items() if handler in raising}

    def redirect() -> None:
        for number in before:
            signal.signal(number, lambda *_: act())

    try:
        yield redirect
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
