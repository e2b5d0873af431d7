"""Notation of lengths, depths and parts: `32K`, `1m`, integers; `start`, `middle`, `end`, 0 to 1, `grid`; `2/4`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infini.errors import InputError

HISTORY_SEGMENTS = 3
"""Segments per piece of a long history (see infini.training.additions.long_history)."""

NAMED_DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}
GRID = tuple(round(0.05 * step, 2) for step in range(21))
"""Depths of `depth=grid`, as in needle-in-a-haystack tests."""


LONGEST = 2**40
"""The largest length in tokens; its tokens and bytes fit into 64-bit integers."""


def parse_length(text: str | int, key: str = "length") -> int:
    """Number of tokens: `32K` or `32k` is 32,768, `1M` or `1m` is 1,048,576, and a plain integer is itself.

    Raises InputError, naming the setting `key`, for anything else and for more than LONGEST.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,14})([KMkm]?)", str(text)) if isinstance(text, str | int) else None
    if match is None:
        allowed = (
            "must be a positive integer, or one followed by K (1,024) or M (1,048,576), for example 131072, 32K or 1M"
        )
        raise InputError(f"{key}={text!r}: {allowed}{_meant(str(text))}")
    tokens = int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2].upper()]
    if tokens > LONGEST:
        raise InputError(f"{key}={text!r}: must be at most {format_length(LONGEST)} tokens")
    return tokens


def _meant(text: str) -> str:
    """`; did you mean 1000000?` for 1e6, `... 32K` for 32kb or 32X; else, as for the larger units G, B and T, an empty
    string."""
    number = re.fullmatch(r"([1-9][0-9]{0,11})([A-Za-z])[A-Za-z]?", text)
    if number is not None and number[2] not in "eEgGbBtT":
        return f"; did you mean {number[1]}{'M' if number[2] in 'mM' else 'K'}?"
    try:
        value = float(text)
    except ValueError:
        return ""
    return f"; did you mean {int(value)}?" if value.is_integer() and 1 <= value <= LONGEST else ""


def format_length(tokens: int) -> str:
    """A length in its shortest notation: 32K for 32,768."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def parse_lengths(values: Sequence[str | int], key: str = "length") -> list[int]:
    """Distinct lengths in tokens, in the order given."""
    if not values:
        raise InputError(f"{key}=[]: must name at least one length, for example 32K")
    return list(dict.fromkeys(parse_length(value, key) for value in values))


def parse_depths(values: Sequence[str | float], key: str = "depth") -> dict[str, float]:
    """Name -> fraction of the filler before the key, in the order given.

    If two values mean one place, as start and 0 do, the first one names it. Raises InputError, naming the setting
    `key`, for other values, and for two places that have the same name after rounding.
    """
    names: dict[float, str] = {}
    for value in values:
        if value == "grid":
            found = {depth: f"{depth:g}" for depth in GRID}
        elif isinstance(value, str) and value in NAMED_DEPTHS:
            found = {NAMED_DEPTHS[value]: value}
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            found = {float(value): f"{value:g}"}
        else:
            raise InputError(f"{key}={value!r}: must be start, middle, end, a number from 0 to 1, or grid")
        for depth, name in found.items():
            names.setdefault(depth, name)
    if not names:
        raise InputError(f"{key}=[]: must name at least one place, for example start")
    depths: dict[str, float] = {}
    for depth, name in names.items():
        if (other := depths.setdefault(name, depth)) != depth:
            raise InputError(f"{key}={other!r}, {depth!r}: equal after rounding to {name}; give one")
    return depths


def parse_part(text: object) -> tuple[int, int] | None:
    """Number and count of a part of an evaluation: `2/4` is (2, 4), the second of four. None is the whole evaluation.

    Raises InputError for anything else.
    """
    if text is None:
        return None
    match = re.fullmatch("([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", str(text))
    number, count = (int(match[1]), int(match[2])) if match else (1, 0)
    if number > count:
        raise InputError(f"part={text!r}: must be part/number of parts, for example 2/4 (1/4 to 4/4), or null")
    return number, count
