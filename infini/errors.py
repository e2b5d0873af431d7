"""Errors a user can fix, the hint that goes with them, and the checks that raise them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infini.records import RunRecord


class InputError(ValueError):
    """Something the user gave is wrong: a one-line message, shown without a traceback, with exit code 2."""


class DivergedError(InputError):
    """A training whose loss, weights or validation result is not finite or overflows a float.

    step: the optimizer step at which this was detected. record: the run record of the training, once it is written.
    """

    def __init__(self, reason: str, step: int = 0, record: RunRecord | None = None) -> None:
        super().__init__(reason)
        self.step, self.record = step, record


class BusyError(InputError):
    """Another process is doing this work. path: the file that it has locked."""

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(reason)
        self.path = path


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the option nearest to `word`; an empty string when none is near."""
    option = nearest(word, options)
    return f"; did you mean {option!r}?" if option else ""


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option nearest to `word`, preferably one that begins with it; None when none is near. Upper and lower case
    count as the same."""
    known, word = {option.casefold(): option for option in options}, word.casefold()
    begins = sorted((option for option in known if len(word) > 2 and option.startswith(word)), key=len)
    # Of a longer word more than half: `linear` has three letters of six in common with `cosine`, `c5` one with `c4`.
    near = begins or difflib.get_close_matches(word, known, n=1, cutoff=0.5 if len(word) < 4 else 0.51)
    return known[near[0]] if near else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises InputError `<key>=<value!r>: <allowed>` unless `condition` holds."""
    if not condition:
        raise InputError(f"{key}={value!r}: {allowed}")


def at_least(group: str, config: object, minimum: float, *names: str) -> None:
    """Raises InputError for the first field in `names` of a group that is below `minimum`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= minimum, f"{group}.{name}", value, f"must be at least {minimum}")


def one_of(key: str, value: object, options: Sequence[str]) -> None:
    """Raises InputError, with all options and the nearest of them, unless `value` is one of `options`."""
    if value not in options:
        hint = did_you_mean(str(value), options)
        raise InputError(f"{key}={value!r}: must be one of {', '.join(options)}{hint}")


def lone_surrogate(text: str) -> str | None:
    """The first lone surrogate in `text`, as written in JSON; None where there is none. JSON can contain them, UTF-8
    cannot."""
    found = re.search("[\ud800-\udfff]", text)
    return None if found is None else f"\\u{ord(found[0]):04x}"


_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
    "array is too big",
    "Maximum allowed dimension exceeded",
)
"""Texts by which torch and numpy report, without a type of its own, that a tensor is too large."""


def too_large(error: BaseException) -> str | None:
    """One line for sizes that do not fit into memory; None for other errors."""
    if not isinstance(error, MemoryError) and not any(said in str(error) for said in _NO_MEMORY):
        return None
    return (
        "these sizes do not fit into memory; lower dims.d_model, dims.d_ff, dims.n_layers, recipe.batch_size, "
        "recipe.segments_per_sequence, scale.vocab_size or task.examples"
    )
