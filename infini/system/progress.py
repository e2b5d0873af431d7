"""Messages on standard error: lines, warnings, and the progress of work with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

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


@contextmanager
def progress_bar(
    title: str, total: float | None, shown: bool = True, between: bool = False
) -> Iterator[Callable[[float], None]]:
    """A progress bar. The context gives a function that advances it by a part of `total`.

    total: None if unknown; the bar then shows the part done and the time elapsed. shown: if false, a line is printed
    every PLAIN_SECONDS instead. between: draw only when the bar advances, so that no thread disturbs timings.
    """
    if not shown:
        yield _plain(title, total)
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

        def advance(done: float) -> None:
            bar.advance(task, done)
            if between:
                bar.refresh()

        yield advance


def _plain(title: str, total: float | None) -> Callable[[float], None]:
    started = printed = time.monotonic()
    reached = 0.0

    def advance(done: float) -> None:
        nonlocal printed, reached
        reached += done
        now = time.monotonic()
        if now - printed < PLAIN_SECONDS or (total is not None and not 0 < reached < total):
            return
        printed = now
        if total is None:
            said = f"{reached:,.0f} in {now - started:,.0f} s"
        else:
            left = (now - started) * (total - reached) / reached
            said = f"{100 * reached / total:.0f} %, {duration(left)} left"
        print(f"{title}: {said}", file=sys.stderr, flush=True)

    return advance
