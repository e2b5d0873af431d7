"""Signals that stop a command as Ctrl-C does: what they interrupt, and which handler is there after the command."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from infini.system import process

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="this system has no such signal")


class SignalHandler:
    """Stands for submitit's, which as_interrupt knows by its name."""

    def __init__(self) -> None:
        self.asked = 0

    def checkpoint_and_try_requeue(self, number: int, frame: Any) -> None:
        self.asked += 1
        raise SystemExit(-1)

    def bypass(self, number: int, frame: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def handlers_put_back() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ends_with_a_signal(number: signal.Signals, moment: int, **options: bool) -> type[BaseException] | bool | None:
    """How a function that is as_interrupt ends where the signal comes at a moment after its last line: a number of
    lines of the code that puts back the handler. False: there are not as many."""
    ended = sent = False
    lines = 0

    @process.as_interrupt(number.name, **options)
    def work() -> None:
        nonlocal ended
        ended = True

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines, sent
        if ended and not sent and frame.f_code.co_filename in (process.__file__, contextlib.__file__):
            sent = lines == moment
            lines += 1
            if sent:
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except BaseException as error:
        return type(error)
    finally:
        sys.settrace(before)
    return None if sent else False


def test_a_job_is_queued_again_whenever_the_signal_comes() -> None:
    for moment in itertools.count():
        launcher = SignalHandler()
        handler = launcher.checkpoint_and_try_requeue
        signal.signal(signal.SIGUSR2, handler)
        end = ends_with_a_signal(signal.SIGUSR2, moment, unless_handled=True)
        assert signal.getsignal(signal.SIGUSR2) == handler, moment
        if end is False:
            break
        assert (end, launcher.asked) == (SystemExit, 1), moment
    assert moment > 3


def test_no_signal_is_lost_as_a_function_ends() -> None:
    interrupted = 0
    for moment in itertools.count():
        told: list[int] = []

        def tell(number: int, frame: Any, told: list[int] = told) -> None:
            told.append(number)

        signal.signal(signal.SIGUSR1, tell)
        end = ends_with_a_signal(signal.SIGUSR1, moment)
        assert signal.getsignal(signal.SIGUSR1) is tell, moment
        if end is False:
            break
        # Once the handler is back it gets the signal.
        assert (end, len(told)) in ((KeyboardInterrupt, 0), (None, 1)), moment
        interrupted += end is KeyboardInterrupt
    assert moment > interrupted > 1


@pytest.mark.parametrize("options", [{}, {"unless_handled": True}])
def test_an_ignored_signal_stays_ignored(options: dict[str, bool]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    @process.as_interrupt("SIGUSR1", **options)
    def work() -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "done"

    assert work() == "done"


@pytest.mark.parametrize("launched", [True, False], ids=["a job of submitit", "a shell"])
def test_processes_of_a_job_ignore_what_submitit_passes_over(launched: bool) -> None:
    handler: Any = SignalHandler().bypass if launched else signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    code = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"
    with process.children_ignore_sigterm():
        said = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == str(launched)
    assert signal.getsignal(signal.SIGTERM) == handler
