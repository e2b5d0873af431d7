"""Messages on standard error: lines, warnings, and the progress of work with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 15.0
"""Time between two lines if no bar is shown."""


def plain_console(stderr: bool = True) -> Console:
    """A console that prints texts as they are, in one line each: brackets are no markup, and numbers get no colour."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print a warning."""
    console.print(text, style="bold yellow")


def duration(seconds: float) -> str:
    """A time in the unit that suits it: `42 s`, `12 minutes`, `3.4 hours`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 100 * 60 else f"{seconds / 3600:,.1f} hours"


class Advance(Protocol):
    """Moves a progress bar on."""

    def __call__(self, done: float, /) -> None:
        """By a part of the total that was done now."""

    def skip(self, done: float, /) -> None:
        """By a part that was done before: it is taken from the total, so that the estimate counts work alone."""


@contextmanager
def progress_bar(title: str, total: float | None, shown: bool = True, between: bool = False) -> Iterator[Advance]:
    """A progress bar. The context gives what advances it by a part of `total`.

    total: None if unknown; the bar then shows the part done and the time elapsed. shown: if false, a line is printed
    every PLAIN_SECONDS instead. between: draw only when the bar advances, so that no thread disturbs timings.
    """
    if not shown:
        yield _Lines(title, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    known = (TaskProgressColumn(), TimeRemainingColumn())
    unknown = (TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *(unknown if total is None else known))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=not between) as bar:
        task = bar.add_task(title, total=total)

        yield _Bar(bar, task, between)


class _Bar:
    def __init__(self, bar: Progress, task: TaskID, between: bool) -> None:
        self._bar, self._task, self._between = bar, task, between

    def __call__(self, done: float, /) -> None:
        self._bar.advance(self._task, done)
        if self._between:
            self._bar.refresh()

    def skip(self, done: float, /) -> None:
        (total,) = (task.total for task in self._bar.tasks if task.id == self._task)
        if total is not None:
            self._bar.update(self._task, total=total - done)


class _Lines:
    """A line every PLAIN_SECONDS."""

    def __init__(self, title: str, total: float | None) -> None:
        self._title, self._total, self._reached = title, total, 0.0
        self._started = self._printed = time.monotonic()

    def __call__(self, done: float, /) -> None:
        self._reached += done
        now, reached, total = time.monotonic(), self._reached, self._total
        if now - self._printed < PLAIN_SECONDS or (total is not None and not 0 < reached < total):
            return
        self._printed = now
        if total is None:
            said = f"{reached:,.0f} in {now - self._started:,.0f} s"
        else:
            left = (now - self._started) * (total - reached) / reached
            said = f"{100 * reached / total:.0f} %, {duration(left)} left"
        print(f"{self._title}: {said}", file=sys.stderr, flush=True)

    def skip(self, done: float, /) -> None:
        if self._total is not None:
            self._total -= done
