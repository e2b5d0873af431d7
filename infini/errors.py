"""Errors a user can fix, and the hint that goes with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong: a one-line message, shown without a traceback, with exit code 2."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the option nearest to `word`, or an empty string when none is near."""
    nearest = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
