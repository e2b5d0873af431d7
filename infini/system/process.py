"""The environment of a command: standard streams that never stop it, signals that act like Ctrl-C, and MPLBACKEND.

A stream may be closed, without a reader, on a full disk, or in a narrow encoding.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

_LOOKALIKES = {
    "\N{EM DASH}": "-",
    "\N{EN DASH}": "-",
    "\N{MINUS SIGN}": "-",
    "\N{PLUS-MINUS SIGN}": "+/-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{DAGGER}": "+",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}": "-",
    "\N{BOX DRAWINGS HEAVY LEFT}": "-",
    "\N{BOX DRAWINGS HEAVY RIGHT}": "-",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
}
"""Character -> replacement in encodings that lack it."""
_ERRORS = "infini.lookalikes"


def _lookalike(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: the replacement of a character, or its escape sequence if there is none."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    escaped = (letter.encode("ascii", "backslashreplace").decode() for letter in letters)
    return "".join(_LOOKALIKES.get(a, b) for a, b in zip(letters, escaped, strict=True)), error.end


codecs.register_error(_ERRORS, _lookalike)


def in_encoding(text: str, encoding: str) -> str:
    """`text` as it appears in a stream of this encoding."""
    return text.encode(encoding, _ERRORS).decode(encoding)


OUTPUT = "standard output"
"""The file name in errors of standard output."""
QUEUES_AGAIN = "SignalHandler.checkpoint_and_try_requeue"
"""Qualified name of submitit's handler of the signal with which a scheduler ends a job."""
IGNORES = "SignalHandler.bypass"
"""Qualified name of submitit's handler of the signals that it ignores, among them SIGTERM."""
P = ParamSpec("P")
R = TypeVar("R")


class _PatientFile(io.FileIO):
    """A descriptor that drops its output after the reader is gone or the disk is full, instead of failing again."""

    patient: bool
    lost: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.lost = error
            # Python and other packages will write to this descriptor again, for example at exit.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.patient:
                return len(content)
            error.filename = OUTPUT
            raise


@contextlib.contextmanager
def robust_streams(patient: bool) -> Iterator[Callable[[], None]]:
    """A context in which the standard streams are safe to use. It gives a function that flushes standard output.

    A closed stream reads as empty and discards what is written. Characters that an encoding lacks become replacements
    or escapes. Writing to standard error never fails. patient: writing to standard output does not fail either, and the
    function raises OSError with OUTPUT as its file if output was lost for another reason than a reader that is gone; if
    false, writing raises it.

    Streams that a notebook or another program has replaced are unchanged.
    """
    for descriptor in (0, 1, 2):
        # A file opened later would get the number of a closed one, and printed text would go into that file.
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open takes the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the command
    out = _replace("stdout", 1, patient)
    _replace("stderr", 2, True)

    def finish() -> None:
        sys.stdout.flush()
        if out is not None and out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            out.lost.filename = OUTPUT
            raise out.lost

    try:
        yield finish
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _replace(name: str, descriptor: int, patient: bool) -> _PatientFile | None:
    """Replace sys.<name> by a stream on a _PatientFile, and return that file; None if the stream is not the
    process's."""
    old = getattr(sys, name)
    if old is not getattr(sys, f"__{name}__") or not isinstance(old, io.TextIOWrapper | None):
        return None
    if old is not None:
        with contextlib.suppress(OSError):
            old.flush()
    file = _PatientFile(descriptor, "w", closefd=False)
    file.patient = patient
    stream = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(old, "encoding", "utf-8"),
        errors=_ERRORS,
        line_buffering=getattr(old, "line_buffering", False),
        write_through=getattr(old, "write_through", False),
    )
    setattr(sys, name, stream)
    return file


class _Interrupt:
    """A handler that treats a signal as Ctrl-C."""

    came = False
    """Whether the signal has come."""
    late = False
    """Whether it has come after the end of what it could stop."""
    ended = False

    def __call__(self, number: int, frame: Any) -> None:
        self.came = True
        if self.ended:
            self.late = True
            return
        raise KeyboardInterrupt


def as_interrupt(name: str, unless_handled: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: treat a signal as Ctrl-C inside a function, in the main thread and where the system has it.

    A signal that is ignored stays ignored. unless_handled: an existing handler, such as a launcher's, stays. submitit's
    handler, which queues the job again and ends the process, is called after the function, so that the function can
    save its work first.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def interrupted(*args: P.args, **kwargs: P.kwargs) -> R:
            number: signal.Signals | None = getattr(signal, name, None)
            if number is None or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            before = signal.getsignal(number)
            queues_again = unless_handled and getattr(before, "__qualname__", "") == QUEUES_AGAIN
            stays = unless_handled and not queues_again and before is not signal.SIG_DFL
            if stays or before is signal.SIG_IGN:
                return function(*args, **kwargs)
            handler = _Interrupt()
            # A signal may come between any two lines. One that comes before the handler knows of the end interrupts
            # the inner block, or its end; the outer block then still puts back what was there. A context manager could
            # not do this: what comes as its __exit__ is called skips it.
            try:
                try:
                    signal.signal(number, handler)
                    return function(*args, **kwargs)
                finally:
                    handler.ended = True
            finally:
                handler.ended = True
                signal.signal(number, before)
                if queues_again and handler.came:
                    signal.raise_signal(number)
                elif handler.late:
                    raise KeyboardInterrupt

        return interrupted

    return decorated


@contextlib.contextmanager
def children_ignore_sigterm() -> Iterator[None]:
    """Where submitit ignores SIGTERM, a process that is started inside the block ignores it, too.

    Such a process inherits that a signal is ignored, but no handler.
    """
    before = signal.getsignal(signal.SIGTERM)
    ignored = getattr(before, "__qualname__", "") == IGNORES
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def redirected_interrupts(act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yields a function. After it is called, until the end of the block, signals that raise KeyboardInterrupt at the
    start of the block call act() instead, and the others have the handlers that they had then. Nothing happens in other
    threads than the main one.
    """
    at_start: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        at_start = {number: signal.getsignal(number) for number in signal.Signals}
    before = {
        number: handler
        for number, handler in at_start.items()
        if handler is signal.default_int_handler or isinstance(handler, _Interrupt)
    }

    def redirected(number: int, frame: Any) -> None:
        # A handler keeps whether its signal has come.
        with contextlib.suppress(KeyboardInterrupt):
            before[signal.Signals(number)](number, frame)
        act()

    def redirect() -> None:
        for number, handler in at_start.items():
            if number in before:
                signal.signal(number, redirected)
            elif signal.getsignal(number) != handler:
                # Lightning, which stops on SIGTERM, does not leave it to submitit's handler or to be ignored.
                signal.signal(number, handler)

    try:
        yield redirect
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def headless_matplotlib() -> Iterator[None]:
    """A context in which matplotlib draws with Agg, regardless of MPLBACKEND.

    A shell started by a notebook inherits the notebook's MPLBACKEND. Importing matplotlib then fails where the
    notebook's packages are not installed. torchmetrics, and so Lightning, imports matplotlib: training would not start.
    """
    before = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MPLBACKEND"]
        else:
            os.environ["MPLBACKEND"] = before
