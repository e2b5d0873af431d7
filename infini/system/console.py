"""Consoles for lines of text."""

from __future__ import annotations

from rich.console import Console


def plain_console(stderr: bool = True) -> Console:
    """A console that prints texts as they are, in one line each: brackets are no markup, and numbers get no colour."""
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print a warning."""
    console.print(text, style="bold yellow")
